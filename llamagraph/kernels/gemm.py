"""Products of many rows with a weight on tensor cores: F16 operands, sums in F32.

Weights are unpacked from their stored tiles on the way; activations are rounded to F16, cut off at
its largest number. Two designs share the work differently: for few rows the warps of a block share
the columns and read weights into registers, above that the block works through shared memory.
Knows no layer; `linear.py` decides what comes here.
"""

from typing import NamedTuple

import numpy as np

from llamagraph.kernels.examples import random_weight
from llamagraph.kernels.layouts import Weight, tile_constants, tiles_of, type_of
from llamagraph.program.launch import (
    Buffer,
    Geometry,
    In,
    InOut,
    Out,
    Traffic,
    Work,
    kernel,
    product_flops,
)
from llamagraph.program.tape import Tape
from llamagraph.program.target import Target

LARGEST_F16 = 65504.0
STEP = 64  # columns that a block multiplies between two barriers
FEW_ROWS = 32  # up to this many rows a tile, warps share the columns


class Tile(NamedTuple):
    """What a block computes: so many outputs (weight rows) of so many rows, with so many warps."""

    out: int
    rows: int
    warps: int

    def blocks(self, rows: int, n_out: int) -> tuple[int, int, int]:
        """The grid: tiles of rows, which share their weights, then tiles of outputs."""
        return -(-rows // self.rows), -(-n_out // self.out), 1


# The first that fits the rows and the shared memory is taken.
FEW_TILES = tuple(Tile(32, rows, warps) for rows in (8, 16, FEW_ROWS) for warps in (8, 4))
TILES = (Tile(128, 128, 8), Tile(64, 128, 8), Tile(64, 64, 4))


def shared_bytes(weight: Buffer, tile: Tile) -> int:
    """Dynamic shared memory of a block.

    Two stages of stored units, of weights and of rows. For few rows, a warp has two units of each
    output and 32 unpacked columns, and later its sums in padded rows.
    """
    t = tiles_of(weight)
    if tile.rows <= FEW_ROWS:
        work = tile.out * (2 * t.unit_bytes + 64)
        return tile.warps * max(work, 4 * tile.rows * (tile.out + 4))
    units = max(1, STEP * t.n_units // weight.shape[1])  # of a stage
    return 2 * (tile.out * units * t.unit_bytes + 2 * STEP * (tile.out + tile.rows))


def choose_tile(target: Target, weight: Buffer, rows: int) -> tuple[Tile, str]:
    """The largest tile that keeps three quarters of the multiprocessors busy, and the reason."""
    n_out = weight.shape[0]
    few = [t for t in FEW_TILES if t.rows >= rows]
    tiles = few or [t for t in TILES if t.rows <= rows]
    fitting = [t for t in tiles if shared_bytes(weight, t) <= target.shared_per_block]
    if few:
        return fitting[0], f"up to {fitting[0].rows} rows: {fitting[0].warps} warps share columns"
    for tile in fitting:
        x, y, _ = tile.blocks(rows, n_out)
        if 4 * x * y >= 3 * target.n_sm:
            return tile, f"{x * y} blocks for {target.n_sm} multiprocessors"
    return fitting[-1], "the smallest tile: few outputs"


def _constants(weight: Weight, tile: Tile) -> dict[str, int | str]:
    return tile_constants(weight) | {
        "TILE_OUT": tile.out, "TILE_ROWS": tile.rows, "WARPS": tile.warps
    }


def _geometry(target, weight: Buffer, x: Buffer, n_rows, out, n_in, n_out: int, *, TILE_OUT: int,
              TILE_ROWS: int, WARPS: int, **layout) -> Geometry:
    tile = Tile(TILE_OUT, TILE_ROWS, WARPS)
    return Geometry(tile.blocks(x.shape[0], n_out), 32 * WARPS, shared_bytes(weight, tile))


def _cost(work: Work, weight: Buffer, x: Buffer, n_rows, out, n_in: int, n_out: int,
          **constants) -> Traffic:
    n = min(work.n_rows, x.shape[0])
    return Traffic(weight.n_bytes + 4 * n * n_in, 4 * n * n_out)


def _flops(work: Work, weight: Buffer, x: Buffer, *rest, **constants) -> int:
    return product_flops(min(work.n_rows, x.shape[0]), weight)


_EXAMPLES = (  # type, layout, outputs, columns, rows, true rows, tile
    ("Q4_K", "rows16", 100, 1280, 8, 2, FEW_TILES[0]),
    ("Q8_0", "rows8", 37, 576, 8, 7, FEW_TILES[1]),
    ("Q6_K", "rows16", 64, 2304, 8, 8, FEW_TILES[0]),
    ("F32", "rows8", 45, 96, 8, 5, FEW_TILES[1]),
    ("Q4_1", "rows16", 40, 320, 16, 13, FEW_TILES[2]),
    ("Q5_0", "rows32", 70, 352, 32, 21, FEW_TILES[4]),
    ("Q3_K", "rows16", 33, 512, 32, 32, FEW_TILES[5]),
    ("BF16", "rows16", 130, 160, 128, 33, TILES[2]),
    ("Q4_0", "rows8", 75, 608, 128, 100, TILES[2]),
    ("F32", "rows16", 50, 1120, 128, 128, TILES[2]),
    ("Q6_K", "rows8", 201, 768, 512, 300, TILES[1]),
    ("Q5_1", "rows16", 97, 1056, 128, 70, TILES[1]),
    ("IQ2_XS", "f16.rows8", 90, 512, 128, 65, TILES[1]),
    ("Q4_K", "rows16", 300, 1536, 512, 512, TILES[0]),
    ("Q8_0", "rows8", 129, 160, 512, 401, TILES[0]),
    ("F16", "rows16", 333, 1184, 128, 127, TILES[0]),
    ("Q5_K", "rows32", 140, 1024, 512, 511, TILES[0]),
    ("Q4_1", "rows16", 131, 32, 128, 3, TILES[0]),
)


def _example(rng):
    for i, (dtype, layout, n_out, n_in, rows, n_rows, tile) in enumerate(_EXAMPLES):
        weight = random_weight(rng, dtype, (n_out, n_in), layout)
        x = rng.standard_normal((rows, n_in), np.float32)
        x[n_rows:] = np.nan
        if i == 0:  # above what F16 can hold; elsewhere it would drown the errors
            x[0, :2] = 1e6, -1e6
        out = np.zeros((rows, n_out), np.float32)
        yield (weight, x, np.array([n_rows], np.int32), out, n_in, n_out), _constants(weight, tile)


def _add_example(rng):
    for (*args, out, n_in, n_out), constants in _example(rng):
        yield (*args, rng.standard_normal(out.shape, np.float32), n_in, n_out), constants


def product_f16(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """x @ weight.T of both rounded to F16, the sums in F32."""
    halves = (np.clip(x, -LARGEST_F16, LARGEST_F16), weight)
    x, weight = (h.astype(np.float16).astype(np.float32) for h in halves)
    return x @ weight.T


@kernel("gemm.cu", geometry=_geometry, cost=_cost, flops=_flops, example=_example)
def gemm_rows(weight: In, x: In, n_rows: In, out: Out, n_in: int, n_out: int, *, TYPE: str,
              UNIT: int, RW: int, TILE_OUT: int, TILE_ROWS: int, WARPS: int) -> None:
    """out = x @ weight.T. weight: (n_out, n_in) in tiles; x: (rows, n_in); out: (rows, n_out)."""
    n = n_rows[0]
    out[:n] = product_f16(weight, x[:n])


@kernel("gemm.cu", geometry=_geometry, cost=_cost, flops=_flops, example=_add_example)
def gemm_add(weight: In, x: In, n_rows: In, hidden: InOut, n_in: int, n_out: int, *, TYPE: str,
             UNIT: int, RW: int, TILE_OUT: int, TILE_ROWS: int, WARPS: int) -> None:
    """hidden += x @ weight.T, shapes as in `gemm_rows`."""
    n = n_rows[0]
    hidden[:n] += product_f16(weight, x[:n])


def gemm(tape: Tape, weight: Buffer, x: Buffer, n_rows: Buffer, out: Buffer, label: str, *,
         add: bool = False) -> None:
    """out = x @ weight.T for all rows of x, or with `add` out += x @ weight.T."""
    tile, reason = choose_tile(tape.target, weight, x.shape[0])
    kernel, (n_out, n_in) = gemm_add if add else gemm_rows, weight.shape
    tape.launch(kernel(**_constants(weight, tile)), weight, x, n_rows, out, n_in, n_out,
                label=label, variant=f"{type_of(weight)} {tile.out}x{tile.rows}", reason=reason)
