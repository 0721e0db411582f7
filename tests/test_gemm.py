"""Planning of products of many rows: tiles, shared memory, grids; and what the reference rounds."""

import numpy as np
import pytest

from llamagraph.kernels.examples import numpy_args
from llamagraph.kernels.gemm import (
    FEW_TILES,
    TILES,
    Tile,
    choose_tile,
    gemm,
    gemm_add,
    gemm_rows,
    product_f16,
    shared_bytes,
)
from llamagraph.kernels.layouts import PACKINGS, layout, stored_bytes
from llamagraph.program.launch import Buffer, StepKey, Work, dense
from llamagraph.program.tape import Tape
from llamagraph.program.target import TARGETS, target_named
from llamagraph.runner import ROW_BUCKETS

GPUS = [t for t in TARGETS.values() if t.is_cuda]
H200 = target_named("sm_90a")


def weight(dtype: str, n_out: int, n_in: int, target=H200) -> Buffer:
    how = layout(target, dtype, (n_out, n_in))
    size = stored_bytes(dtype, (n_out, n_in), how)
    return Buffer("w", "weights", 0, size, dtype, (n_out, n_in), how)


@pytest.mark.parametrize("target", GPUS, ids=lambda t: t.name)
@pytest.mark.parametrize("dtype", [*PACKINGS, "IQ2_XS"])
def test_every_type_has_a_tile_that_fits(target, dtype):
    for rows in ROW_BUCKETS[1:]:
        for n_in in (256, 2048, 14336):
            w = weight(dtype, 4096, n_in, target)
            tile, _ = choose_tile(target, w, rows)
            assert shared_bytes(w, tile) <= target.shared_per_block
            assert tile.rows <= rows and rows % tile.rows == 0


@pytest.mark.parametrize(("n_out", "rows", "tile"), [
    (4096, 2, Tile(32, 8, 8)), (4096, 8, Tile(32, 8, 8)), (4096, 9, Tile(32, 16, 8)),
    (4096, 32, Tile(32, 32, 8)),
    (28672, 512, Tile(128, 128, 8)), (4096, 512, Tile(128, 128, 8)),
    (2048, 512, Tile(64, 128, 8)), (1024, 512, Tile(64, 64, 4)), (4096, 128, Tile(64, 64, 4)),
    (28672, 128, Tile(128, 128, 8)), (64, 128, Tile(64, 64, 4)), (28672, 64, Tile(64, 64, 4)),
])
def test_the_largest_tile_that_keeps_an_h200_busy(n_out, rows, tile):
    assert choose_tile(H200, weight("Q4_K", n_out, 4096), rows)[0] == tile


def test_small_shared_memory_excludes_large_tiles():
    def tile(target: str, dtype: str, rows: int) -> Tile:
        return choose_tile(target_named(target), weight(dtype, 28672, 4096), rows)[0]

    assert tile("sm_75", "Q4_K", 512) == Tile(64, 64, 4)
    assert tile("sm_120", "Q4_K", 512) == Tile(64, 128, 8)
    assert tile("sm_120", "Q6_K", 8) == Tile(32, 8, 4)
    assert tile("sm_120", "Q4_K", 8) == Tile(32, 8, 8)


def test_stages_and_operands_make_the_shared_memory():
    # Two stages of 256 columns in 144 bytes, two operands of 64 columns in halves.
    assert shared_bytes(weight("Q4_K", 4096, 4096), TILES[0]) == 2 * 128 * (144 + 128 + 128)
    # Eight warps with two units each and 32 columns in halves, or 32 rows of 36 sums.
    assert shared_bytes(weight("Q4_K", 4096, 4096), FEW_TILES[0]) == 8 * 32 * (2 * 144 + 64)
    assert shared_bytes(weight("Q4_0", 64, 96), FEW_TILES[4]) == 8 * 32 * 36 * 4
    # Units of 32 columns: a stage has two of them.
    assert shared_bytes(weight("F32", 64, 96), TILES[2]) == 2 * 64 * (256 + 128 + 128)


@pytest.mark.parametrize("add", [False, True])
def test_one_launch(add):
    tape = Tape(H200, StepKey(rows=128), {})
    w, n_rows = weight("Q6_K", 1000, 768), dense("n_rows", "io", 0, (1,), "I32")
    gemm(tape, w, dense("x", "scratch", 0, (128, 768)), n_rows,
         dense("out", "scratch", 1 << 20, (128, 1000)), "ffn_up", add=add)
    (launch,) = tape.program().launches
    assert launch.kernel == (gemm_add if add else gemm_rows)(
        TYPE="Q6_K", UNIT=256, RW=8, TILE_OUT=64, TILE_ROWS=64, WARPS=4
    )
    assert launch.geometry.grid == (2, 16, 1) and launch.geometry.block == 128
    assert launch.variant == "Q6_K 64x64" and launch.args[-2:] == (768, 1000)
    assert launch.traffic(Work(n_rows=100)) == (w.n_bytes + 4 * 100 * 768, 4 * 100 * 1000)


def test_the_reference_is_near_the_exact_product_and_leaves_other_rows():
    assert gemm_add.example
    for i, (args, constants) in enumerate(gemm_add.example(np.random.default_rng(0))):
        w, x, n_rows, hidden, *_ = args = numpy_args(args)
        before, n = hidden.copy(), n_rows[0]
        gemm_add.reference(*args, **constants)
        assert np.array_equal(hidden[n:], before[n:])
        if i:  # the first has numbers that F16 cannot hold
            exact = x[:n].astype(np.float64) @ w.T.astype(np.float64)
            error = hidden[:n] - before[:n] - exact
            assert np.linalg.norm(error) < 1e-3 * np.linalg.norm(exact)


def test_large_activations_are_cut_off():
    assert product_f16(np.ones((1, 2), np.float32), np.array([[1e9, 1]], np.float32)) == 65505
