"""Measures what a decode step consists of, for the comparison of modes; see `bench_compare.py`.

All of it through what every device has: captured graphs, replayed and timed by its own clock.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from llamagraph.bench import Subject
from llamagraph.bench_compare import Anatomy, Comparison, Timed, compare
from llamagraph.bench_result import Case, context_of
from llamagraph.gguf.reader import GGUFFile
from llamagraph.kernels.attention import attention_vars
from llamagraph.kernels.probe import nothing
from llamagraph.program.device import Device
from llamagraph.program.launch import Work

SAMPLES, REPEATS = 3, 4  # of a part of a step behind whole ones
REPLAYS = 20  # of launches that do nothing


def comparisons(file: GGUFFile, device: Device, cases: Sequence[Case], modes: Sequence[str],
                repetitions: int = 5, *, timeline: bool = False, warmup: bool = True,
                n_ctx: int | None = None, before: Callable[[Case], None] = lambda case: None,
                **options: Any) -> Iterator[Comparison]:
    """Decode cases as `bench` measures them, each with its anatomy, as they come.

    `modes` must have the stream; `timeline` asks for every launch's time, which takes seconds.
    """
    subject = Subject(file, device, context_of(cases, n_ctx), **options)
    try:
        for case in cases:
            assert case.n_gen and not case.n_prompt, "decode steps are compared, no prompts"
            before(case)
            results = subject.measure(case, modes, repetitions, warmup)
            yield compare(results, anatomy(subject, case, timeline))
    finally:
        subject.close()


def anatomy(subject: Subject, case: Case, timeline: bool = False) -> Anatomy:
    """Of the case's decode step, replayed as a captured graph."""
    device = subject.device
    subject.start(case, "capture")
    program, idle = subject.runner.decode(1).program, nothing(device)
    driver, python = (device.queue.launch_cost(idle) if hasattr(device.queue, "launch_cost")
                      else (None, None))
    vars = attention_vars(device.target, case.n_depth + 1)
    bound = [device.queue.bind(launch.resolve(vars, device.memory.address))
             for launch in program.launches]
    step = _seconds(subject, case, [bound], case.n_gen)
    gap = _seconds(subject, case, [[idle] * len(bound)], REPLAYS, moves=False) / len(bound)
    times = _launch_seconds(subject, case, bound, idle, gap, step) if timeline else []
    work = Work(1, case.n_depth + 1)
    return Anatomy(
        len(bound), 1e9 * step, 1e9 * gap, None if driver is None else 1e9 * driver,
        None if python is None else 1e9 * python,
        tuple(Timed(launch.label, launch.kernel.name, max(0.0, 1e9 * s), sum(launch.traffic(work)))
              for launch, s in zip(program.launches, times, strict=bool(times))),
    )


def _launch_seconds(subject: Subject, case: Case, bound: Sequence[Any], idle: Any, gap: float,
                    step: float) -> list[float]:
    """Each launch of a step.

    A launch that is repeated by itself finds its weights in the cache. So a graph of the step's
    first i launches is replayed behind whole steps, for every i: what the i-th adds is its time.
    The last one moves the position on, and has the rest of the step. A device whose launches return
    when they are done is asked for each.
    """
    queue, n = subject.device.queue, min(REPEATS, case.n_gen)
    if not queue.ahead:
        subject.start(case, "stream")
        subject.runner.n_past += 1  # as the last launch moves the device's
        return [queue.time(partial(queue.launch, b)) for b in bound]
    alone = _seconds(subject, case, [bound], n)
    parts = [[idle], *(bound[:i] for i in range(1, len(bound)))]
    sums = [_seconds(subject, case, [bound, part], n) - alone for part in parts]
    sums[0] -= gap
    return [after - before for before, after in pairwise([*sums, step])]


def _captured(device: Device, part: Sequence[Any]) -> Any:
    return device.graphs.capture(lambda: [device.queue.launch(b) for b in part])[0]


def _seconds(subject: Subject, case: Case, parts: Sequence[Sequence[Any]], n: int,
             moves: bool = True) -> float:
    """The parts as graphs behind each other, by the device's clock: the mean of n such rounds.

    The host does nothing but replay, so that the device need not wait. `moves`: a round is one step
    of the sequence.
    """
    device, runner = subject.device, subject.runner
    graphs = [_captured(device, part) for part in parts]

    def work() -> None:
        for _ in range(n):
            for graph in graphs:
                device.graphs.replay(graph)

    try:
        samples = []
        for _ in range(SAMPLES):
            subject.start(case, "capture")
            if moves:
                runner.kv.grow(device.memory, case.n_depth + n)
                runner.n_past += n
            samples.append(device.queue.time(work) / n)
        return statistics.median(samples)
    finally:
        for graph in graphs:
            device.graphs.close(graph)
