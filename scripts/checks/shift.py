"""Full contexts on the GPU that drop tokens and go on: every mode, moved keys, memory.

Synthetic models need no file; the text of a real one goes on where its file is given.
"""

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from checks.parity import random_tokens
from checks.report import Report
from llamagraph.devices import open_device
from llamagraph.execute import EXECUTORS
from llamagraph.gguf.reader import GGUFFile
from llamagraph.gguf.synthetic import SyntheticFile
from llamagraph.kernels.kv import Cache
from llamagraph.kernels.rope import rotate
from llamagraph.runner import Runner
from llamagraph.sampling import SamplingParams

PARAMS = (SamplingParams(temp=0, seed=0), SamplingParams(seed=5))
N_CTX, KEEP = 200, 7
LOST = {"F16": 1e-3, "Q8_0": 1e-2}  # of keys that are stored again


def text(runner: Runner, params: SamplingParams) -> tuple[list[int], bool]:
    """Three contexts; whether the first tokens stay, with no graph or memory more after a shift."""
    runner.reset()
    prompt = random_tokens(runner, 20)
    answer = runner.generate(prompt, params, 3 * N_CTX, keep=KEEP)
    found = [next(answer) for _ in range(3 * N_CTX // 2)]
    made, free = runner.executors.made, runner.device.memory.available()
    found += answer
    flat = made == runner.executors.made and free == runner.device.memory.available()
    return found, flat and runner.sequence[:KEEP] == prompt[:KEEP]


def check_modes(name: str, file: Any, types: tuple[str | None, str | None], report: Report) -> None:
    expected: list[Any] = []
    with closing(Runner(file, open_device("cuda", warn=print), "stream", N_CTX, type_k=types[0],
                        type_v=types[1])) as runner:
        for mode in EXECUTORS:
            runner.use(mode)
            started = time.perf_counter()
            found = [text(runner, params) for params in PARAMS]
            took = time.perf_counter() - started
            expected = expected or found
            same = [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
            steady = all(steady for _, steady in found) and runner.mode == mode
            report.add("shift", f"{3 * N_CTX} tokens, {name}, {mode}", same and steady,
                       f"{len(set(found[1][0]))} different ones, {runner.executors.made} "
                       f"executables, no more and no more memory after a shift: {steady}, "
                       f"{took:.1f} s")


def caches(runner: Runner, i: int) -> list[Cache]:
    """A layer's keys and values, as they are now."""
    found = []
    for b in (runner.kv.layers[i].k, runner.kv.layers[i].v):
        raw = runner.device.memory.read(
            replace(b, dtype="U8", shape=(b.shape[0], b.n_bytes // b.shape[0])))
        numbers = raw.view(np.float16).reshape(b.shape) if b.dtype == "F16" else raw
        found.append(Cache(numbers, b.dtype, *b.shape[1:]))
    return found


def check_moved(spec: str, n_ctx: int, kv: str, report: Report) -> None:
    """Three layers: keys are turned, values the same; and how long a shift of all takes."""
    device = open_device("cuda", warn=print)
    with closing(Runner(SyntheticFile(spec), device, "capture", n_ctx, type_k=kv, type_v=kv)
                 ) as runner:
        runner.prefill(random_tokens(runner, n_ctx))
        before, worst, same = [caches(runner, i) for i in range(3)], 0.0, True
        step = runner.shift(KEEP)
        n = n_ctx - step
        for i, (old_k, old_v) in enumerate(before):
            k, v = caches(runner, i)
            rope = runner.config.ropes[runner.config.rope_of[i]]
            turned = old_k.read(slice(KEEP + step, n_ctx)).astype(np.float64)
            angle = step * rope.inv_freq().astype(np.float64)
            rotate(turned, np.cos(angle), -np.sin(angle), runner.config.layers[i].neox)
            found = k.read(slice(KEEP, n))
            worst = max(worst, float(np.linalg.norm(found - turned) / np.linalg.norm(turned)))
            same = same and np.array_equal(v.array[KEEP:n], old_v.array[KEEP + step :])
        runner.reset()
        runner.prefill(random_tokens(runner, n_ctx))
        device.queue.wait()
        started = time.perf_counter()
        runner.shift(KEEP)
        took = time.perf_counter() - started
        report.add("shift", f"moved keys, {spec} at {n_ctx}, {kv}",
                   worst < LOST[kv.upper()] and same,
                   f"error {worst:.1e}, {took * 1e3:.2f} ms a shift")


def run(report: Report, path: Path | None) -> None:
    for types in ((None, None), ("q8_0", "q8_0"), ("q4_0", "bf16")):
        name = "135m, KV " + "/".join(kind or "f16" for kind in types)
        with report.check("shift", name):
            check_modes(name, SyntheticFile("135m:q8_0"), types, report)
    if path:
        with report.check("shift", path.name), GGUFFile(path) as file:
            check_modes(path.name, file, (None, None), report)
    for spec, n_ctx, kv in (("135m:q8_0", 512, "f16"), ("135m:q8_0", 512, "q8_0"),
                            ("8b:q4_k_m", 8192, "f16")):
        with report.check("shift", spec):
            check_moved(spec, n_ctx, kv, report)
