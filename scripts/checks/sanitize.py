"""Kernels and whole steps under NVIDIA's compute-sanitizer: addresses out of bounds, shared memory
that is read before it is written. The sanitizer must be on the path.

Racecheck follows the barriers that bulk copies arrive at, but neither a lane that arrives for its
warp nor arrivals from another block of a cluster. So threads arrive each for themselves where a
copy overwrites what they have read, and what other blocks store is counted by the barrier itself.

Steps are those of small models of every type, replayed from graphs, with early starts where the GPU
has them: prompts of many rows and of few, decode with both samplers, and attention at depth.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

from checks.parity import random_tokens
from checks.report import Report
from llamagraph.devices import open_device
from llamagraph.gguf.synthetic import MIXES, Shape, SyntheticFile
from llamagraph.kernels.attention import LONG_KV
from llamagraph.kernels.kv import TYPES
from llamagraph.program.device import Device
from llamagraph.runner import Runner
from llamagraph.sampling import SamplingParams

SHAPE = Shape(2, 512, 1024, 8, 2, 64, 2048, tied=False)
N_CTX = LONG_KV + 1024
SUMMARIES = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "(0 errors, 0 warnings)"}
DONE = "all steps done"
# Reports of all kernels, not the first hundred alone; and room for all barriers that a block has in
# shared memory (35 at most, of products of warp groups): the compiler may tell the tool of fewer,
# and what a barrier orders that it does not follow is a hazard to it.
OPTIONS = {"memcheck": (), "racecheck": ("--print-limit", "0", "--show-backtrace", "no",
                                         "--num-cuda-barriers", "64")}
# "Write access at KERNEL(..)+0x10 in FILE:LINE [4 hazards]"; older tools: "at 0x10 in KERNEL".
ACCESS = re.compile(r"(Read|Write) access at "
                    r"(?:0x[0-9a-f]+ in (?:\S+:\d+:)?(\w+)|(\w+)[^+]*\+0x[0-9a-f]+)"
                    r"(?:.*\[(\d+) hazards?\])?")


def settings() -> Iterator[tuple[str, str]]:
    """The types of the weights and of the KV cache."""
    yield from ((quant, "f16") for quant in MIXES)
    yield from (("q8_0", dtype) for dtype in TYPES if dtype != "f16")


def steps(quant: str, cache: str, device: Device) -> None:
    """Closes the device."""
    file = SyntheticFile(f"small:{quant}", {"small": SHAPE})
    with closing(Runner(file, device, "capture", N_CTX, type_k=cache, type_v=cache)) as runner:
        SamplingParams(seed=1).write(device.memory, runner.io)
        for n in (40, 4):
            runner.prefill(random_tokens(runner, n), "chain")
        for sampler in ("chain", "greedy"):
            for _ in range(12):
                runner.step(1, "last", sampler)
        assert runner.mode == "capture"
        runner.n_past = LONG_KV + 50
        device.memory.write(runner.io["pos"], [runner.n_past])
        device.memory.write(runner.io["tokens"], [1], runner.n_past)
        for _ in range(3):
            runner.step(1, "last", "greedy")
        device.queue.wait()


def work() -> None:
    for quant, cache in settings():
        steps(quant, cache, open_device("cuda", warn=print))
    print(DONE, flush=True)


def hazards(said: Iterable[str]) -> Iterator[str]:
    """The kernels in racecheck's reports, by kinds of access: those with most hazards first.

    A report begins with one access; a line each follows for those that may meet it.
    """
    counts: Counter[tuple[str, str]] = Counter()
    first = ""
    for access in filter(None, map(ACCESS.search, said)):
        kind, old, new, n = access.groups()
        if n:
            counts[old or new, f"{first}, {kind}"] += int(n)
        else:
            first = kind
    for (kernel, kinds), n in counts.most_common():
        yield f"{kernel}: {kinds}: {n} hazards"


def check(tool: str, what: str, command: list[str], report: Report) -> None:
    done = subprocess.run(["compute-sanitizer", "--tool", tool, *OPTIONS[tool], sys.executable,
                           *command],
                          capture_output=True, text=True, cwd=Path(__file__).parents[1])
    said = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    clean = bool(said) and SUMMARIES[tool] in said[-1] and done.returncode == 0
    report.add("sanitizer", f"{tool}, {what}", clean, said[-1].strip("= ") if said else "")
    for line in hazards(said):
        report.add("sanitizer", f"{tool}, {what}", False, line)
    if not clean:
        print("\n".join(said[:40]), done.stdout[-1000:], done.stderr[-2000:], sep="\n")


def run(report: Report, tool: str = "") -> None:
    for each in [tool] if tool else SUMMARIES:
        with report.check("sanitizer", f"{each}, steps"):
            check(each, "steps", ["-c", "from checks.sanitize import work; work()"], report)
        with report.check("sanitizer", f"{each}, kernels"):
            check(each, "kernels", ["gpu-check", "--kernels"], report)
