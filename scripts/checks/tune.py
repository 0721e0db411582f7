"""Measures on this GPU how a decode step's products are best shared out among warps.

    scripts/tune [SHAPE:QUANT...]       default: 135m:q8_0 1b:q4_k_m 1b:f16 8b:q4_k_m

Each matrix is tried with every TEAMS and SPLIT inside the whole step, where the kernels before and
after it are as in use. What is faster goes to the folder `tuning` of the cache, where the device
finds it when it is opened.
"""

import argparse
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace

from llamagraph.devices import open_device
from llamagraph.devices.cuda.tuning import read_tuning, tuning_file, write_tuning
from llamagraph.errors import LlamaGraphError
from llamagraph.execute.graph import Captured
from llamagraph.gguf.synthetic import SyntheticFile
from llamagraph.kernels.attention import attention_vars
from llamagraph.kernels.shares import matrix_key, possible_shares
from llamagraph.planner import Planner
from llamagraph.program.launch import Buffer, Launch, Program, StepKey
from llamagraph.program.target import Target
from llamagraph.runner import Runner

MODELS = ("135m:q8_0", "1b:q4_k_m", "1b:f16", "8b:q4_k_m")
DEPTH, N_CTX = 100, 1024
REPLAYS, REPEATS = 20, 5
FEWEST_THREADS = 96
WORTH = 0.997  # of the time so far: what must be reached

Choice = tuple[str, int, int]


def product(launch: Launch) -> tuple[list[Buffer], int] | None:
    """The matrices of a product with one row, and the parts that it has."""
    if not launch.kernel.name.startswith("gemv"):
        return None
    weights = [a for a in launch.args if isinstance(a, Buffer) and "rows" in a.layout]
    return weights, 2 if launch.kernel.name == "gemv_norm_gated" else 1


def choices(program: Program) -> dict[str, list[Choice]]:
    """What can be tried for each of the program's matrices."""
    found: dict[str, list[Choice]] = {}
    for weights, parts in filter(None, map(product, program.launches)):
        key = matrix_key(weights, parts)
        if key not in found:
            found[key] = [
                (key, s["TEAMS"], s["SPLIT"]) for s in possible_shares(weights, parts)
                if 32 * parts * s["TEAMS"] * s["SPLIT"] >= FEWEST_THREADS
            ]
    return found


class Tuner:
    """A model on the GPU whose decode step is planned, captured and timed again and again."""

    def __init__(self, spec: str, tuning: tuple[Choice, ...]):
        self._device = open_device("cuda", warn=print)
        self._file = SyntheticFile(spec)
        self._runner = Runner(self._file, self._device, "capture", N_CTX)
        self._runner.prefill(list(range(DEPTH)))
        self.tuning = {c[0]: c for c in tuning}

    def program(self, choice: Choice | None = None) -> Program:
        """The decode step with what is known, and one choice instead."""
        chosen = self.tuning | ({choice[0]: choice} if choice else {})
        target: Target = replace(self._device.target, tuning=tuple(chosen.values()))
        return Planner(self._file, target, N_CTX).plan(StepKey())

    def seconds(self, program: Program) -> float:
        """The least of a token's time over the repeats, each over many tokens."""
        vars, memory = attention_vars(self._device.target, DEPTH + 1), self._device.memory
        executor = Captured(self._device, program, vars)
        times = []
        for _ in range(REPEATS):
            memory.write(self._runner.io["pos"], [DEPTH])
            times.append(self._device.queue.time(
                lambda: [executor.run(vars) for _ in range(REPLAYS)]
            ))
        executor.close()
        return min(times) / REPLAYS

    def tune(self) -> Iterator[str]:
        """Improves `tuning` matrix by matrix; a line a matrix."""
        best = self.seconds(self.program())
        yield f"{self._file.path.name}: {best * 1e6:.1f} us a token before"
        for key, tried in choices(self.program()).items():
            programs = {c: self.program(c) for c in tried}
            with suppress(LlamaGraphError):  # one that does not compile shows where it is used
                self._device.queue.load(x.kernel for p in programs.values() for x in p.launches)
            times = {c: self.seconds(p) for c, p in programs.items()}
            choice = min(times, key=lambda c: times[c])
            if times[choice] < WORTH * best:
                best, self.tuning[key] = times[choice], choice
            taken = "TEAMS {1}, SPLIT {2}".format(*c) if (c := self.tuning.get(key)) else "the rule"
            yield f"  {key}: {best * 1e6:.1f} us with {taken}, of {len(tried)} tried"

    def close(self) -> None:
        self._runner.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="SHAPE:QUANT", default=MODELS)
    for spec in parser.parse_args().models:
        device = open_device("cuda", warn=print)
        path = tuning_file(device.gpu.name)
        device.close()
        with closing(Tuner(spec, read_tuning(path, print))) as tuner:
            for line in tuner.tune():
                print(line, flush=True)
            write_tuning(path, tuple(tuner.tuning.values()))
    print(f"written to {path}")
    return 0
