"""Measures a model on a device: prompt and decode speed by graph mode, against what memory allows.

Cases and the fields of a result are llama-bench's as far as it has them; the choice of the token is
part of a decode step's time. Returns plain data, prints nothing.
"""

import math
import platform
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llamagraph.errors import LlamaGraphError
from llamagraph.gguf.reader import GGUFFile
from llamagraph.kernels.probe import read_bandwidth
from llamagraph.planner import ROW_BUCKETS, prompt_steps
from llamagraph.program.device import Device
from llamagraph.program.launch import Work
from llamagraph.runner import Progress, Runner
from llamagraph.text.vocabulary import Keys, read_vocabulary


@dataclass(frozen=True)
class Case:
    """A prompt, decode steps, or both, behind `n_depth` positions that are there already."""

    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_gen

    @property
    def name(self) -> str:
        """As llama-bench calls it: pp512, tg128, pp512+tg128, tg128 @ d4096."""
        parts = [f"{k}{n}" for k, n in (("pp", self.n_prompt), ("tg", self.n_gen)) if n]
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")


def cases_of(prompts: Sequence[int], gens: Sequence[int], pairs: Sequence[tuple[int, int]],
             depths: Sequence[int]) -> list[Case]:
    """Prompts, decode steps and pairs of both at every depth; a length of 0 is left out."""
    lengths = [(n, 0) for n in prompts] + [(0, n) for n in gens] + list(pairs)
    return [Case(p, g, depth) for depth in dict.fromkeys(depths) for p, g in lengths if p + g]


@dataclass(frozen=True)
class Result:
    """One case in one graph mode. Up to `samples_ts` the names and units are llama-bench's.

    `p50_ns`, `p95_ns` and `host_us_per_token` come from one more run in which the host waits after
    each launch: a token's time with the wait, and what the host spends before it (on a CPU all of
    it); a loop's are means. `bytes_per_token` is what the launches must read and write at least, in
    the file's types; the floor is that over the read bandwidth `read_gb_per_s`, measured in the
    same run. `node_updates` counts the launches that a repetition changed, `prepare_ms` is the
    making of all graphs that the case needs, `l2_persist` the bytes of cache that are set aside for
    weights. `last_token` is what the last step chose, equal in all modes.
    """

    cpu_info: str
    gpu_info: str
    backends: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    type_k: str
    type_v: str
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str
    avg_ns: int
    stddev_ns: int
    avg_ts: float
    stddev_ts: float
    samples_ns: list[int]
    samples_ts: list[float]
    graph_mode: str
    p50_ns: float
    p95_ns: float
    bytes_per_token: float
    read_gb_per_s: float
    gb_per_s: float
    pct_of_floor: float
    floor_ts: float
    host_us_per_token: float
    node_updates: int
    n_nodes: int
    n_launches: int
    prepare_ms: float
    graph_bytes: int
    l2_persist: int
    last_token: int

    @property
    def name(self) -> str:
        return Case(self.n_prompt, self.n_gen, self.n_depth).name


class Step(NamedTuple):
    """A step that was waited for: its rows, its times, the bytes that it had to move."""

    n_rows: int
    host_ns: int  # until it was queued
    ns: int  # until it was done
    n_bytes: int
    executor: Any


def bench(file: GGUFFile, device: Device, cases: Sequence[Case], modes: Sequence[str],
          repetitions: int = 5, *, n_ctx: int | None = None, n_threads: int = 1,
          probe_bytes: int | None = None, progress: Progress | None = None,
          warn: Callable[[str], None] = lambda _: None) -> Iterator[Result]:
    """Results as they come: every case in every mode. Cases of a depth should follow each other.

    The KV cache at a depth is filled once, for all its cases, modes and repetitions. `n_ctx` None
    takes what the cases need; LlamaGraphError where they need more. The device stays open.
    """
    longest = max(cases, key=lambda c: c.n_depth + c.n_tokens)
    if (needed := longest.n_depth + longest.n_tokens) > (n_ctx or needed):
        raise LlamaGraphError(f"{longest.name} needs a context of {needed} tokens, -c allows "
                              f"{n_ctx}; raise -c, or leave it out")
    bandwidth = read_bandwidth(device, probe_bytes)
    runner = Runner(file, device, "stream", n_ctx or needed, progress, warn)
    try:
        for depth, group in groupby(cases, key=lambda c: c.n_depth):
            _in_mode(runner, "stream").reset()
            if depth:
                runner.prefill(random_tokens(file, 0, depth))
            for case in group:
                tokens = random_tokens(file, depth, max(1, case.n_prompt))
                for mode in modes:
                    measured = _measure(runner, case, tokens, mode, repetitions, bandwidth)
                    yield Result(**_facts(file, runner), n_threads=n_threads, **measured)
    finally:
        runner.close_executors()


def random_tokens(file: GGUFFile, position: int, n: int) -> list[int]:
    """The same for the same position every time; BOS at the very start, where the model adds it."""
    n_vocab = file.tensors["token_embd.weight"].shape[0]
    tokens = np.random.default_rng(position).integers(0, n_vocab, n).tolist()
    if position == 0 and "tokenizer.ggml.model" in file.metadata:
        vocabulary = read_vocabulary(Keys(file.metadata, str(file.path)))
        if vocabulary.add_bos and vocabulary.bos_id is not None:
            tokens[0] = vocabulary.bos_id
    return tokens


def _in_mode(runner: Runner, mode: str) -> Runner:
    """The runner, with executors of that mode from here on."""
    runner.close_executors()
    runner.mode = mode
    return runner


def _start(runner: Runner, case: Case, tokens: Sequence[int]) -> None:
    """Back to the depth; without a prompt, the token that the first decode step reads."""
    runner.reset(case.n_depth)
    if not case.n_prompt:
        runner.write_tokens(tokens)
        runner.device.memory.write(runner.io["n_rows"], [1])
    runner.device.queue.wait()


def _repeat(runner: Runner, case: Case, tokens: Sequence[int]) -> int:
    """Nanoseconds of the case, up to the host's reading of the last token."""
    _start(runner, case, tokens)
    start = time.perf_counter_ns()
    if case.n_prompt:
        runner.prefill(tokens)
    runner.decode(case.n_gen)
    runner.device.queue.wait()
    runner.chosen(runner.n_past)
    return time.perf_counter_ns() - start


def _watch(runner: Runner, case: Case, tokens: Sequence[int]) -> list[Step]:
    """The case once more, each step with nothing else queued."""
    _start(runner, case, tokens)
    if case.n_prompt:
        runner.write_tokens(tokens)
    wait, steps = runner.device.queue.wait, []
    looped = runner.mode == "loop" and case.n_gen
    rows = [*((*step, 1) for step in prompt_steps(case.n_prompt)),
            *([(1, "last", case.n_gen)] if looped else [(1, "last", 1)] * case.n_gen)]
    for i, (n_rows, logits, times) in enumerate(rows):
        if i * ROW_BUCKETS[-1] < case.n_prompt:  # later the step before has set it
            runner.device.memory.write(runner.io["n_rows"], [n_rows])
        wait()
        start = time.perf_counter_ns()
        executor = runner.step(n_rows, logits, "greedy", times)
        queued = time.perf_counter_ns() - start
        wait()
        done = time.perf_counter_ns() - start
        for kv_len in range(runner.n_past - times + 1, runner.n_past + 1):
            work = Work(n_rows, kv_len)
            n_bytes = sum(sum(launch.traffic(work)) for launch in executor.program.launches)
            steps.append(Step(n_rows, queued // times, done // times, n_bytes, executor))
    return steps


def _measure(runner: Runner, case: Case, tokens: Sequence[int], mode: str, repetitions: int,
             bandwidth: float) -> dict[str, Any]:
    """The measured fields. The first run passes capture and first replay, and is not counted."""
    _in_mode(runner, mode)
    when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    _repeat(runner, case, tokens)
    executors = runner.executors.values()
    before = sum(e.updates for e in executors)
    samples = [_repeat(runner, case, tokens) for _ in range(repetitions)]
    updates = (sum(e.updates for e in executors) - before) // repetitions
    last_token = runner.chosen(runner.n_past)
    steps = _watch(runner, case, tokens)
    last = steps[-1].executor
    return {
        **asdict(case), "test_time": when, "graph_mode": runner.mode, "last_token": last_token,
        **speeds(case.n_tokens, samples),
        **latencies(case, steps),
        **against_floor(case.n_tokens, samples, sum(s.n_bytes for s in steps), bandwidth),
        "node_updates": updates, "n_nodes": last.n_nodes, "n_launches": len(last.program.launches),
        "prepare_ms": 1e3 * sum(e.prepare_seconds for e in executors),
        "graph_bytes": sum(e.size() for e in executors),
    }


def speeds(n_tokens: int, samples: Sequence[int]) -> dict[str, Any]:
    """Mean and sample deviation of the nanoseconds, and of the tokens a second of each sample."""
    rates = [1e9 * n_tokens / ns for ns in samples]
    several = len(samples) > 1
    return {
        "avg_ns": round(statistics.mean(samples)),
        "stddev_ns": round(statistics.stdev(samples)) if several else 0,
        "avg_ts": statistics.mean(rates),
        "stddev_ts": statistics.stdev(rates) if several else 0.0,
        "samples_ns": list(samples), "samples_ts": rates,
    }


def latencies(case: Case, steps: Sequence[Step]) -> dict[str, float]:
    """Percentiles of a token's time, over the decode steps where there are any."""
    chosen = steps[-case.n_gen :]  # all of them where n_gen is 0
    p50, p95 = np.percentile([s.ns / s.n_rows for s in chosen], [50, 95])
    host = sum(s.host_ns for s in chosen) / sum(s.n_rows for s in chosen)
    return {"p50_ns": float(p50), "p95_ns": float(p95), "host_us_per_token": host / 1e3}


def against_floor(n_tokens: int, samples: Sequence[int], n_bytes: int, bandwidth: float
                  ) -> dict[str, float]:
    """Bytes moved over the time, beside the bytes a second that the memory can be read at."""
    rate = 1e9 * n_bytes / statistics.mean(samples)
    return {
        "bytes_per_token": n_bytes / n_tokens,
        "read_gb_per_s": bandwidth / 1e9,
        "gb_per_s": rate / 1e9,
        "pct_of_floor": 100 * rate / bandwidth,
        "floor_ts": bandwidth * n_tokens / n_bytes,
    }


def _facts(file: GGUFFile, runner: Runner) -> dict[str, Any]:
    """The fields that say what was measured on what."""
    sizes = Counter[str]()
    for t in file.tensors.values():
        sizes[t.quant.name] += t.n_bytes
    n_params = sum(math.prod(t.shape) for t in file.tensors.values())
    count = f"{n_params / 1e9:.2g}B" if n_params >= 1e9 else f"{n_params / 1e6:.3g}M"
    arch, (quant, _) = file.metadata["general.architecture"], sizes.most_common(1)[0]
    gpu, kv = getattr(runner.device, "gpu", None), runner.kv.layers[0]
    return {
        "cpu_info": _cpu_name(), "gpu_info": gpu.name if gpu else "",
        "backends": runner.device.name.upper(), "model_filename": str(file.path),
        "model_type": f"{arch} {count} {quant}", "model_size": sizes.total(),
        "model_n_params": n_params, "n_batch": ROW_BUCKETS[-1], "n_ubatch": ROW_BUCKETS[-1],
        "type_k": kv.k.dtype.lower(), "type_v": kv.v.dtype.lower(),
        "l2_persist": runner.device.target.l2_persist,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.machine()
