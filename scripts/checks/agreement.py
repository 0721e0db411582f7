"""Whether bench tells what a user sees: its decode speed beside that of whole answers.

    scripts/bench-check [-n TOKENS] MODEL...       a GGUF file, or SHAPE:QUANT as in 8b:q4_k_m

An answer's speed is that of `llamagraph run -n 512 --temp 0 --ignore-eos`, from its first token to
its last; a graph a token, and in a loop. A synthetic model is written to a file first. The exit
code is 1 where they differ by more than 5 %.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import gguf
import numpy as np

import llamagraph
from checks.report import Report
from llamagraph.bench import bench
from llamagraph.bench_result import Case
from llamagraph.devices import open_device
from llamagraph.gguf.reader import GGUFFile
from llamagraph.gguf.synthetic import SyntheticFile

MOST_APART = 0.05
MODES = "capture", "loop"
SAMPLES, PROMPT = 3, 16  # answers; tokens before each


def write_gguf(spec: str, path: Path) -> None:
    """A synthetic model as a file, with a vocabulary of words that nobody can type."""
    file = SyntheticFile(spec)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in file.metadata.items():
        if key != "general.architecture":
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    n_vocab = file.tensors["token_embd.weight"].shape[0]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"w{i}" for i in range(n_vocab)])
    writer.add_token_types([gguf.TokenType.NORMAL] * n_vocab)
    writer.add_token_merges(["w 0"])
    writer.add_eos_token_id(n_vocab - 1)
    for name, t in file.tensors.items():
        data = file.data(name)
        raw = data.view(np.float32) if len(t.shape) == 1 else data.reshape(t.shape[0], -1)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType(t.quant.id))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def answer_speed(path: Path, n: int, mode: str) -> float:
    """Tokens a second of answers, first token to last; the first answer makes the graphs."""
    speeds = []
    with llamagraph.open(path, device="cuda", mode=mode, n_ctx=PROMPT + n, warn=print) as model:
        for _ in range(1 + SAMPLES):
            answer = model.generate(list(range(PROMPT)), limit=n, temp=0, ignore_eos=True)
            for _ in answer:
                pass
            speeds.append(answer.timings.decode_tokens_per_second)
    return statistics.median(speeds[1:])


def bench_speed(path: Path, n: int, mode: str) -> float:
    """What bench says of as many tokens."""
    device = open_device("cuda", warn=print)
    try:
        with GGUFFile(path) as file:
            (result,) = bench(file, device, [Case(0, n)], [mode], SAMPLES)
    finally:
        device.close()
    return result.avg_ts


def check(report: Report, name: str, path: Path, n: int) -> None:
    for mode in MODES:
        with report.check("bench", f"{name}, {mode}"):
            told, seen = bench_speed(path, n, mode), answer_speed(path, n, mode)
            report.add("bench", f"{name}, {mode}, {n} tokens", abs(seen / told - 1) <= MOST_APART,
                       f"bench {told:.1f} t/s, an answer {seen:.1f} t/s, {100 * seen / told:.1f} %")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=512, metavar="TOKENS", help="tokens (512)")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    options = parser.parse_args()
    report = Report()
    for name in options.models:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            path = Path(name) if name.endswith(".gguf") else Path(folder) / "synthetic.gguf"
            if not name.endswith(".gguf"):
                write_gguf(name, path)
            check(report, path.name if name.endswith(".gguf") else name, path, options.n)
    print(f"\n{report.table()}")
    return 1 if report.failed else 0
