"""The types of the KV cache against ggml's own quantisation, and models that use them."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from tiny import tiny_model

import llamagraph
from llamagraph.cli.options import KV_TYPES
from llamagraph.devices.cpu import CpuDevice
from llamagraph.errors import LlamaGraphError
from llamagraph.execute import EXECUTORS
from llamagraph.gguf.reader import GGUFFile
from llamagraph.kernels.kv import QUANTISED, TYPES, empty, slot_bytes
from llamagraph.planner import Planner
from llamagraph.program.target import target_named
from llamagraph.runner import Runner

PROMPT = [1, 5, 9, 14, 3, 200, 17, 40, 41, 42, 43, 6]


def numbers(n_slots=7, n_head_kv=3, head_dim=64):
    x = np.random.default_rng(3).standard_normal((n_slots, n_head_kv, head_dim)).astype(np.float32)
    x[2, 1] = 0  # a block without a scale
    x[3, 0, :32] *= 1e-3
    return x


@pytest.mark.parametrize("dtype", TYPES.values())
def test_what_is_read_is_what_ggml_makes_of_it(dtype):
    x = numbers()
    cache = empty(9, 3, 64, dtype)
    cache.write(np.array([8, 0, 1, 2, 3, 4, 5]), x)
    kind = GGMLQuantizationType[dtype]
    expected = quants.dequantize(quants.quantize(x.reshape(-1, 64), kind), kind).reshape(x.shape)
    if dtype in QUANTISED:
        expected = expected.astype(np.float16).astype(np.float32)
    assert np.array_equal(cache.read(np.array([8, 0, 1, 2, 3, 4, 5])), expected)
    assert np.array_equal(cache.read(slice(0, 2)), expected[1:3])
    assert not cache.read(slice(6, 8)).any()


@pytest.mark.parametrize(("dtype", "size"), [
    ("F32", 768), ("F16", 384), ("BF16", 384), ("Q8_0", 208), ("Q4_0", 112)
])
def test_a_slot_is_numbers_and_scales_up_to_16_bytes(dtype, size):
    assert slot_bytes(dtype, 3, 64) == size == empty(2, 3, 64, dtype).array.nbytes / 2


@pytest.mark.parametrize(("dtype", "limit"), [
    ("F16", 3e-4), ("BF16", 3e-3), ("Q8_0", 6e-3), ("Q4_0", 9e-2)
])
def test_what_a_type_loses(dtype, limit):
    x = np.random.default_rng(4).standard_normal((40, 8, 128)).astype(np.float32)
    cache = empty(40, 8, 128, dtype)
    cache.write(np.arange(40), x)
    assert np.linalg.norm(cache.read(slice(None)) - x) / np.linalg.norm(x) < limit


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Heads of 64 numbers."""
    return tiny_model(tmp_path_factory.mktemp("kv") / "tiny.gguf", quant="Q4_K")


def test_the_planner_takes_llama_cpps_names_and_counts_the_bytes(model):
    with GGUFFile(model) as file:
        for target, usual in (("numpy", "F32"), ("sm_90a", "F16")):
            layer = Planner(file, target_named(target)).kv.layers[0]
            assert layer.k.dtype == layer.v.dtype == usual
        kv = Planner(file, target_named("sm_90a"), 100, "q8_0", "q4_0").kv
        assert [(x.k.dtype, x.v.dtype) for x in kv.layers] == [("Q8_0", "Q4_0")] * 2
        assert kv.bytes_at(10) == 2 * 10 * (slot_bytes("Q8_0", 2, 64) + slot_bytes("Q4_0", 2, 64))
        with pytest.raises(LlamaGraphError, match=r"^-ctk q5_1: .* f32, f16, bf16, q8_0, q4_0$"):
            Planner(file, target_named("numpy"), type_k="q5_1")


def test_heads_that_are_no_whole_blocks_are_an_error(tmp_path):
    with (GGUFFile(tiny_model(tmp_path / "a.gguf")) as file,
          pytest.raises(LlamaGraphError, match=r"^-ctv q4_0: heads of 16 numbers.*; use f16")):
        Planner(file, target_named("numpy"), type_v="q4_0")


def logits_of(path, mode, target="numpy", **types):
    """Logits of many rows, of a few, and of one."""
    runner = Runner(GGUFFile(path), CpuDevice(target_named(target)), mode, 64, **types)
    found = [runner.logits(PROMPT), runner.logits([7, 8]), runner.logits([9])]
    runner.close()
    return np.concatenate(found)


@pytest.mark.parametrize("target", ["numpy", "sm_90a"])
@pytest.mark.parametrize(("name", "limit"), [
    ("f16", 5e-3), ("bf16", 1e-2), ("q8_0", 2e-2), ("q4_0", 0.3)
])
def test_a_model_with_that_type_is_near_one_with_f32(model, target, name, limit):
    exact = logits_of(model, "stream", target, type_k="f32", type_v="f32")
    found = logits_of(model, "stream", target, type_k=name, type_v=name)
    assert 0 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < limit


@pytest.mark.parametrize("types", [("q8_0", "q4_0"), ("bf16", "f16")])
def test_every_mode_gives_the_same_bits(model, types):
    found = [logits_of(model, mode, "sm_90a", type_k=types[0], type_v=types[1])
             for mode in EXECUTORS]
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_open_takes_the_types(model):
    with llamagraph.open(model, device=CpuDevice(), n_ctx=64, type_k="q8_0", type_v="f16") as made:
        assert made.runner.kv.layers[1].k.dtype == "Q8_0"
        assert len([*made.generate(PROMPT, limit=5, temp=0, ignore_eos=True)]) == 5


def test_the_command_line_knows_the_types():
    assert list(TYPES) == KV_TYPES
