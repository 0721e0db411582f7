"""Whole models on the GPU: every mode against the stream, golden answers, speed, memory.

A model is loaded once a mode; what both modes gave is compared bit by bit.
"""

import json
import os
import resource
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from checks.report import Report
from llamagraph.devices import open_device
from llamagraph.execute import EXECUTORS
from llamagraph.gguf.reader import GGUFFile
from llamagraph.kernels.attention import FEW_KV
from llamagraph.runner import Runner
from llamagraph.sampling import SamplingParams

DEPTHS = (1, 2, 5, 8, 9, 16, 255, 256, 257, 511, 512, 513, 4095, 4096, 4097)
N_FEW = 8  # tokens read where the program of few rows changes
N_CTX = 8192
SEEDS = range(5)
GREEDY = SamplingParams(temp=0, seed=0)
ON_HOST = {"top_k": 0}  # all candidates: no GPU's sampler ranks so many
GOLDEN = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": "smollm2-135m-q4_1.json",
    "gemma-3-270m-q4_k_m.gguf": "gemma3-270m-q4_k_m.json",
    "qwen2.5-coder-0.5b-q4_k_m.gguf": "qwen2.5-coder-0.5b-q4_k_m.json",
}
N_PROMPTS, SETTLED = 500, 40  # device memory must not change after the first SETTLED prompts


@dataclass
class Outcome:
    """What a mode gave: logits at each depth, and texts as token ids, drawn by the GPU and by the
    host."""

    logits: dict[str, np.ndarray] = field(default_factory=dict)
    texts: list[list[int]] = field(default_factory=list)
    host_texts: list[list[int]] = field(default_factory=list)


def open_runner(path: Path, mode: str, n_ctx: int) -> Runner:
    return Runner(GGUFFile(path), open_device("cuda", warn=print), mode, n_ctx)


def random_tokens(runner: Runner, n: int, seed: int = 0) -> list[int]:
    n_vocab = runner.weights.token_embd.weight.shape[0]
    return np.random.default_rng(seed).integers(0, n_vocab, n).tolist()


def logits_at(runner: Runner, depth: int) -> dict[str, np.ndarray]:
    """After a prompt of `depth` tokens, and after the decode step that follows it."""
    runner.reset()
    found = {f"prompt of {depth}": runner.read_logits(
        runner.prefill(random_tokens(runner, depth)))}
    found[f"decode at {depth + 1}"] = runner.read_logits(runner.step(1, "last", "greedy"))
    return found | host_logits_at(runner, depth)


def host_logits_at(runner: Runner, depth: int) -> dict[str, np.ndarray]:
    """The same of steps that leave the choice to the host: what it finds in its own memory."""
    copied = runner.device.memory.host_view(runner.io["candidates"])

    def candidates(executor: Any) -> np.ndarray:
        runner.device.queue.wait()
        assert np.array_equal(runner.read_logits(executor)[0], copied), "the copy differs"
        return copied.copy()

    runner.reset()
    found = {f"prompt of {depth}, host": candidates(
        runner.prefill(random_tokens(runner, depth), "host"))}
    runner.device.memory.write(runner.io["tokens"], [int(copied.argmax())], runner.n_past)
    found[f"decode at {depth + 1}, host"] = candidates(runner.step(1, "last", "host"))
    return found


def outcome(runner: Runner) -> Outcome:
    found = Outcome()
    for depth in DEPTHS:
        if depth < runner.n_ctx:
            found.logits |= logits_at(runner, depth)
    found.logits |= logits_at(runner, runner.n_ctx - 1)
    for depth in range(FEW_KV - 2 * N_FEW, FEW_KV, N_FEW // 2):
        runner.reset()
        runner.prefill(random_tokens(runner, depth))
        found.logits[f"{N_FEW} tokens behind {depth}"] = runner.read_logits(
            runner.prefill(random_tokens(runner, N_FEW, 1)))
    for seed in SEEDS:
        runner.reset()
        prompt = random_tokens(runner, 20, seed)
        found.texts.append(list(runner.generate(prompt, SamplingParams(seed=seed), 48)))
        runner.reset()
        params = SamplingParams(seed=seed, **ON_HOST)
        assert params.sampler(runner.device.target, runner.n_vocab) == "host"
        found.host_texts.append(list(runner.generate(prompt, params, 48)))
    return found


def compare(report: Report, area: str, mode: str, streamed: Outcome, other: Outcome) -> None:
    for name, logits in streamed.logits.items():
        finite = bool(np.isfinite(logits).all())
        report.add(area, f"stream = {mode}, {name}",
                   finite and np.array_equal(logits, other.logits[name]),
                   "" if finite else "logits are not finite")
    report.add(area, f"sampled texts equal for five seeds, {mode}", streamed.texts == other.texts)
    report.add(area, f"the host's choices equal for five seeds, {mode}",
               streamed.host_texts == other.host_texts)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def golden(runner: Runner, cases: list[dict], single: bool) -> tuple[float, float]:
    """Mean error of log probabilities and share of equal choices, along the golden answers."""
    errors, equal = [], []
    for case in cases:
        runner.reset()
        rows = [runner.logits(case["prompt_tokens"])[-1:]]
        answer = case["tokens"][:-1]
        rows += [runner.logits([t]) for t in answer] if single else [runner.logits(answer)]
        logits = np.concatenate(rows)
        found = np.take_along_axis(log_softmax(logits), np.array(case["ids"]), 1)
        errors.append(np.abs(found - np.array(case["exact_logprobs"])).ravel())
        equal.append(logits.argmax(-1) == np.array(case["exact_argmax"]))
    return float(np.concatenate(errors).mean()), float(np.concatenate(equal).mean())


def check_golden(runner: Runner, report: Report, area: str, path: Path) -> None:
    folder = Path(os.environ.get("LLAMAGRAPH_GOLDEN", ""))
    if path.name not in GOLDEN or not (folder / GOLDEN[path.name]).is_file():
        report.add(area, "golden", True, "no data (set LLAMAGRAPH_GOLDEN)")
        return
    cases = json.loads((folder / GOLDEN[path.name]).read_text())["cases"]
    for kind, single in (("decode", True), ("prompt", False)):
        error, equal = golden(runner, cases, single)
        report.add(area, f"golden, {kind}", error <= 0.10 and equal >= 0.97,
                   f"mean error {error:.3f}, {equal:.1%} equal")


def check_speed(runner: Runner, report: Report, area: str, mode: str) -> None:
    """Steady decode without host round trips, and how many launches were updated."""
    runner.reset()
    runner.prefill(random_tokens(runner, 16))
    executor = runner.step(1, "last", "greedy")
    before = executor.updates

    def decode() -> None:
        for _ in range(512):
            runner.step(1, "last", "greedy")

    started = time.perf_counter()
    gpu = runner.device.queue.time(decode)
    wall = time.perf_counter() - started
    n = len(executor.program.launches)
    report.add(area, f"decode of 512 tokens, {mode}", True,
               f"{512 / wall:.0f} tok/s, GPU {gpu / 512 * 1e6:.0f} us a token, {n} launches, "
               f"{executor.updates - before} updates, graph {executor.size() >> 10} KiB")


def rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check_memory(runner: Runner, report: Report, area: str) -> None:
    """Prompts of the same 20 lengths, again and again."""
    free, rss = [], []
    for i in range(N_PROMPTS):
        runner.reset()
        prompt = random_tokens(runner, 1 + 37 * (i % 20), i)
        list(runner.generate(prompt, GREEDY, 4))
        free.append(runner.device.memory.available())
        rss.append(rss_bytes())
    gone = free[SETTLED] - free[-1]
    slope = (rss[-1] - rss[SETTLED]) / (N_PROMPTS - SETTLED)
    report.add(area, f"device memory after {N_PROMPTS} prompts", gone == 0,
               f"{gone >> 10} KiB less, {len(runner.executors)} executors")
    report.add(area, "resident memory", slope <= 4096, f"{slope:.0f} bytes a prompt")


def check_start(path: Path, report: Report, area: str) -> None:
    """The model's whole context: little of it has memory at the start."""
    started = time.perf_counter()
    runner = open_runner(path, "capture", 0)
    runner.prefill(random_tokens(runner, 5))
    runner.chosen(runner.n_past)
    took = time.perf_counter() - started
    used, reserved = runner.device.memory.account()["kv"], runner.kv.n_bytes
    report.add(area, "first token with the whole context reserved", True,
               f"{took:.2f} s, KV uses {used >> 20} of {reserved >> 20} MiB")
    runner.close()


def check_model(path: Path, report: Report) -> None:
    found, area = {}, path.name
    for mode in EXECUTORS:
        with report.check(area, mode):
            started = time.perf_counter()
            with closing(open_runner(path, mode, N_CTX)) as runner:
                report.add(area, f"load, {mode}", True, f"{time.perf_counter() - started:.2f} s, "
                           f"{runner.device.memory.account()}")
                found[mode] = outcome(runner)
                check_speed(runner, report, area, mode)
                if mode == "capture":
                    check_golden(runner, report, area, path)
                    check_memory(runner, report, area)
    for mode, outcome_ in found.items():
        if mode != "stream" and "stream" in found:
            compare(report, area, mode, found["stream"], outcome_)
    with report.check(area, "start"):
        check_start(path, report, area)


def run(report: Report, paths: list[Path]) -> None:
    for path in paths:
        check_model(path, report)


