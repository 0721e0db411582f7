"""Measures a model on a device: prompt and decode speed by graph mode, against what memory allows.

The choice of the token is part of a decode step's time. Returns plain data, prints nothing.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from llamagraph.bench_facts import facts
from llamagraph.bench_result import (
    Case,
    Result,
    Step,
    against_ceiling,
    against_floor,
    context_of,
    latencies,
    speeds,
)
from llamagraph.execute import EXECUTORS
from llamagraph.gguf.reader import GGUFFile
from llamagraph.kernels.matrix_probe import matrix_ceiling
from llamagraph.kernels.probe import read_bandwidth
from llamagraph.planner import ROW_BUCKETS, prompt_steps
from llamagraph.program.device import Device
from llamagraph.program.launch import Work
from llamagraph.runner import Progress, Runner
from llamagraph.text.vocabulary import Keys, read_vocabulary

PARTS = {"capture_ms": "record", "instantiate_ms": "instantiate", "upload_ms": "upload"}
WARM_SECONDS = 0.3  # of work before the first sample: a GPU's clock rises under load


class Run(NamedTuple):
    """A case that has run: its time, the launches changed, and the token of its last step."""

    ns: int
    updates: int
    token: int


def bench(file: GGUFFile, device: Device, cases: Sequence[Case], modes: Sequence[str],
          repetitions: int = 5, *, warmup: bool = True, n_ctx: int | None = None,
          before: Callable[[Case], None] = lambda case: None, **options: Any) -> Iterator[Result]:
    """Results as they come: every case in every mode. Cases of a depth should follow each other.

    The KV cache at a depth is filled once, for all its cases, modes and repetitions. `n_ctx` None
    takes what the cases need; LlamaGraphError where they need more. `before(case)` is called before
    each case, `options` are those of `Subject`. The device stays open.
    """
    subject = Subject(file, device, context_of(cases, n_ctx), **options)
    try:
        for case in cases:
            before(case)
            yield from subject.measure(case, modes, repetitions, warmup)
    finally:
        subject.close()


@contextmanager
def no_collections() -> Iterator[None]:
    """Without Python's search for garbage, as `timeit` does it: none of the modes makes any."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def random_tokens(file: GGUFFile, position: int, n: int) -> list[int]:
    """The same for the same position every time; BOS at the very start, where the model adds it."""
    n_vocab = file.tensors["token_embd.weight"].shape[0]
    tokens = np.random.default_rng(position).integers(0, n_vocab, n).tolist()
    if position == 0 and "tokenizer.ggml.model" in file.metadata:
        vocabulary = read_vocabulary(Keys(file.metadata, str(file.path)))
        if vocabulary.add_bos and vocabulary.bos_id is not None:
            tokens[0] = vocabulary.bos_id
    return tokens


class Subject:
    """A loaded model to measure, on a device that stays open. `asked`: fields of its results.

    `type_k` and `type_v` are the KV cache's types, as the planner takes them.
    """

    def __init__(self, file: GGUFFile, device: Device, n_ctx: int, *,
                 asked: Mapping[str, Any] | None = None, probe_bytes: int | None = None,
                 progress: Progress | None = None, warn: Callable[[str], None] = lambda _: None,
                 type_k: str | None = None, type_v: str | None = None):
        self.bandwidth, self.ceiling = read_bandwidth(device, probe_bytes), matrix_ceiling(device)
        self.file, self.device = file, device
        self.runner = Runner(file, device, "stream", n_ctx, progress, warn, type_k=type_k,
                             type_v=type_v)
        default = {"n_threads": 1, "devices": "auto"}
        self._facts = {**facts(file, self.runner), **default, **(asked or {})}
        self._depth = 0
        self._tokens: dict[tuple[int, int], list[int]] = {}

    def close(self) -> None:
        self.runner.close_executors()

    def measure(self, case: Case, modes: Sequence[str], repetitions: int = 5,
                warmup: bool = True) -> list[Result]:
        """The case in every mode, a repetition of each in turn, so that no mode has better luck.

        The graphs are made anew; the warm-up passes that and the first replay.
        """
        when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._fill(case.n_depth)
        self.runner.close_executors()
        if warmup:
            self._warm_up(case, modes)
        with no_collections():
            rounds = [[self.repeat(case, mode) for mode in modes] for _ in range(repetitions)]
            runs = zip(*rounds, strict=True)
            return [Result(**self._facts, **asdict(case), test_time=when,
                           last_token=done[-1].token, **self._figures(case, mode, done))
                    for mode, done in zip(modes, runs, strict=True)]

    def _fill(self, depth: int) -> None:
        if depth != self._depth:
            self.runner.use("stream")
            self.runner.most_rows = ROW_BUCKETS[-1]
            self.runner.reset()
            if depth:
                self.runner.prefill(random_tokens(self.file, 0, depth))
            self._depth = depth

    def _warm_up(self, case: Case, modes: Sequence[str]) -> None:
        """Every mode once, and on until the device has been busy for a while (a CPU needs none)."""
        until = time.perf_counter() + WARM_SECONDS * self.device.queue.ahead
        while True:
            for mode in modes:
                self.repeat(case, mode)
            if time.perf_counter() >= until:
                return

    def _updates(self) -> int:
        return sum(e.updates for e in self.runner.executors.values())

    def start(self, case: Case, mode: str) -> list[int]:
        """Back to the depth; the prompt, or the token that the first decode step reads.

        Graphs that decode get the arguments of that step, for the way back is no token's cost; a
        loop has those of its last step all the time.
        """
        runner = self.runner
        runner.use(mode)
        runner.most_rows = case.n_ubatch
        runner.reset(case.n_depth)
        tokens = self._random(case.n_depth, max(1, case.n_prompt))
        if not case.n_prompt:
            runner.write_tokens(tokens)
            runner.device.memory.write(runner.io["n_rows"], [1])
            if len(runner.executors) and runner.mode != "loop":
                runner.decode(1)
                runner.reset(case.n_depth)
        runner.device.queue.wait()
        return tokens

    def _random(self, position: int, n: int) -> list[int]:
        key = position, n
        if key not in self._tokens:
            self._tokens[key] = random_tokens(self.file, position, n)
        return self._tokens[key]

    def repeat(self, case: Case, mode: str) -> Run:
        """The case once, up to the host's reading of the last token."""
        runner, tokens = self.runner, self.start(case, mode)
        before, start = self._updates(), time.perf_counter_ns()
        if case.n_prompt:
            runner.prefill(tokens)
        runner.decode(case.n_gen)
        if runner.mode == "loop":
            runner.device.queue.wait()  # an answer's loop is looked at now and then
        token = runner.chosen(runner.n_past)
        return Run(time.perf_counter_ns() - start, self._updates() - before, token)

    def watch(self, case: Case, mode: str) -> list[Step]:
        """The case once more, each launch of steps with nothing else queued.

        A loop is one launch; its steps have equal shares of the time.
        """
        runner, tokens = self.runner, self.start(case, mode)
        if case.n_prompt:
            runner.write_tokens(tokens)
        wait, steps = runner.device.queue.wait, []
        turns = [case.n_gen] if runner.mode == "loop" and case.n_gen else [1] * case.n_gen
        prompt = [(*step, 1) for step in prompt_steps(case.n_prompt, case.n_ubatch)]
        rows = [*prompt, *((1, "last", n) for n in turns)]
        for i, (n_rows, logits, n_steps) in enumerate(rows):
            if i < len(prompt):  # later the step before has set it
                runner.device.memory.write(runner.io["n_rows"], [n_rows])
            wait()
            start = time.perf_counter_ns()
            executor = runner.step(n_rows, logits, "greedy", n_steps)
            queued = (time.perf_counter_ns() - start) / n_steps
            wait()
            done = (time.perf_counter_ns() - start) / n_steps
            for kv_len in range(runner.n_past - n_steps + 1, runner.n_past + 1):
                work = Work(n_rows, kv_len)
                launches = executor.program.launches
                n_bytes = sum(sum(launch.traffic(work)) for launch in launches)
                flops = sum(launch.flops(work) for launch in launches)
                steps.append(Step(n_rows, queued, done, n_bytes, flops,
                                  executor.n_queued / n_steps, executor))
        return steps

    def _figures(self, case: Case, mode: str, runs: Sequence[Run]) -> dict[str, Any]:
        """The measured fields of the mode."""
        samples = firsts = [run.ns for run in runs]
        if case.n_gen:
            prompt = replace(case, n_prompt=max(1, case.n_prompt), n_gen=0)
            firsts = [self.repeat(prompt, mode).ns for _ in runs]
        steps = self.watch(case, mode)
        last, executors = steps[-1].executor, self.runner.executors.values()
        made = [self.device.graphs.times(graph) for e in executors for graph in e.graphs]
        return {
            "graph_mode": next(n for n, kind in EXECUTORS.items() if type(last) is kind),
            "avg_ttft_ns": round(statistics.mean(firsts)),
            "node_updates": round(statistics.mean(run.updates for run in runs)),
            **speeds(case.n_tokens, samples),
            **latencies(case, steps),
            **against_floor(case.n_tokens, samples, sum(s.n_bytes for s in steps), self.bandwidth),
            **against_ceiling(samples, sum(s.flops for s in steps), self.ceiling),
            "n_nodes": last.n_nodes, "n_queued": steps[-1].n_queued,
            "n_launches": len(last.program.launches),
            **{field: 1e3 * sum(times.get(part, 0.0) for times in made)
               for field, part in PARTS.items()},
            "prepare_ms": 1e3 * sum(e.prepare_seconds for e in executors),
            "graph_bytes": sum(e.size() for e in executors),
        }
