"""A weight's bytes from the file's order into tiles (`layouts.py`), when a model is loaded."""

import numpy as np

from llamagraph.gguf.quants import QUANTS
from llamagraph.kernels.layouts import Tiles, Weight, tiles, tiles_of, type_of
from llamagraph.program.launch import Buffer, Geometry, In, Launch, Out, kernel
from llamagraph.program.target import Target

_EXAMPLES = (  # type, shape, layout: every kind of piece, rows and units that do not divide
    ("Q4_0", (21, 256), "rows16"), ("Q4_1", (16, 320), "rows8"), ("Q5_0", (9, 192), "rows8"),
    ("Q5_0", (33, 96), "rows16"), ("Q5_1", (5, 64), "rows32"), ("Q8_0", (40, 576), "rows8"),
    ("MXFP4", (16, 64), "rows16"), ("Q4_K", (16, 768), "rows16"), ("Q6_K", (10, 1280), "rows8"),
    ("Q3_K", (7, 512), "rows8"), ("IQ4_XS", (16, 256), "rows16"), ("F16", (17, 160), "rows16"),
    ("F32", (8, 96), "rows8"),
)


def packed(raw: np.ndarray, t: Tiles) -> np.ndarray:
    """The stored bytes, from the file's: (n_bytes,). Any dtype goes, one number a byte."""
    blocks = raw.reshape(t.n_out, t.n_units, t.blocks, -1)
    head, high, quants = np.split(blocks, [t.head, t.head + t.high], axis=3)
    units = np.concatenate(
        [part.reshape(t.n_out, t.n_units, -1) for part in (quants, high, head)], axis=2
    )
    units = np.pad(units, ((0, t.n_groups * t.rows - t.n_out), (0, 0), (0, 0)))
    groups = units.reshape(t.n_groups, t.rows, t.n_units, -1).transpose(0, 2, 1, 3)
    ends = np.cumsum(t.pieces())[:-1]
    stored = [
        piece.reshape(t.n_groups, -1)
        for tile in np.split(groups, range(32 // t.rows, t.n_units, 32 // t.rows), axis=1)
        for piece in np.split(tile, ends, axis=3)
    ]
    return np.concatenate(stored, axis=1).reshape(-1)


def _geometry(target, raw, stored, n_out: int, n_units: int, rows: int, *sizes) -> Geometry:
    lanes = -(-n_out // rows) * rows * n_units
    return Geometry((-(-lanes // 256), 1, 1), 256)


def _example(rng):
    for dtype, shape, layout in _EXAMPLES:
        t = tiles(dtype, shape, layout)
        raw = rng.integers(0, 256, QUANTS[dtype].row_bytes(shape[1]) * shape[0], np.uint8)
        yield (raw, np.empty(t.n_bytes, np.uint8), *t), {}


@kernel("repack.cu", geometry=_geometry, example=_example)
def repack(raw: In, stored: Out, n_out: int, n_units: int, rows: int, blocks: int, head: int,
           high: int, quants: int) -> None:
    """stored = the tiles of raw, bytes both. Rows that fill up the last tile are zero.

    The numbers are a `Tiles`: `rows` of a tile, `blocks` of a unit, and a block's bytes.
    """
    stored[:] = packed(raw, Tiles(n_out, n_units, rows, blocks, head, high, quants))


class Tiler:
    """Stores weights in their layouts (a `Repack`)."""

    def __init__(self, target: Target):
        self._target = target

    def convert(self, weight: Weight, raw: np.ndarray) -> np.ndarray:
        """The file's bytes, or F16 for a type that has no kernels of its own; row-major."""
        if type_of(weight) == weight.dtype:
            return raw
        values = QUANTS[weight.dtype].dequantise(raw, weight.shape)
        return values.astype("<f2").view(np.uint8).reshape(-1)

    def launch(self, weight: Buffer, raw: Buffer) -> Launch | None:
        """Packs the tiles; None for a layout without any."""
        if "rows" not in weight.layout:
            return None
        args = (raw, weight, *tiles_of(weight))
        return Launch(repack, repack.geometry(self._target, *args), args, f"{weight.name}.repack")
