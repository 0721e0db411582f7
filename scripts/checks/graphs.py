"""Graphs as wholes: what one costs to make, to update whole, or to keep; and what they hold.

Uses synthetic models of real shapes; needs no file. Inspecting holds each mode's graphs against the
plan, node by node, and counts what steps update.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from checks.parity import random_tokens
from checks.report import Report
from llamagraph.devices import open_device
from llamagraph.gguf.synthetic import SyntheticFile
from llamagraph.inspection import Inspection, Setting, inspect
from llamagraph.inspection_driver import hold
from llamagraph.planner import Planner, usual_keys
from llamagraph.program.launch import StepKey
from llamagraph.runner import Runner

N_CTX = 16384
SWITCHES = 40
BUCKETS = (16, 32)  # whose programs have the same nodes and edges
SETTINGS = {
    "decode": Setting(depth=100), "deep": Setting(depth=9000), "prompt": Setting(32, 100),
    "host": Setting(depth=100, sampler="host"), "chain": Setting(depth=100, sampler="chain"),
}


@cache
def file_of(spec: str) -> SyntheticFile:
    """Made once: its random blocks are what takes the time."""
    return SyntheticFile(spec)


@contextmanager
def runner_of(spec: str, mode: str, persist: bool = False) -> Iterator[Runner]:
    device = open_device("cuda", persist=persist, warn=print)
    with closing(Runner(file_of(spec), device, mode, N_CTX)) as runner:
        yield runner


def milliseconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def alternate(runner: Runner, limit: int) -> tuple[float, list[np.ndarray]]:
    """Prompts of two row buckets by turns: ms of each until it is done, and their logits."""
    runner.executors.close()
    runner.executors.limit = limit
    prompts = [random_tokens(runner, n - 1) for n in BUCKETS]
    times, found = [], []

    def prompt(tokens: list[int]) -> Any:
        runner.reset()
        executor = runner.prefill(tokens)
        runner.device.queue.wait()
        return executor

    for i in range(SWITCHES):
        started = time.perf_counter()
        executor = prompt(prompts[i % 2])
        times.append(1e3 * (time.perf_counter() - started))
        if i in (4, 5):
            found.append(runner.read_logits(executor))
    return statistics.median(times[4:]), found


def bytes_each(runner: Runner, key: StepKey, n: int = 48) -> float:
    """GPU memory of an executable, from many: it is taken in large pieces."""
    executor, memory = runner.executors[key], runner.device.memory
    free = memory.available()
    made = [executor._make()[0] for _ in range(n)]
    used = free - memory.available()
    for graph in made:
        runner.device.graphs.close(graph)
    return used / n


def switched(runner: Runner, key: StepKey) -> dict[str, float]:
    """Milliseconds of a switch to the program, by what is done."""
    plan = milliseconds(lambda: runner.plan(key))
    executor = runner.executors[key]
    bind = milliseconds(lambda: [runner.device.queue.bind(c) for c in executor._calls])
    times = runner.device.graphs.times(executor.graphs[0])
    replay = milliseconds(lambda: (executor.run(executor._vars), runner.device.queue.wait()))
    again = milliseconds(lambda: (executor.run(executor._vars), runner.device.queue.wait()))
    return {"plan": plan, "bind": bind, **{k: 1e3 * s for k, s in times.items()},
            "first replay": replay, "next replay": again}


def check_switching(report: Report, spec: str, mode: str) -> None:
    """One executable that is updated whole at each switch, against two that are kept."""
    with runner_of(spec, mode) as runner:
        keys = [StepKey(n) for n in BUCKETS]
        runner.prepare(keys)
        first = runner.device.graphs.times(runner.executors[keys[0]].graphs[0])
        one, a = alternate(runner, 1)
        two, b = alternate(runner, 2)
        held = bytes_each(runner, keys[1])
        runner.executors.close()
        runner.executors.limit = 1
        runner.prepare(keys[:1])
        runner.prefill(random_tokens(runner, 7))  # the weights are there before anything is timed
        spent = switched(runner, keys[1])
        same = all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        report.add("graphs", f"two row buckets, {spec}, {mode}", same and "update" in spent,
                   f"{runner.executors[keys[1]].n_nodes} nodes of {held / 1024:.0f} KiB; a prompt "
                   f"takes {one:.2f} ms with one executable, {two:.2f} ms with two; a switch: "
                   + ", ".join(f"{k} {ms:.3f}" for k, ms in spent.items()) + " ms; made anew: "
                   + ", ".join(f"{k} {1e3 * s:.3f}" for k, s in first.items()) + " ms")


def check_refusal(report: Report, mode: str) -> None:
    """Another topology: the driver refuses, one executable is made, and steps go on."""
    with runner_of("135m:q8_0", mode) as runner:
        runner.reset()
        runner.prefill(random_tokens(runner, 20))
        expected = runner.read_logits(runner.step(1, "last", "greedy"))
        runner.executors.close()
        runner.executors.limit = 1
        for _ in range(3):
            runner.reset()
            runner.prefill(random_tokens(runner, 20))
            executor = runner.step(1, "last", "greedy")
        found = runner.read_logits(executor)
        times = runner.device.graphs.times(executor.graphs[0])
        report.add("graphs", f"refused whole update, {mode}",
                   np.array_equal(found, expected) and "instantiate" in times
                   and len(runner.device.graphs._open) == len(executor.graphs),
                   f"{len(runner.device.graphs._open)} executables open")


def check_plan(report: Report, spec: str, mode: str, persist: bool) -> None:
    """A mode's graphs as the driver has them."""
    with runner_of(spec, mode, persist) as runner:
        for name, setting in SETTINGS.items():
            what = f"{spec}, {mode}, {name}{', l2' if persist else ''}"
            with report.check("graphs", what, timed=False):
                found = held(runner, spec, replace(setting, mode=mode))
                report.add("graphs", f"as planned: {what}", True, facts(found))


def held(runner: Runner, spec: str, setting: Setting, steps: int = 0) -> Inspection:
    planner = Planner(file_of(spec), runner.device.target, N_CTX)
    return hold(runner, inspect(planner, setting, steps))


def facts(found: Inspection) -> str:
    d, windows = found.totals["driver"], sum(n.l2_window is not None for n in found.nodes)
    return (f"{d['nodes']} nodes, {d['edges']} edges, {d['programmatic_edges']} programmatic, "
            f"{sum(n.priority for n in found.nodes)} preferred, {windows} windows, "
            f"{d['graph_bytes'] >> 10} KiB, "
            + ", ".join(f"{k} {v:.2f}" for k, v in d.items() if k.endswith("_ms")))


def check_steps(report: Report, mode: str) -> None:
    """600 steps that are run: which nodes were updated."""
    with runner_of(spec := "1b:q4_k_m", mode) as runner:
        for depth, expected in ((100, 48), (1100, 0)):
            found = held(runner, spec, Setting(depth=depth, mode=mode), 600).updates
            report.add("graphs", f"600 steps from {depth}, {mode}",
                       found.ran and found.node_updates == expected,
                       f"{found.node_updates} updates at {found.at} of {found.labels[:2]}")


def first_token(runner: Runner, tokens: list[int]) -> None:
    runner.prefill(tokens)
    runner.step(1, "last", "greedy")
    runner.chosen(len(tokens))


def check_prepare(report: Report, spec: str, n_prompt: int, prepared: bool) -> None:
    """What preparing costs, and the time to a first token with it and without."""
    with runner_of(spec, "capture") as runner:
        tokens, keys, ahead = random_tokens(runner, n_prompt), usual_keys(n_prompt, "greedy"), 0.0
        runner.device.queue.wait()
        if prepared:
            ahead = milliseconds(lambda: runner.prepare(keys, n_prompt + 1))
        took = milliseconds(lambda: first_token(runner, tokens))
        size = sum(e.size() for e in runner.executors.values())
        report.add("graphs", f"first token of {n_prompt}, {spec}, "
                   f"{'prepared' if prepared else 'lazy'}", True,
                   f"{ahead:.2f} ms ahead + {took:.2f} ms, {size >> 10} KiB")


def run(report: Report) -> None:
    for mode in ("capture", "build"):
        for spec in ("135m:q8_0", "1b:q4_k_m"):
            with report.check("graphs", f"switching {spec} {mode}"):
                check_switching(report, spec, mode)
        with report.check("graphs", f"refusal {mode}"):
            check_refusal(report, mode)
        with report.check("graphs", f"steps {mode}"):
            check_steps(report, mode)
    for mode in ("capture", "build", "partial"):
        for spec, persist in (("135m:q8_0", True), ("1b:q4_k_m", False)):
            with report.check("graphs", f"plan {spec} {mode}"):
                check_plan(report, spec, mode, persist)
    for n_prompt, prepared in ((20, False), (20, True), (500, False), (500, True)):
        with report.check("graphs", f"prepare {n_prompt}"):
            check_prepare(report, "1b:q4_k_m", n_prompt, prepared)
