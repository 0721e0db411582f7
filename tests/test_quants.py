"""The table of tensor types, and that their bytes become the right float32."""

import struct

import numpy as np
import pytest
from gguf import quants as reference
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from llamagraph.errors import FormatError
from llamagraph.gguf import QUANTS, QUANTS_BY_ID

SUPPORTED = [quant for quant in QUANTS.values() if quant.supported]
REFUSED = [quant for quant in QUANTS.values() if not quant.supported]
BLOCKS = [quant for quant in SUPPORTED if hasattr(reference, quant.name)]


def random_bytes(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def test_the_table_is_ggml_s():
    for quant in SUPPORTED:
        kind = GGMLQuantizationType[quant.name]
        assert (quant.id, QUANTS_BY_ID[quant.id]) == (kind, quant)
        assert (quant.block, quant.n_bytes) == GGML_QUANT_SIZES[kind]
    assert len(QUANTS_BY_ID) == len(QUANTS)


@pytest.mark.parametrize("quant", BLOCKS, ids=lambda quant: quant.name)
def test_blocks_become_what_the_gguf_package_makes_of_them(quant):
    raw = random_bytes(6, quant.row_bytes(3 * 256))
    with np.errstate(all="ignore"):
        wanted = reference.dequantize(raw, GGMLQuantizationType[quant.name])
    weights = quant.dequantise(raw.ravel(), (2, 3, 3 * 256))
    assert (weights.dtype, weights.shape) == (np.float32, (2, 3, 768))
    assert np.array_equal(weights.ravel().view(np.uint32), wanted.ravel().view(np.uint32))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("F32", np.float32),
        ("F16", np.float16),
        ("F64", np.float64),
        ("I8", np.int8),
        ("I16", np.int16),
        ("I32", np.int32),
        ("I64", np.int64),
    ],
)
def test_plain_numbers_are_cast(name, dtype):
    numbers = np.array([[0, 1, -1], [100, -128, 127]], dtype)
    raw = np.frombuffer(numbers.tobytes(), np.uint8)
    assert np.array_equal(QUANTS[name].dequantise(raw, (2, 3)), numbers.astype(np.float32))


NIBBLES = bytes(low | (15 - low) << 4 for low in range(16))  # weights 0..15, then 15..0
UP_AND_DOWN = [*range(16), *range(15, -1, -1)]
BY_HAND = {
    "BF16": (struct.pack("<H", 0xC040), [-3.0]),
    "Q4_0": (half(0.5) + NIBBLES, [0.5 * (q - 8) for q in UP_AND_DOWN]),
    "Q4_1": (half(0.5) + half(-2) + NIBBLES, [0.5 * q - 2 for q in UP_AND_DOWN]),
    "Q5_0": (
        half(2) + struct.pack("<I", 0xFFFF0000) + NIBBLES,
        [2 * (q - 16 + 16 * (i >= 16)) for i, q in enumerate(UP_AND_DOWN)],
    ),
    "Q8_0": (
        half(0.25) + bytes(range(240, 256)) + bytes(range(16)),
        [q / 4 for q in range(-16, 16)],
    ),
    "MXFP4": (bytes([128] + [0x71] * 16), [0.5 * 2] * 16 + [6 * 2] * 16),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_block_worked_out_by_hand(name):
    raw, weights = BY_HAND[name]
    found = QUANTS[name].dequantise(np.frombuffer(raw, np.uint8), (len(weights),))
    assert found.tolist() == weights


@pytest.mark.parametrize("name", ["F16", "Q4_1", "Q6_K"])
def test_a_large_tensor_is_converted_in_groups_without_a_seam(name):
    quant = QUANTS[name]
    n_blocks = (1 << 19) // quant.block + 3
    raw = random_bytes(n_blocks, quant.n_bytes)
    weights = quant.dequantise(raw.ravel(), (n_blocks * quant.block,)).reshape(n_blocks, -1)
    for i in (0, n_blocks // 2, *range(0, n_blocks, (1 << 17) // quant.block), n_blocks - 1):
        alone = quant.dequantise(raw[i], (quant.block,))
        assert np.array_equal(weights[i].view(np.uint32), alone.view(np.uint32))


def test_an_empty_tensor_and_a_scalar():
    nothing = np.empty(0, np.uint8)
    assert QUANTS["Q8_0"].dequantise(nothing, (0, 32)).shape == (0, 32)
    one = np.frombuffer(struct.pack("<f", 1.5), np.uint8)
    assert QUANTS["F32"].dequantise(one, ()) == 1.5


def test_damaged_scales_are_converted_in_silence():
    raw = np.frombuffer(b"\x00\x7e" + half(1) + NIBBLES, np.uint8)  # nan
    assert np.isnan(QUANTS["Q4_1"].dequantise(raw, (32,))).all()


def test_row_bytes():
    assert QUANTS["Q4_K"].row_bytes(512) == 288
    assert QUANTS["F16"].row_bytes(3) == 6


@pytest.mark.parametrize("quant", REFUSED, ids=lambda quant: quant.name)
def test_what_cannot_be_converted_is_refused_by_name(quant):
    with pytest.raises(FormatError) as caught:
        quant.dequantise(random_bytes(quant.n_bytes), (quant.block,))
    line = str(caught.value)
    assert quant.name in line and "supported types: F32, F16, Q4_0" in line and line.isprintable()


def test_weights_survive_a_round_trip():
    weights = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    raw = reference.quantize(weights, GGMLQuantizationType.Q8_0)
    found = QUANTS["Q8_0"].dequantise(raw.ravel(), weights.shape)
    assert np.abs(found - weights).max() < np.abs(weights).max() / 127
