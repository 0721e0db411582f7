"""What a token costs beside its step: the pause between two replays, and the choice of the token.

Uses synthetic models of real shapes; needs no file. The pause is seen by the GPU's own clock: a
stamp before a step's first kernel and one behind its last are nodes of the same graph.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from checks.parity import random_tokens
from checks.report import Report
from checks.sources import copy_sources, open_altered
from llamagraph.execute.graph import Captured
from llamagraph.gguf.synthetic import SyntheticFile
from llamagraph.kernels.attention import attention_vars
from llamagraph.program.launch import (
    Buffer,
    Geometry,
    InOut,
    Launch,
    Program,
    StepKey,
    dense,
    kernel,
)
from llamagraph.runner import Runner
from llamagraph.sampling import SamplingParams

MODELS = ("135m:q8_0", "1b:q4_k_m", "8b:q4_k_m")
SMALL = MODELS[:1]  # whose steps are so short that the pause shows
N_CTX, DEPTH, N_TOKENS = 16384, 16, 500
MOST_IDLE = 0.02  # of the time from step to step
CHOICES = 50  # of a token in a row
MOST_CHAIN = 15e-6  # seconds for the default chain
MOST_GREEDY = 6e-6

STAMP = r"""
// The time in nanoseconds, behind those that are there.
extern "C" __global__ void stamp(unsigned long long* times, unsigned* count) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (threadIdx.x == 0) times[(*count)++] = now;
}
"""


def _single(target: Any, *args: Any) -> Geometry:
    return Geometry((1, 1, 1), 32)


@kernel("stamp.cu", geometry=_single)
def stamp(times: InOut, count: InOut) -> None:
    """times[count] = now, as uint64; count += 1."""


TIMES = Buffer("times", "stamps", 0, 1 << 16, "U8", (1 << 16,))
COUNT = dense("count", "stamps", 1 << 16, (1,), "U32")


def stamped(program: Program) -> Program:
    """The step between two stamps, if it has one row."""
    if program.key.rows > 1:
        return program
    one = Geometry((1, 1, 1), 32)
    begin, end = (Launch(stamp, one, (TIMES, COUNT), label) for label in ("begin", "end"))
    return replace(program, launches=(begin, *program.launches, end))


@contextmanager
def stamped_runner(spec: str) -> Iterator[Runner]:
    with tempfile.TemporaryDirectory() as folder:
        sources = copy_sources(Path(folder, "csrc"), {"stamp.cu": ("", STAMP)})
        device = open_altered({}, sources)
        device.memory.reserve("stamps", COUNT.stop)
        device.memory.grow("stamps", 0, COUNT.stop)
        with closing(Runner(SyntheticFile(spec), device, "capture", N_CTX)) as runner:
            plan = runner.plan
            runner.plan = lambda key: stamped(plan(key))
            yield runner


def pauses(runner: Runner, decode: Callable[[], None]) -> tuple[float, float]:
    """Median pause between two steps and median time from step to step, in microseconds."""
    runner.device.memory.write(COUNT, [0])
    decode()
    runner.device.queue.wait()
    n = int(runner.device.memory.read(COUNT)[0])
    times = runner.device.memory.read(TIMES).view(np.uint64)[:n].reshape(-1, 2).astype(np.int64)
    pause = times[1:, 0] - times[:-1, 1]
    return float(np.median(pause[4:])) / 1e3, float(np.median(np.diff(times[4:, 0]))) / 1e3


def check_pauses(spec: str, report: Report) -> None:
    """Steps that are all queued, and steps as an answer has them, token by token."""
    with stamped_runner(spec) as runner:
        prompt = random_tokens(runner, DEPTH)

        def answer() -> None:
            runner.reset()
            list(runner.generate(prompt, SamplingParams(temp=0, seed=0), N_TOKENS))

        def queued() -> None:
            runner.reset()
            runner.prefill(prompt)
            for _ in range(N_TOKENS):
                runner.step(1, "last", "greedy")

        for name, decode in (("queued", queued), ("an answer", answer)):
            decode()
            pause, step = pauses(runner, decode)
            report.add("speed", f"pause between tokens, {spec}, {name}",
                       spec in SMALL or pause / step <= MOST_IDLE,
                       f"{pause:.2f} of {step:.1f} us, {pause / step:.1%}")


def seconds(runner: Runner, program: Program, n: int) -> float:
    """Of a replay, the least of a few runs over n of them."""
    vars, times = attention_vars(runner.device.target, DEPTH + 1), []
    executor = Captured(runner.device, program, vars)
    for _ in range(5):
        runner.device.memory.write(runner.io["pos"], [DEPTH])
        times.append(runner.device.queue.time(lambda: [executor.run(vars) for _ in range(n)]))
    executor.close()
    return min(times) / n


def check_choice(runner: Runner, report: Report) -> None:
    """The choice alone, many in a row, and what it adds to a whole step."""
    SamplingParams(seed=1).write(runner.device.memory, runner.io)
    runner.prefill(random_tokens(runner, DEPTH))
    whole, alone = {}, {}
    for sampler in ("greedy", "chain"):
        program = runner.plan(StepKey(sampler=sampler))
        whole[sampler] = seconds(runner, program, 100)  # leaves logits
        choices = replace(program, launches=program.launches[-1:] * CHOICES)
        alone[sampler] = seconds(runner, choices, 20) / CHOICES
    added = whole["chain"] - whole["greedy"]
    report.add("speed", f"greedy choice among {runner.n_vocab}", alone["greedy"] <= MOST_GREEDY,
               f"{alone['greedy'] * 1e6:.2f} us")
    report.add("speed", f"default chain among {runner.n_vocab}", alone["chain"] <= MOST_CHAIN,
               f"{alone['chain'] * 1e6:.2f} us; in a step {added * 1e6:.2f} us more than greedy")


def run(report: Report) -> None:
    with report.check("speed", "choice"), closing(
            Runner(SyntheticFile("1b:q4_k_m"), open_altered({}), "capture", N_CTX)) as runner:
        check_choice(runner, report)
    for spec in MODELS:
        with report.check("speed", spec):
            check_pauses(spec, report)
