"""The README's tables of decode speed, made on this machine's GPU.

    scripts/decode-table                   all of them
    scripts/decode-table main types modes  some of them
    scripts/decode-table -m FILE           `llamagraph run` with a real model, against its steps

Decode of 128 tokens as `llamagraph bench` measures it, with random weights of real shapes; medians
of five. Tables go to stdout, the range of each five to stderr.
"""

import argparse
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType

from llamagraph.bench import bench
from llamagraph.bench_result import Result, cases_of
from llamagraph.devices import open_device
from llamagraph.gguf.reader import GGUFFile
from llamagraph.gguf.synthetic import SyntheticFile

N_TOKENS, REPEATS = 128, 5
MODES = ("stream", "capture", "build", "partial")
DEPTHS = (0, 4096, 16384)  # of DEEP
DEEP = "8b:q4_k_m"
# What llama.cpp 0.5.0 decodes on an H200, in tok/s, without the choice; at each of the depths.
LLAMA_CPP: Mapping[str, tuple[int, ...]] = MappingProxyType({
    "135m:q8_0": (914,), "1b:q4_k_m": (880,), "1b:f16": (769,), "8b:q4_k_m": (277, 249, 210),
    "8b:q8_0": (249,), "70b:q4_k_m": (44,),
})
TYPES = ("q4_0", "q4_1", "q5_0", "q5_1", "q5_k_m", "q6_k", "bf16")
IN_MODES = ("135m:q8_0", "1b:q4_k_m", "8b:q4_k_m")
ANSWER = 512  # tokens of a real model's answer
SPEED = re.compile(r"generation: (\d+) tokens, ([\d.]+) t/s")


def figure(x: float, digits: int = 0) -> str:
    """2895.1 as 2 895; with `digits` no more than so many that count."""
    if digits:
        x = float(f"{x:.{digits}g}")
    return f"{x:,.0f}".replace(",", " ")


def measure(file: GGUFFile, depths: Sequence[int], modes: Sequence[str], n: int = N_TOKENS
            ) -> Iterator[Result]:
    with closing(file), closing(open_device("cuda", warn=print)) as device:
        for result in bench(file, device, cases_of([], [n], [], depths), modes, REPEATS):
            rates = result.samples_ts
            print(f"{file.path.name} {result.name} {result.graph_mode}: {min(rates):.0f} to "
                  f"{max(rates):.0f} tok/s, {result.node_updates} updates, memory is read at "
                  f"{result.read_gb_per_s:.0f} GB/s", file=sys.stderr)
            yield result


def median(result: Result) -> float:
    return statistics.median(result.samples_ts)


def cells(result: Result) -> str:
    """Tokens and gigabytes a second, and the share of what memory allows."""
    rate = median(result)
    return (f"{figure(rate)} | {figure(rate * result.bytes_per_token / 1e9, 3)} | "
            f"{100 * rate / result.floor_ts:.0f} %")


def name(spec: str) -> str:
    return spec.upper().replace(":", " ")


def main_table() -> Iterator[str]:
    yield "| model | tok/s | GB/s | share of the floor | llama.cpp, tok/s |\n|---|---|---|---|---|"
    for spec, others in LLAMA_CPP.items():
        depths = DEPTHS[: len(others)]
        for result, other in zip(measure(SyntheticFile(spec), depths, ["capture"]), others,
                                 strict=True):
            behind = f" behind {figure(result.n_depth)} tokens" if result.n_depth else ""
            yield f"| {name(spec)}{behind} | {cells(result)} | {other} |"


def types_table() -> Iterator[str]:
    yield "| type | tok/s | GB/s | share of the floor |\n|---|---|---|---|"
    for quant in TYPES:
        for result in measure(SyntheticFile(f"8b:{quant}"), [0], ["capture"]):
            yield f"| {quant.upper()} | {cells(result)} |"


def modes_table() -> Iterator[str]:
    yield f"| model | {' | '.join(MODES)} |\n|{'---|' * (1 + len(MODES))}"
    for spec in IN_MODES:
        rates = [figure(median(r)) for r in measure(SyntheticFile(spec), [0], MODES)]
        yield f"| {name(spec)} | {' | '.join(rates)} |"


def answer_rate(path: Path, *options: str) -> float:
    """Tokens a second from an answer's first token to its last, each printed as it comes."""
    command = [sys.executable, "-m", "llamagraph", "run", "-m", str(path), "-p", "Once upon a time",
               "-n", str(ANSWER), "--ignore-eos", "--show-timings", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    found = SPEED.search(done.stderr)
    if not found or int(found[1]) != ANSWER:
        raise SystemExit(f"llamagraph run failed:\n{done.stderr[-2000:]}")
    return float(found[2])


def answers(path: Path) -> Iterator[str]:
    """Answers of a real model, against its steps alone, which choose greedily."""
    (steps,) = measure(GGUFFile(path), [0], ["capture"], ANSWER)
    yield f"{path.name}: {ANSWER} steps {figure(median(steps))} tok/s"
    for options in ("--temp", "0"), ():
        rates = [answer_rate(path, *options) for _ in range(REPEATS)]
        rate = statistics.median(rates)
        yield (f"run {' '.join(options) or '(sampled)'}: {figure(rate)} tok/s "
               f"({min(rates):.0f} to {max(rates):.0f}), {median(steps) / rate - 1:.1%} longer")


TABLES = MappingProxyType({"main": main_table, "types": types_table, "modes": modes_table})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("-m", dest="model", type=Path, metavar="FILE", help="a real model")
    options = parser.parse_args()
    if wrong := set(options.tables) - set(TABLES):
        parser.error(f"there is no {' '.join(wrong)}; there are {', '.join(TABLES)}")
    for table in options.tables or ([] if options.model else TABLES):
        for line in TABLES[table]():
            print(line, flush=True)
        print()
    if options.model:
        for line in answers(options.model):
            print(line, flush=True)
    return 0
