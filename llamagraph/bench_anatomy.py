"""Measures what a decode step consists of, for the comparison of modes; see `bench_compare.py`.

All of it through what every device has: captured graphs, replayed and timed by its own clock.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from llamagraph.bench import Subject
from llamagraph.bench_compare import Anatomy, Comparison, Timed, compare
from llamagraph.bench_result import Case, context_of
from llamagraph.gguf.reader import GGUFFile
from llamagraph.kernels.attention import attention_vars
from llamagraph.kernels.probe import Clock, nothing
from llamagraph.program.device import Device
from llamagraph.program.launch import Work

SAMPLES, REPLAYS = 3, 20


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
    program, idle = subject.runner.decode(case.n_gen).program, nothing(device)
    driver, python = (device.queue.launch_cost(idle) if hasattr(device.queue, "launch_cost")
                      else (None, None))
    middle = case.n_depth + case.n_gen // 2
    vars = attention_vars(device.target, middle + 1)
    bound = [device.queue.bind(launch.resolve(vars, device.memory.address))
             for launch in program.launches]
    step = _seconds(subject, bound, case.n_depth, case.n_gen)
    gap = _seconds(subject, [idle] * len(bound), case.n_depth, REPLAYS, moves=False) / len(bound)
    rounds = min(REPLAYS, case.n_gen)
    times = _launch_ns(subject, bound, middle - rounds // 2, rounds, 1e9 * step) if timeline else []
    work = Work(1, middle + 1)
    return Anatomy(
        len(bound), 1e9 * step, 1e9 * gap, None if driver is None else 1e9 * driver,
        None if python is None else 1e9 * python,
        tuple(Timed(launch.label, launch.kernel.name, ns, sum(launch.traffic(work)))
              for launch, ns in zip(program.launches, times, strict=bool(times))),
    )


def _launch_ns(subject: Subject, bound: Sequence[Any], first: int, rounds: int, step: float
               ) -> list[float]:
    """Each launch of a step: from the end of the one before to its own, by the device's clock.

    A launch that is repeated by itself finds its weights in the cache. So whole steps are replayed,
    with a stamp of the time behind every launch; all stamps alike have the time that such a step
    takes longer than one without them.
    """
    clock = Clock(subject.device, SAMPLES * rounds * (len(bound) + 1))
    stamped = [clock.stamp, *chain.from_iterable((b, clock.stamp) for b in bound)]
    _seconds(subject, stamped, first, rounds)
    stamps = clock.read().reshape(-1, len(bound) + 1)
    times = np.median(np.diff(stamps, axis=1), axis=0)
    return np.maximum(0, times - (times.sum() - step) / len(bound)).tolist()


def _seconds(subject: Subject, launches: Sequence[Any], first: int, n: int, moves: bool = True
             ) -> float:
    """Of the launches as a graph that is replayed n times, by the device's clock; a median.

    The host does nothing but replay, so that the device need not wait. `moves`: a replay is a step
    of the sequence, the first one that of the token at `first`.
    """
    device, runner, samples = subject.device, subject.runner, []
    graph = device.graphs.capture(lambda: [device.queue.launch(b) for b in launches])[0]

    def work() -> None:
        for _ in range(n):
            device.graphs.replay(graph)

    try:
        for _ in range(SAMPLES):
            runner.reset(min(first, runner.n_past))
            if moves:
                runner.kv.grow(device.memory, first + n)
                device.memory.write(runner.io["pos"], [first])
                runner.n_past = first + n
            samples.append(device.queue.time(work) / n)
        return statistics.median(samples)
    finally:
        device.graphs.close(graph)
