"""Synthetic models: the shapes, types and sizes of real ones, and weights that can be run."""

import math

import numpy as np
import pytest

from llamagraph.errors import LlamaGraphError
from llamagraph.gguf.reader import GGUFFile
from llamagraph.gguf.synthetic import DEVIATION, MIXES, SHAPES, Shape, SyntheticFile
from llamagraph.models import load

# GB of weights that a token reads: all but the embedding table, a tied one being the lm_head.
READ = {
    "135m:q8_0": 0.143, "1b:q4_k_m": 0.80, "1b:f16": 2.47, "1b:q8_0": 1.31, "1b:q4_0": 0.763,
    "8b:q4_k_m": 4.62, "8b:q4_0": 4.36, "8b:q8_0": 7.98, "8b:f16": 15.01, "70b:q4_k_m": 41.9,
    "70b:q4_0": 39.37,
}
SMALL = Shape(8, 512, 768, 4, 2, 128, 300, tied=False)


def small(quant) -> SyntheticFile:
    """A file that is small enough to look at whole."""
    return SyntheticFile(f"small:{quant}", {"small": SMALL})


@pytest.mark.parametrize("spec, gigabytes", READ.items())
def test_a_token_reads_as_many_bytes_as_of_the_real_model(spec, gigabytes):
    file = SyntheticFile(spec)
    skipped = "token_embd.weight" if "output.weight" in file.tensors else ""
    read = sum(t.n_bytes for name, t in file.tensors.items() if name != skipped)
    assert read / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_are_what_the_metadata_says(name):
    file, shape = SyntheticFile(f"{name}:q8_0"), SHAPES[name]
    config = load(file.metadata).config(file.metadata)
    expected = config.shapes(shape.n_vocab)
    found = {name: t.shape for name, t in file.tensors.items()}
    assert all(expected[name] == size for name, size in found.items())
    assert len(found) == 9 * shape.n_layer + (2 if shape.tied else 3)
    heads = {(s.n_head, s.n_head_kv, s.head_dim) for s in config.layers}
    assert heads == {(shape.n_head, shape.n_head_kv, shape.head_dim)}
    assert isinstance(file, GGUFFile) and config.n_ctx_train == 131072


def test_some_layers_and_the_head_get_more_bits():
    types = {name: t.quant.name for name, t in SyntheticFile("8b:q4_k_m").tensors.items()}
    better = {i for i in range(32) if types[f"blk.{i}.attn_v.weight"] == "Q6_K"}
    assert better == {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}
    assert better == {i for i in range(32) if types[f"blk.{i}.ffn_down.weight"] == "Q6_K"}
    assert types["output.weight"] == "Q6_K" and types["token_embd.weight"] == "Q4_K"
    assert {types[f"blk.{i}.attn_q.weight"] for i in range(32)} == {"Q4_K"}
    tied = SyntheticFile("1b:q4_0").tensors
    assert tied["token_embd.weight"].quant.name == "Q6_K" and "output.weight" not in tied


def test_rows_that_no_k_quant_fits_take_other_types():
    types = {name: t.quant.name for name, t in SyntheticFile("135m:q4_k_m").tensors.items()}
    assert types["blk.5.attn_q.weight"] == "Q5_0" and types["token_embd.weight"] == "Q8_0"
    assert types["blk.0.ffn_down.weight"] == "Q6_K"  # its rows are 1536 long


@pytest.mark.parametrize("quant", MIXES)
def test_weights_are_around_zero_and_of_one_size(quant):
    with small(quant) as file:
        for name, t in file.tensors.items():
            raw = file.data(name)
            assert raw.dtype == np.uint8 and raw.shape == (t.n_bytes,)
            weights = t.quant.dequantise(raw, t.shape)
            if len(t.shape) == 1:
                assert abs(weights - 1).max() < 1
                continue
            assert abs(weights.mean()) < 0.12 * DEVIATION  # Q4_0 goes from -8 to 7
            assert weights.std() == pytest.approx(DEVIATION, rel=0.1)


def test_the_same_every_time_and_different_from_tensor_to_tensor():
    first, second = small("q4_k_m"), small("q4_k_m")
    assert all(np.array_equal(first.data(n), second.data(n)) for n in first.tensors)
    gate, up = (first.data(f"blk.1.ffn_{n}.weight") for n in ("gate", "up"))
    assert not np.array_equal(gate, up)
    assert not gate.flags.writeable


def test_a_pool_holds_little_more_than_its_largest_tensor():
    file = small("q6_k")
    largest = max(math.prod(t.shape) for t in file.tensors.values())
    views = [file.data(name) for name in file.tensors]
    bases = {id(v.base): v.base for v in views if v.size > 10000}
    assert len(bases) == 1
    assert next(iter(bases.values())).size < largest * 210 / 256 + (1 << 16) * 210


@pytest.mark.parametrize("spec", ["", "8b", "2b:q8_0", "8b:q3_k", "8b:q4_k_m:x"])
def test_a_wrong_name_says_which_there_are(spec):
    with pytest.raises(LlamaGraphError, match=r"135m, 1b, 8b, 70b.*q4_k_m") as error:
        SyntheticFile(spec)
    assert "\n" not in str(error.value)


def test_one_step_gives_finite_logits():
    from llamagraph.devices.cpu import CpuDevice
    from llamagraph.runner import Runner

    for quant in ("q4_k_m", "f16"):
        runner = Runner(small(quant), CpuDevice(), n_ctx=16)
        logits = runner.logits([1, 2, 3])
        assert np.isfinite(logits).all() and logits.std() > 0
