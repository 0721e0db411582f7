"""Checks llamagraph on this machine's GPU: the device itself, every kernel, whole models.

    scripts/gpu-check --self             the device, with three tiny kernels of its own
    scripts/gpu-check --kernels [WORD]   every kernel, or those with WORD in the name
    scripts/gpu-check --choice           the choice of tokens against the host's
    scripts/gpu-check --steady           one executable over a long life
    scripts/gpu-check --graphs           graphs against their plans, made, updated and kept
    scripts/gpu-check --races            every kernel waits, and a kernel that does not is caught
    scripts/gpu-check --speed            the pause between tokens, and the choice of a token
    scripts/gpu-check --sanitize [TOOL]  steps and kernels under compute-sanitizer; slow
    scripts/gpu-check --loop [FILE]      whole answers in one launch, with FILE a model's too
    scripts/gpu-check --shift [FILE]     full contexts that go on, with FILE a model's too
    scripts/gpu-check --branches         launches side by side against a chain
    scripts/gpu-check --models DIR       all of it, with the models in DIR; at most 8 minutes

Needs no network. Golden data is looked for in $LLAMAGRAPH_GOLDEN. Ends in one table; the exit code
is 1 where a check has failed.
"""

import argparse
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from checks.report import Report


class Part(NamedTuple):
    """A group of checks: `run` of the module in this folder, behind --NAME."""

    name: str
    module: str
    help: str
    takes: str = ""  # what may follow the option
    of_all: bool = True  # whether --models runs it too

    def run(self, report: Report, value: str | None) -> None:
        given: tuple[object, ...] = (value or "",) if self.takes else ()
        if self.takes == "FILE":
            given = (Path(value) if value else None,)
        import_module(f"checks.{self.module}").run(report, *given)


PARTS = (
    Part("self", "selftest", "the device alone"),
    Part("kernels", "kernels", "kernels alone", "WORD"),
    Part("choice", "choice", "the choice of tokens alone"),
    Part("steady", "steady", "updates and growth alone"),
    Part("graphs", "graphs", "graphs as wholes alone"),
    Part("races", "race", "early starts alone"),
    Part("speed", "speed", "what is beside a step alone"),
    Part("sanitize", "sanitize", "memcheck and racecheck, or one of them", "TOOL", of_all=False),
    Part("loop", "loop", "loops alone", "FILE"),
    Part("shift", "shift", "shifts alone", "FILE"),
    Part("branches", "branches", "launches side by side alone"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for part in PARTS:
        if part.takes:
            parser.add_argument(f"--{part.name}", nargs="?", const="", metavar=part.takes,
                                help=part.help)
        else:
            parser.add_argument(f"--{part.name}", action="store_const", const="", help=part.help)
    parser.add_argument("--models", type=Path, metavar="DIR", help="all, with these GGUF files")
    options = vars(parser.parse_args())
    models = options.pop("models")
    if not models and all(value is None for value in options.values()):
        parser.error(f"give {', '.join(f'--{name}' for name in options)} or --models DIR")
    report = Report()
    for part in PARTS:
        if options[part.name] is not None or (models and part.of_all):
            part.run(report, options[part.name])
    if models:
        import_module("checks.parity").run(report, sorted(models.glob("*.gguf")))
    print(f"\n{report.table()}")
    return 1 if report.failed else 0
