"""Weight layouts: the stored bytes hold the file's bits, all of them, each once."""

import numpy as np
import pytest

from llamagraph.errors import LlamaGraphError
from llamagraph.gguf.quants import QUANTS
from llamagraph.kernels import layouts
from llamagraph.kernels.examples import random_weight
from llamagraph.kernels.repack import Tiler, packed, repack
from llamagraph.program.launch import Buffer
from llamagraph.program.target import TARGETS, target_named

GPU = target_named("sm_90a")
SHAPES = ((1, 256), (7, 512), (16, 768), (33, 2304), (40, 1280))
WIDTHS = (32, 64, 96, 160, 192, 576, 640, 1088)  # for blocks of 32


def unpacked(stored, t):
    """The file's bytes, from the stored ones: `packed` run over the numbers of the bytes."""
    n_bytes = t.n_out * t.n_units * t.unit_bytes
    source = packed(np.arange(1, n_bytes + 1), t)  # 0 where a row is only padding
    raw = np.zeros(n_bytes, np.uint8)
    raw[source[source > 0] - 1] = stored[source > 0]
    return raw


def shapes_of(dtype):
    if QUANTS[dtype].block == 256:
        return SHAPES
    return SHAPES + tuple((n, k) for n, k in zip((1, 5, 8, 17, 31, 32, 9, 48), WIDTHS, strict=True)
                          if dtype != "MXFP4" or k % 64 == 0)


@pytest.mark.parametrize("rows", [8, 16, 32])
@pytest.mark.parametrize("dtype", layouts.PACKINGS)
def test_packing_keeps_every_bit(dtype, rows):
    rng = np.random.default_rng(0)
    for shape in shapes_of(dtype):
        t = layouts.tiles(dtype, shape, f"rows{rows}")
        raw = rng.integers(0, 256, QUANTS[dtype].row_bytes(shape[1]) * shape[0], np.uint8)
        stored = packed(raw, t)
        assert stored.nbytes == layouts.stored_bytes(dtype, shape, f"rows{rows}")
        assert np.array_equal(unpacked(stored, t), raw)


@pytest.mark.parametrize("dtype", layouts.PACKINGS)
def test_only_rows_that_fill_a_tile_are_added(dtype):
    n_in = 512
    exact = QUANTS[dtype].row_bytes(n_in)
    assert layouts.stored_bytes(dtype, (48, n_in), "rows16") == 48 * exact
    assert layouts.stored_bytes(dtype, (33, n_in), "rows16") == 48 * exact


def test_a_tile_is_planes_of_16_bytes_a_lane_then_the_rest():
    """Q6_K, 16 rows: lane 16 * unit + row; 13 planes, then 2 bytes a lane."""
    t = layouts.tiles("Q6_K", (16, 512), "rows16")
    assert t.pieces() == [16] * 13 + [2]
    raw = np.arange(16 * 2 * 210)
    stored = packed(raw, t)
    row, unit, plane = 5, 1, 3
    lane = unit * 16 + row
    first = (row * 2 + unit) * 210
    at = plane * 512 + lane * 16
    assert np.array_equal(stored[at : at + 16], raw[first + plane * 16 : first + plane * 16 + 16])
    at = 13 * 512 + lane * 2
    assert np.array_equal(stored[at : at + 2], raw[first + 208 : first + 210])


def test_quants_come_before_scales():
    """Q5_1: 16 bytes of quants, 4 of high bits, 4 of scales; the file has them reversed."""
    t = layouts.tiles("Q5_1", (8, 64), "rows8")
    assert (t.blocks, t.n_units, t.pieces()) == (2, 1, [16, 16, 16])
    stored = packed(np.arange(8 * 48), t)  # of row 0: bytes 0..47
    assert list(stored[:16]) == list(range(8, 24))
    assert list(stored[128:144]) == list(range(32, 48))
    assert list(stored[256:272]) == [*range(4, 8), *range(28, 32), *range(4), *range(24, 28)]


def test_units_have_as_many_blocks_as_fit():
    for n_in, blocks in ((32, 1), (96, 1), (576, 2), (640, 4), (2048, 8)):
        assert layouts.tiles("Q4_0", (8, n_in), "rows8").blocks == blocks
    assert layouts.tiles("Q8_0", (8, 2048), "rows8").blocks == 4


def test_a_gpu_has_tiles_and_numpy_the_file():
    assert layouts.layout(TARGETS["numpy"], "Q4_K", (512, 512)) == ""
    assert layouts.layout(GPU, "F32", (512,)) == ""
    assert layouts.layout(GPU, "Q4_K", (512, 1024)) == "rows8"
    assert layouts.layout(GPU, "Q4_K", (512, 4096)) == "rows16"


def test_every_type_has_a_layout_on_a_gpu():
    for quant in filter(lambda q: q.supported, QUANTS.values()):
        order = layouts.layout(GPU, quant.name, (24, 512))
        stored = layouts.stored_type(quant.name, order)
        assert stored == (quant.name if quant.name in layouts.PACKINGS else "F16")
        n_bytes = layouts.stored_bytes(quant.name, (24, 512), order)
        assert n_bytes == 24 * QUANTS[stored].row_bytes(512)


def test_matrices_that_share_an_input_have_equal_tiles():
    for n_in in (576, 1024, 2048, 8192):
        assert len({layouts.layout(GPU, "Q4_0", (n, n_in)) for n in (64, 1000, 128256)}) == 1


def test_odd_rows_are_refused_with_the_way_out():
    with pytest.raises(LlamaGraphError, match=r"F16 weight of shape \(8, 40\).*--device cpu"):
        layouts.layout(GPU, "F16", (8, 40))


def weight_buffer(dtype, shape):
    order = layouts.layout(GPU, dtype, shape)
    n_bytes = layouts.stored_bytes(dtype, shape, order)
    return Buffer("w", "weights", 0, n_bytes, dtype, shape, order)


def test_a_type_without_kernels_is_converted_to_f16():
    weight = weight_buffer("IQ2_XS", (10, 512))
    made = random_weight(np.random.default_rng(0), "IQ2_XS", (10, 512), weight.layout)
    halves = Tiler(GPU).convert(weight, made.raw)
    assert np.array_equal(halves.view("<f2").reshape(10, 512), made.matrix)
    assert weight.n_bytes == 16 * 1024  # 512 F16 a row, 10 rows padded to 16
    assert layouts.conversion(weight) == "IQ2_XS is converted to F16 at load"
    assert layouts.conversion(weight_buffer("Q4_K", (10, 512))) == ""


def test_the_repack_launch_does_what_packed_does():
    weight = weight_buffer("Q5_K", (20, 512))
    made = random_weight(np.random.default_rng(0), "Q5_K", (20, 512), weight.layout)
    raw = Buffer("raw", "raw", 0, made.raw.nbytes, "U8", made.raw.shape)
    launch = Tiler(GPU).launch(weight, raw)
    assert launch is not None
    stored = np.empty(weight.n_bytes, np.uint8)
    repack.reference(made.raw, stored, *launch.args[2:])
    assert np.array_equal(unpacked(stored, layouts.tiles_of(weight)), made.raw)
