"""The command and its formats: a reader made for llama-bench takes them unchanged."""

import json
import re
import sqlite3
from dataclasses import fields

import pytest
from click.testing import CliRunner
from llama_bench_reader import FIELDS, READERS
from tiny import tiny_model

from llamagraph.bench import bench
from llamagraph.bench_report import FORMATS, LLAMA_BENCH, own_fields, record
from llamagraph.bench_result import Case, Result
from llamagraph.cli import cli
from llamagraph.cli.bench import bench as command
from llamagraph.cli.unsupported import UNSUPPORTED_IN_BENCH, advice
from llamagraph.devices.cpu import CpuDevice
from llamagraph.errors import LlamaGraphError
from llamagraph.gguf.reader import GGUFFile


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("mo'del\"s") / "m.gguf", n_ctx=2048)


@pytest.fixture(scope="module")
def results(path):
    cases = [Case(4), Case(0, 3, 8), Case(2, 2)]
    return list(bench(GGUFFile(path), CpuDevice(), cases, ["stream", "capture"], 2,
                      probe_bytes=1 << 20))


def text(name, results, shown=()):
    form = FORMATS[name](shown)
    return form.head(results[0]) + "".join(map(form.row, results)) + form.foot(results[-1])


def invoke(*arguments):
    return CliRunner().invoke(cli, ["bench", "--device", "cpu", *map(str, arguments)])


def table(text):
    return [[cell.strip() for cell in line.strip("|").split("|")]
            for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("name", READERS)
def test_a_reader_of_llama_bench_takes_it_unchanged(results, path, name):
    rows = READERS[name](text(name, results))
    assert len(rows) == len(results)
    for row, result in zip(rows, results, strict=True):
        assert row["model_filename"] == str(path) and row["avg_ns"] == result.avg_ns
        assert row["avg_ts"] == pytest.approx(result.avg_ts, rel=1e-6)
        assert (row["n_prompt"], row["n_gen"], row["n_depth"]) == (
            result.n_prompt, result.n_gen, result.n_depth)
        assert row["n_gpu_layers"] == -1 and row["split_mode"] == "layer" and row["repack"] is True


def test_our_fields_follow_in_every_format(results):
    ours = [name for name, _ in own_fields()]
    assert ours[:12] == [
        "graph_mode", "avg_ttft_ns", "p50_ns", "p95_ns", "bytes_per_token", "gb_per_s",
        "pct_of_peak", "host_us_per_token", "node_updates", "n_nodes", "capture_ms",
        "instantiate_ms"]
    assert list(record(results[0])) == [*FIELDS, *ours] and list(LLAMA_BENCH) == list(FIELDS)
    assert text("csv", results).splitlines()[0].split(",") == [*FIELDS, *ours]
    (row, *_) = json.loads(text("json", results))
    assert list(row) == [*FIELDS, "samples_ns", "samples_ts", *ours]
    assert json.loads(text("jsonl", results).splitlines()[0]) == row
    base = sqlite3.connect(":memory:")
    base.executescript(text("sql", results))
    modes = base.execute("SELECT graph_mode, pct_of_peak FROM llama_bench").fetchall()
    base.close()
    assert [m for m, _ in modes] == [r.graph_mode for r in results]
    assert modes[0][1] == pytest.approx(results[0].pct_of_peak, abs=1e-6)
    assert {f.name for f in fields(Result)} <= {*FIELDS, *ours, "samples_ns", "samples_ts"}


def test_the_table_is_llama_benchs_with_our_columns_behind(path):
    result = invoke("-m", path, "-p", "16", "-n", "2-4*2", "-pg", "8,2", "-d", "0,20",
                    "-r", "1", "--graph-mode", "stream,capture")
    assert result.exit_code == 0, result.stderr
    header, rule, *rows = table(result.stdout)
    assert header == ["model", "size", "params", "backend", "threads", "dev", "test", "t/s", "mode",
                      "GB/s", "% peak", "TFLOP/s", "% TFLOP", "ttft ms", "launches", "updates",
                      "make ms"]
    assert all(re.fullmatch("-+[:-]", cell) for cell in rule)
    assert {len(row) for row in rows} == {len(header)}
    lines = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert len(set(map(len, lines))) == 1
    tests = ["pp16", "tg2", "tg4", "pp8+tg2"]
    assert [(r[6], r[8]) for r in rows] == [
        (name + end, mode) for end in ("", " @ d20") for name in tests
        for mode in ("stream", "capture")
    ]
    assert all(re.fullmatch(r"\d+\.\d\d ± 0.00", r[7]) for r in rows)
    assert "GB/s" in result.stderr and "|" not in result.stderr
    assert re.search(r"\n\nbuild: \S+ \(\d+\)\n$", result.stdout)


def test_a_table_shows_the_parameters_that_were_varied(path):
    result = invoke("-m", path, "-p", "8", "-n", "0", "-r", "1", "-ub", "4,8", "-b", "2048",
                    "-t", "1", "-fa", "on")
    header, _, *rows = table(result.stdout)
    assert header[4:8] == ["threads", "n_ubatch", "fa", "dev"]  # -b 2048 is what it always is
    assert [row[5] for row in rows] == ["4", "8"] and {row[6] for row in rows} == {"1"}


def test_several_models_follow_each_other(path, tmp_path):
    other = tiny_model(tmp_path / "o.gguf", n_layer=1)
    result = invoke("-m", f"{path},{other}", "-m", other, "-p", "4", "-n", "0", "-r", "1",
                    "-o", "jsonl", "-oe", "csv", "--progress")
    rows = READERS["jsonl"](result.stdout)
    assert [r["model_filename"] for r in rows] == [str(path), str(other), str(other)]
    facts = [line for line in result.stderr.splitlines() if not line.startswith(('"', "build_"))]
    steps = [fact for fact in facts if "bench" in fact]
    assert steps == [f"llamagraph bench: {i}/3: pp4" for i in (1, 2, 3)]
    lines = [line for line in result.stderr.splitlines() if line not in facts]
    assert len(READERS["csv"]("\n".join(lines) + "\n")) == 3


def test_every_pair_of_kv_types_is_measured(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", quant="Q4_K", n_layer=1)  # heads of whole blocks
    result = invoke("-m", path, "-p", "4", "-n", "0", "-r", "1", "-ctk", "f16,q8_0", "-ctv", "q4_0")
    header, _, *rows = table(result.stdout)
    assert header[5:7] == ["type_k", "type_v"]
    assert [row[5:7] for row in rows] == [["f16", "q4_0"], ["q8_0", "q4_0"]]


def test_a_synthetic_model_needs_no_file():
    result = invoke("--synthetic", "135m:q8_0", "-p", "1", "-n", "0", "-r", "1", "--no-warmup")
    (row,) = table(result.stdout)[2:]
    assert row[0] == "llama 135M Q8_0" and row[1] == "136.40 MiB" and row[6] == "pp1"


def test_llama_benchs_other_options_are_refused_with_advice():
    refused = advice(UNSUPPORTED_IN_BENCH)
    own = {name for p in command.params if not p.name.startswith("unsupported") for name in p.opts}
    assert "-ngl" in refused and "-fa" in own and not own & set(refused)
    for name, text in refused.items():
        done = invoke(name, "1")
        assert done.stderr == f"Error: {name}: llamagraph does not have it: {text}\n"


@pytest.mark.parametrize("arguments, code, message", [
    (("-m", "/does/not/exist.gguf"), 1, "cannot be read"),
    (("--synthetic", "3b:q8_0"), 1, "135m, 1b, 8b, 70b"),
    (("--synthetic", "135m:q8_0", "-p", "0", "-n", "0"), 2, "nothing to measure"),
    (("-p", "5-2"), 2, "does not reach its end"), (("-p", "0-5*2"), 2, "does not reach its end"),
    (("-d", "0-9999"), 2, "larger steps"), (("-n", "a"), 2, "'a' is not N"),
    (("-pg", "5"), 2, "PROMPT,GENERATED"), (("--graph-mode", "stream,none"), 2, "'none'"),
    (("-ctk", "q5_0"), 2, "'q5_0' is none of f32, f16, bf16, q8_0, q4_0"),
    (("-ctv", "f32,x"), 2, "'x' is none of"),
    (("-ub", "4096"), 2, "-ub 4096: a step has 2048 rows at most"),
    (("-b", "600", "-ub", "512"), 2, "-b 600: prompts are cut by -ub alone"),
    (("-ub", "0"), 2, "1 is the least"),
    (("-fa", "off"), 2, "always fused"), (("-fa", "2"), 2, "'2' is none of"),
    (("-o", "xml"), 2, "xml"),
    (("--delay", "nan"), 2, "'nan' is no finite number"), (("--delay", "inf"), 2, "0<=x<=3600"),
    (("--compare", "--html", "nowhere/x.html"), 2, "nowhere/x.html: there is no such folder"),
    (("--synthetic", "135m:q8_0", "-ngl", "99"), 2, "-ngl: llamagraph does not have it"),
    (("-mmp", "0"), 2, "-mmp: llamagraph does not have it"),
])
def test_mistakes_end_in_one_line(arguments, code, message):
    result = invoke(*arguments)
    text = result.stderr + str(result.exception)
    assert message in text and "Traceback" not in text
    assert result.exit_code == code
    if isinstance(result.exception, LlamaGraphError):
        assert "\n" not in str(result.exception)
