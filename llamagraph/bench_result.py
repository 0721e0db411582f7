"""What a measurement is made of: the cases, the fields of a result, and their arithmetic.

Plain data. Cases and the fields are llama-bench's as far as it has them. Knows no device.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from llamagraph.errors import LlamaGraphError
from llamagraph.planner import ROW_BUCKETS

N_BATCH = 2048  # llama-bench's default; a prompt is cut by n_ubatch alone


@dataclass(frozen=True)
class Case:
    """A prompt, decode steps, or both, behind `n_depth` positions that are there already.

    The prompt is read in steps of `n_ubatch` rows.
    """

    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    n_batch: int = N_BATCH
    n_ubatch: int = ROW_BUCKETS[-1]
    flash_attn: int = -1  # as llama-bench has it; attention is the same for all values

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_gen

    @property
    def name(self) -> str:
        """As llama-bench calls it: pp512, tg128, pp512+tg128, tg128 @ d4096."""
        parts = [f"{k}{n}" for k, n in (("pp", self.n_prompt), ("tg", self.n_gen)) if n]
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")


def cases_of(prompts: Sequence[int], gens: Sequence[int], pairs: Sequence[tuple[int, int]],
             depths: Sequence[int], **common: int) -> list[Case]:
    """Prompts, decode steps and pairs of both at every depth; a length of 0 is left out.

    `common` are the cases' other fields.
    """
    lengths = [(n, 0) for n in prompts] + [(0, n) for n in gens] + list(pairs)
    return [Case(p, g, depth, **common)
            for depth in dict.fromkeys(depths) for p, g in lengths if p + g]


def context_of(cases: Sequence[Case], n_ctx: int | None = None) -> int:
    """The context that the cases need, or `n_ctx`; LlamaGraphError where they need more."""
    longest = max(cases, key=lambda c: c.n_depth + c.n_tokens)
    if (needed := longest.n_depth + longest.n_tokens) > (n_ctx or needed):
        raise LlamaGraphError(f"{longest.name} needs a context of {needed} tokens, -c allows "
                              f"{n_ctx}; raise -c, or leave it out")
    return n_ctx or needed


@dataclass(frozen=True)
class Result:
    """One case in one graph mode. Up to `samples_ts` the names and units are llama-bench's.

    `avg_ttft_ns` is the time to the first token after the prompt, or after one token where the case
    has no prompt. `p50_ns`, `p95_ns` and `host_us_per_token` come from one more run in which the
    host waits after each launch: a token's time with the wait, and what the host spends before it
    (on a CPU all of it); a loop's are means. `bytes_per_token` is what the launches must read and
    write at least, in the file's types; the peak is the read bandwidth `read_gb_per_s`, measured in
    the same run, and `floor_ts` the speed at it. `tflops` are the multiplications and additions of
    products with weights, and `peak_tflops` what tensor cores did with operands at hand (a CPU in a
    product of matrices), in the same run too. `node_updates` counts the launches that a
    repetition changed, `n_queued` what the host queues a token, `prepare_ms` is the making of all
    graphs that the case needs, with its parts before it, `l2_persist` the bytes of cache that are
    set aside for weights. `last_token` is what the last step chose, equal in all modes.
    """

    build_commit: str
    build_number: int
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
    flash_attn: int
    devices: str
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
    avg_ttft_ns: int
    p50_ns: float
    p95_ns: float
    bytes_per_token: float
    gb_per_s: float
    pct_of_peak: float
    host_us_per_token: float
    node_updates: int
    n_nodes: int
    capture_ms: float
    instantiate_ms: float
    upload_ms: float
    graph_bytes: int
    prepare_ms: float
    n_launches: int
    n_queued: float
    read_gb_per_s: float
    floor_ts: float
    tflops: float
    peak_tflops: float
    pct_of_peak_tflops: float
    l2_persist: int
    last_token: int

    @property
    def name(self) -> str:
        return Case(self.n_prompt, self.n_gen, self.n_depth).name


class Step(NamedTuple):
    """A step that was waited for: its rows, its times, the bytes that it had to move."""

    n_rows: int
    host_ns: float  # until it was queued
    ns: float  # until it was done
    n_bytes: int
    flops: int  # of its products with weights
    n_queued: float  # by the host for it
    executor: Any


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


def against_ceiling(samples: Sequence[int], flops: int, ceiling: float) -> dict[str, float]:
    """Products with weights over the time, beside those a second that the device can do at all."""
    rate = 1e9 * flops / statistics.mean(samples)
    return {"tflops": rate / 1e12, "peak_tflops": ceiling / 1e12,
            "pct_of_peak_tflops": 100 * rate / ceiling}


def against_floor(n_tokens: int, samples: Sequence[int], n_bytes: int, bandwidth: float
                  ) -> dict[str, float]:
    """Bytes moved over the time, beside the bytes a second that the memory can be read at."""
    rate = 1e9 * n_bytes / statistics.mean(samples)
    return {
        "bytes_per_token": n_bytes / n_tokens,
        "read_gb_per_s": bandwidth / 1e9,
        "gb_per_s": rate / 1e9,
        "pct_of_peak": 100 * rate / bandwidth,
        "floor_ts": bandwidth * n_tokens / n_bytes,
    }
