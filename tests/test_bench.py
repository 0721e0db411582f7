"""The bench: its cases, its arithmetic, and results that agree with the model and each other."""

import gc
import re

import numpy as np
import pytest
from third_device import ListDevice
from tiny import tiny_model

import llamagraph
from llamagraph.bench import bench, random_tokens
from llamagraph.bench_facts import build
from llamagraph.bench_result import (
    Case,
    Result,
    Step,
    against_ceiling,
    against_floor,
    cases_of,
    latencies,
    speeds,
)
from llamagraph.devices.cpu import CpuDevice
from llamagraph.errors import LlamaGraphError
from llamagraph.execute import EXECUTORS
from llamagraph.gguf.reader import GGUFFile, Metadata
from llamagraph.gguf.synthetic import Shape, SyntheticFile
from llamagraph.kernels.probe import fill_words, read_all, read_bandwidth

LAYERS = 2
RESULT = Result(  # as it might be, for arithmetic
    build_commit="0123456", build_number=7, cpu_info="a CPU", gpu_info="a GPU", backends="CUDA",
    model_filename="m.gguf", model_type="llama 1B Q4_K", model_size=10**9, model_n_params=10**9,
    n_batch=2048, n_ubatch=512, n_threads=1, type_k="f16", type_v="f16", flash_attn=-1,
    devices="auto", n_prompt=0, n_gen=100, n_depth=0, test_time="2026-01-02T03:04:05Z",
    avg_ns=10**8, stddev_ns=10**5, avg_ts=1000.0, stddev_ts=1.0, samples_ns=[10**8],
    samples_ts=[1000.0], graph_mode="stream", avg_ttft_ns=10**7, p50_ns=1e6, p95_ns=1e6,
    bytes_per_token=1e9, gb_per_s=1e3, pct_of_peak=25.0, host_us_per_token=5.0, node_updates=0,
    n_nodes=150, capture_ms=1.0, instantiate_ms=2.0, upload_ms=1.0, graph_bytes=0, prepare_ms=4.0,
    n_launches=150, n_queued=150, read_gb_per_s=4e3, floor_ts=4e3, tflops=1.0,
    peak_tflops=800.0, pct_of_peak_tflops=0.125, l2_persist=0, last_token=3,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return tiny_model(folder / "m.gguf", n_ctx=2048, n_layer=LAYERS)


def run(model, cases, modes=("stream",), repetitions=2, **options) -> list[Result]:
    """Results for a path or an open file; the read bandwidth from a mebibyte."""
    file = model if isinstance(model, GGUFFile) else GGUFFile(model)
    return list(bench(file, CpuDevice(), cases, modes, repetitions, probe_bytes=1 << 20, **options))


def test_cases_are_named_and_ordered_by_depth():
    cases = cases_of([512, 0], [128], [(512, 128)], [0, 4096])
    assert [c.name for c in cases] == [
        "pp512", "tg128", "pp512+tg128",
        "pp512 @ d4096", "tg128 @ d4096", "pp512+tg128 @ d4096",
    ]
    assert cases_of([0], [0], [], [0]) == []


def test_results_are_consistent_in_every_mode(path):
    cases = cases_of([20], [6], [(9, 3)], [0, 30])
    results = run(path, cases, list(EXECUTORS), 3)
    assert [(r.name, r.graph_mode) for r in results] == [
        (c.name, m) for c in cases for m in EXECUTORS
    ]
    for r in results:
        n = r.n_prompt + r.n_gen
        assert len(r.samples_ns) == 3 and r.avg_ns == round(np.mean(r.samples_ns))
        assert r.samples_ts == [1e9 * n / ns for ns in r.samples_ns]
        assert r.avg_ts == pytest.approx(np.mean(r.samples_ts))
        assert r.gb_per_s == pytest.approx(r.bytes_per_token * n / np.mean(r.samples_ns))
        assert r.pct_of_peak == pytest.approx(100 * r.gb_per_s / r.read_gb_per_s)
        assert r.floor_ts == pytest.approx(1e9 * r.read_gb_per_s / r.bytes_per_token)
        assert r.pct_of_peak_tflops == pytest.approx(100 * r.tflops / r.peak_tflops)
        assert r.avg_ttft_ns > 0 and (r.n_gen or r.avg_ttft_ns == r.avg_ns)
        assert r.n_queued == {"stream": r.n_launches, "partial": 2 * LAYERS + 1,
                              "loop": 1 / max(1, r.n_gen)}.get(r.graph_mode, 1)
        assert 0 < r.p50_ns <= r.p95_ns and r.host_us_per_token > 0
        assert r.node_updates == 0
        assert r.n_nodes == {"stream": 0, "partial": r.n_launches - LAYERS}.get(
            r.graph_mode, r.n_launches
        )
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", r.test_time)


def test_modes_choose_the_same_last_token(path):
    results = run(path, cases_of([20], [6], [(9, 3)], [0, 30]), list(EXECUTORS), 1)
    by_case = {r.name: set() for r in results}
    for r in results:
        by_case[r.name].add(r.last_token)
    assert all(len(tokens) == 1 for tokens in by_case.values())


def test_a_decode_step_moves_the_weights_and_little_else():
    shape = Shape(2, 256, 256, 4, 2, 64, 300, tied=True)
    file = SyntheticFile("small:f32", {"small": shape})
    weights = sum(t.n_bytes for t in file.tensors.values())  # tied: all are read
    cases = cases_of([], [2], [], [0, 512])
    result, deep = run(file, cases, repetitions=1)
    assert result.bytes_per_token == pytest.approx(weights, rel=0.05)
    kv = 2 * 2 * 512 * 2 * 64 * 4  # k and v, layers, positions, heads, numbers, bytes
    assert deep.bytes_per_token - result.bytes_per_token == pytest.approx(kv, rel=0.01)
    assert result.model_size == weights and result.model_type == "llama 0.865M F32"


def test_a_prompt_is_counted_in_the_steps_of_its_buckets(path):
    short, long = run(path, cases_of([512, 1024], [], [], [0]), repetitions=1)
    assert short.bytes_per_token * 512 < long.bytes_per_token * 1024
    assert long.n_launches == short.n_launches and long.n_ubatch == 2048


@pytest.mark.parametrize("mode", EXECUTORS)
def test_updates_count_the_launches_that_a_repetition_changes(path, mode):
    """The attention of each layer when the KV passes 256 positions; the way back is not counted.

    A loop has from the start what its last step needs.
    """
    (result,) = run(path, [Case(0, 20, 250)], [mode])
    assert result.node_updates == (0 if mode == "loop" else LAYERS)
    assert gc.isenabled()


def test_a_context_that_is_too_small_is_explained(path):
    with pytest.raises(LlamaGraphError, match=r"tg8 @ d90 needs a context of 98 tokens.*-c"):
        run(path, cases_of([], [8], [], [0, 90]), n_ctx=97)
    assert run(path, cases_of([], [8], [], [90]), n_ctx=98, repetitions=1)[0].n_depth == 90


def test_random_tokens_begin_with_bos_where_the_model_adds_it(path):
    file = GGUFFile(path)
    n_vocab = file.tensors["token_embd.weight"].shape[0]
    plain = random_tokens(file, 0, 50)
    assert plain == random_tokens(file, 0, 50) and max(plain) < n_vocab and len(set(plain)) > 30
    file.metadata = Metadata(path, {**file.metadata, "tokenizer.ggml.add_bos_token": True})
    bos = file.metadata["tokenizer.ggml.bos_token_id"]
    assert random_tokens(file, 0, 50) == [bos, *plain[1:]]
    assert random_tokens(file, 7, 50)[0] != bos


def test_the_arithmetic():
    found = speeds(100, [10**9, 2 * 10**9])
    assert found["avg_ns"] == 1.5e9 and found["samples_ts"] == [100, 50]
    assert found["avg_ts"] == 75 and found["stddev_ts"] == pytest.approx(35.355, abs=1e-3)
    assert speeds(1, [7])["stddev_ns"] == 0
    floor = against_floor(10, [10**9], n_bytes=5 * 10**9, bandwidth=2e10)
    assert floor["bytes_per_token"] == 5e8 and floor["gb_per_s"] == 5.0
    assert floor["pct_of_peak"] == 25.0 and floor["floor_ts"] == 40.0
    ceiling = against_ceiling([10**9, 3 * 10**9], flops=10**12, ceiling=1e12)
    assert ceiling == {"tflops": 0.5, "peak_tflops": 1.0, "pct_of_peak_tflops": 50.0}
    steps = [Step(n_rows, host, 10 * host, 1, 1, 1, None) for n_rows, host in
             ((8, 800), (1, 10), (1, 30))]
    assert latencies(Case(8, 2), steps)["p50_ns"] == 200
    assert latencies(Case(8, 2), steps)["host_us_per_token"] == 0.02
    assert latencies(Case(8), steps[:1])["p50_ns"] == 1000


def test_products_with_weights_are_counted_for_a_prompt():
    """Those of all rows in the layers, and of the last row in the head."""
    shape = Shape(2, 256, 512, 4, 2, 64, 300, tied=True)
    file = SyntheticFile("small:f16", {"small": shape})
    (r,) = run(file, [Case(16)], repetitions=1)
    layer = 256 * 64 * (4 + 2 + 2 + 4) + 3 * 256 * 512
    assert r.tflops * r.avg_ns * 1e3 == pytest.approx(2 * (16 * 2 * layer + 256 * 300))


def test_the_probe_sums_every_word_once():
    words = np.zeros(1000, np.uint32)
    fill_words.reference(words, 999)
    assert words[:999].tolist() == [i * 2654435761 % 2**32 for i in range(999)] and words[999] == 0
    for (data, out, n_rounds), _ in read_all.example(np.random.default_rng(0)):
        read_all.reference(data, out, n_rounds)
        tiles = data.reshape(n_rounds, len(out), -1).astype(object)
        assert [int(n) for n in out] == [tiles[:, b].sum() % 2**32 for b in range(len(out))]


def test_the_probe_gives_its_memory_back():
    for device in (CpuDevice(), CpuDevice(available=lambda: 1 << 20), ListDevice()):
        assert read_bandwidth(device, 1 << 20) > 0
        assert device.memory.account().get("probe", 0) == 0


def test_a_prompt_is_read_in_steps_of_ubatch_rows(path):
    whole, cut = run(path, [Case(40), Case(40, n_ubatch=16)], repetitions=1)
    assert whole.last_token == cut.last_token and cut.n_ubatch == 16
    assert cut.bytes_per_token > whole.bytes_per_token  # the layers are read three times


def test_the_build_is_the_checkouts_or_the_version(tmp_path):
    commit, number = build()
    assert re.fullmatch(r"[0-9a-f]{7,}", commit) and number > 10
    package = tmp_path / "site" / "llamagraph"  # inside another repository, perhaps
    assert build(package) == (llamagraph.__version__, 0)
    (tmp_path / "site" / ".git").mkdir(parents=True)  # one that git cannot read
    assert build(package) == (llamagraph.__version__, 0)


def test_before_hears_of_every_case_and_a_warm_up_can_be_left_out(path):
    heard = []
    cases = cases_of([3], [2], [], [0])
    (cold, _) = run(path, cases, ["capture"], 1, warmup=False, before=heard.append)
    assert heard == cases
    assert cold.n_nodes == cold.n_launches
