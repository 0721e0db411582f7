"""What the GPU's counters say of one decode step: bytes from memory, bank conflicts, sectors.

    scripts/counters [--layers N] [SHAPE:QUANT...]      default: 8b:q4_k_m

Runs itself under Nsight Compute (`ncu`, which must be on the path and allowed to count). A line a
kernel, its launches added up: bytes read from memory against what the plan counts, shared memory
accesses against the fewest that the bytes need, and so for 32-byte sectors of global memory.
"""

import argparse
import csv
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from llamagraph.devices import open_device
from llamagraph.devices.cuda.driver import call, cu
from llamagraph.gguf.synthetic import SHAPES, SyntheticFile
from llamagraph.program.launch import Work
from llamagraph.runner import Runner

COUNTERS = {
    "dram": "dram__bytes_read.sum",
    "shared": "memory_l1_wavefronts_shared",
    "shared_ideal": "memory_l1_wavefronts_shared_ideal",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "sectors": "memory_l2_theoretical_sectors_global",
    "sectors_ideal": "memory_l2_theoretical_sectors_global_ideal",
}
FEW_TOKENS = [1, 2, 3]
STEP_MARK, DONE_MARK = "STEP", "DONE"


class Planned(NamedTuple):
    """A launch of a model's step: what it is, and the bytes that it reads at least."""

    model: str
    kernel: str
    variant: str
    n_bytes: int


def step(spec: str, layers: int) -> None:
    """What ncu looks at: one decode step, whose kernels are there; the plan on stdout."""
    name = spec.partition(":")[0]
    shape = SHAPES[name]
    shape = replace(shape, n_layer=min(layers or shape.n_layer, shape.n_layer))
    file = SyntheticFile(spec, {name: shape})
    with closing(Runner(file, open_device("cuda", warn=print), "stream", 1024)) as runner:
        runner.prefill(FEW_TOKENS)
        runner.step(1, "last", "greedy")
        runner.device.queue.wait()
        call(cu.cuProfilerStart, doing="counting")
        executor = runner.step(1, "last", "greedy")
        runner.device.queue.wait()
        call(cu.cuProfilerStop, doing="counting")
        for launch in executor.program.launches:
            n_bytes = launch.traffic(Work(1, len(FEW_TOKENS) + 2)).read
            print(STEP_MARK, spec, launch.kernel.name, launch.variant.replace(" ", "+") or "-",
                  n_bytes, flush=True)


def steps(layers: str, *specs: str) -> None:
    for spec in specs:
        step(spec, int(layers))
    print(DONE_MARK, flush=True)


def counted(specs: list[str], layers: int) -> tuple[list[Planned], list[dict[str, float]]]:
    """The plans' launches, and the counters of each."""
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv",
               "--print-units", "base", "--metrics", ",".join(COUNTERS.values()), sys.executable,
               "-c", "import sys; from checks.counters import steps; steps(*sys.argv[1:])",
               str(layers), *specs]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    lines = done.stdout.splitlines()
    plan = [Planned(s, k, v, int(n)) for mark, s, k, v, n in
            (line.split() for line in lines if line.startswith(f"{STEP_MARK} "))]
    values: dict[int, dict[str, float]] = defaultdict(dict)
    by_counter = {counter: name for name, counter in COUNTERS.items()}
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        value = row["Metric Value"].replace(",", "")
        values[int(row["ID"])][by_counter[row["Metric Name"]]] = float(value or "nan")
    if DONE_MARK not in lines or len(values) != len(plan):
        raise SystemExit(f"ncu failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return plan, [values[i] for i in sorted(values)]


def table(plan: list[Planned], values: list[dict[str, float]]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, launch in enumerate(plan):
        groups[launch.kernel, launch.variant].append(i)

    def total(name: str, which: list[int]) -> float:
        return sum(values[i].get(name, 0) for i in which)

    yield (f"{'kernel':24}{'variant':14}{'n':>4}{'plan MB':>10}{'read/plan':>10}"
           f"{'conflicts':>10}{'stores':>8}{'shared':>9}{'sectors':>9}")
    everything = {("all", ""): list(range(len(plan)))}
    for (kernel, variant), which in {**groups, **everything}.items():
        n_bytes = sum(plan[i].n_bytes for i in which)
        shared, ideal = total("shared", which), total("shared_ideal", which)
        sectors, fewest = total("sectors", which), total("sectors_ideal", which)
        yield (f"{kernel:24}{variant:14}{len(which):4}{n_bytes / 1e6:10.2f}"
               f"{total('dram', which) / n_bytes:10.3f}{total('conflicts', which):10.0f}"
               f"{total('store_conflicts', which):8.0f}{shared / max(ideal, 1):9.3f}"
               f"{sectors / max(fewest, 1):9.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="SHAPE:QUANT", default=["8b:q4_k_m"])
    parser.add_argument("--layers", type=int, default=0, help="so many of the layers alone")
    options = parser.parse_args()
    plan, values = counted(options.models, options.layers)
    for spec in options.models:
        which = [i for i, launch in enumerate(plan) if launch.model == spec]
        print(f"\n{spec}: {len(which)} launches")
        print("\n".join(table([plan[i] for i in which], [values[i] for i in which])))
    return 0
