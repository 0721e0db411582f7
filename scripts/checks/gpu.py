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
from pathlib import Path

from checks.report import Report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--self", action="store_true", dest="device", help="the device alone")
    parser.add_argument("--kernels", nargs="?", const="", metavar="WORD", help="kernels alone")
    parser.add_argument("--choice", action="store_true", help="the choice of tokens alone")
    parser.add_argument("--steady", action="store_true", help="updates and growth alone")
    parser.add_argument("--graphs", action="store_true", help="graphs as wholes alone")
    parser.add_argument("--races", action="store_true", help="early starts alone")
    parser.add_argument("--speed", action="store_true", help="what is beside a step alone")
    parser.add_argument("--sanitize", nargs="?", const="", metavar="TOOL",
                        help="memcheck and racecheck, or one of them")
    parser.add_argument("--loop", nargs="?", const="", metavar="FILE", help="loops alone")
    parser.add_argument("--shift", nargs="?", const="", metavar="FILE", help="shifts alone")
    parser.add_argument("--branches", action="store_true", help="launches side by side alone")
    parser.add_argument("--models", type=Path, metavar="DIR", help="all, with these GGUF files")
    options = parser.parse_args()
    wanted = (options.device, options.kernels is not None, options.choice, options.steady,
              options.graphs, options.races, options.speed, options.sanitize is not None,
              options.loop is not None, options.shift is not None, options.branches, options.models)
    if not any(wanted):
        parser.error("give --self, --kernels, --choice, --steady, --graphs, --races, --speed, "
                     "--sanitize, --loop, --shift, --branches or --models DIR")
    report = Report()
    if options.device or options.models:
        from checks import selftest

        selftest.run(report)
    if options.kernels is not None or options.models:
        from checks import kernels

        kernels.run(report, options.kernels or "")
    if options.choice or options.models:
        from checks import choice

        choice.run(report)
    if options.steady or options.models:
        from checks import steady

        steady.run(report)
    if options.graphs or options.models:
        from checks import graphs

        graphs.run(report)
    if options.races or options.models:
        from checks import race

        race.run(report)
    if options.speed or options.models:
        from checks import speed

        speed.run(report)
    if options.sanitize is not None:
        from checks import sanitize

        sanitize.run(report, options.sanitize)
    if options.loop is not None or options.models:
        from checks import loop

        loop.run(report, Path(options.loop) if options.loop else None)
    if options.shift is not None or options.models:
        from checks import shift

        shift.run(report, Path(options.shift) if options.shift else None)
    if options.branches or options.models:
        from checks import branches

        branches.run(report)
    if options.models:
        from checks import parity

        parity.run(report, sorted(options.models.glob("*.gguf")))
    print(f"\n{report.table()}")
    return 1 if report.failed else 0
