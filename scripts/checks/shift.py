"""Full contexts on the GPU that drop tokens and go on: every mode, moved keys, memory.

Synthetic models need no file; the text of a real one goes on where its file is given.
"""

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from checks.parity import random_tokens
from checks.report import Report
from llamagraph.devices import open_device
from llamagraph.execute import EXECUTORS
from llamagraph.gguf.reader import GGUFFile
from llamagraph.gguf.synthetic import SyntheticFile
from llamagraph.kernels.rope import rotate
from llamagraph.runner import Runner
from llamagraph.sampling import SamplingParams

PARAMS = (SamplingParams(temp=0, seed=0), SamplingParams(seed=5))
N_CTX, KEEP = 300, 7


def texts(runner: Runner) -> list[list[int]]:
    found = []
    for params in PARAMS:
        runner.reset()
        prompt = random_tokens(runner, 20)
        found.append(list(runner.generate(prompt, params, 3 * N_CTX, keep=KEEP)))
    return found


def check_modes(name: str, file: Any, report: Report) -> None:
    expected: list[list[int]] = []
    for mode in EXECUTORS:
        with (report.check("shift", f"{name}, {mode}"),
              closing(Runner(file(), open_device("cuda", warn=print), mode, N_CTX)) as runner):
            found = texts(runner)
            expected = expected or found
            made, free = runner.executors.made, runner.device.memory.available()
            same = texts(runner) == found == expected
            flat = made == runner.executors.made and free == runner.device.memory.available()
            report.add("shift", f"{3 * N_CTX} tokens, {name}, {mode}", same and flat,
                       f"{made} executables, free memory and executables as before: {flat}")


def check_moved(spec: str, n_ctx: int, report: Report) -> None:
    """All layers: keys are turned, values the same; and how long it takes."""
    file = SyntheticFile(spec)
    with closing(Runner(file, open_device("cuda", warn=print), "capture", n_ctx)) as runner:
        runner.prefill(random_tokens(runner, n_ctx))
        memory, worst, same = runner.device.memory, 0.0, True
        caches = [(x.k, x.v) for x in runner.kv.layers]
        before = [[memory.read(b).astype(np.float64) for b in pair] for pair in caches[:3]]
        step = runner.shift(KEEP)
        n = n_ctx - step
        for i, (old_k, old_v) in enumerate(before):
            k, v = (memory.read(b)[KEEP:n].astype(np.float64) for b in caches[i])
            rope = runner.config.ropes[runner.config.rope_of[i]]
            turned = old_k[KEEP + step :].copy()
            angle = step * rope.inv_freq().astype(np.float64)
            rotate(turned, np.cos(angle), -np.sin(angle), runner.config.layers[i].neox)
            worst = max(worst, float(np.linalg.norm(k - turned) / np.linalg.norm(turned)))
            same = same and np.array_equal(v, old_v[KEEP + step :])
        runner.reset()
        runner.prefill(random_tokens(runner, n_ctx))
        runner.device.queue.wait()
        started = time.perf_counter()
        runner.shift(KEEP)
        took = time.perf_counter() - started
        report.add("shift", f"moved keys, {spec} at {n_ctx}", worst < 1e-3 and same,
                   f"error {worst:.1e}, {took * 1e3:.2f} ms a shift")


def run(report: Report, path: Path | None) -> None:
    check_modes("135m", lambda: SyntheticFile("135m:q8_0"), report)
    if path:
        check_modes(path.name, lambda: GGUFFile(path), report)
    for spec, n_ctx in (("135m:q8_0", 512), ("8b:q4_k_m", 8192)):
        with report.check("shift", spec):
            check_moved(spec, n_ctx, report)
