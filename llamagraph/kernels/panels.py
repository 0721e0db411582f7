"""Activations as the products of warp groups read them: F16, in the order of their shared memory.

Rows of `n_in` numbers are `n_in` / 64 *panels*: 64 columns of every row, (n_in / 64, rows, 64), so
that the tile of a few rows is one run of bytes. Within each 16 columns, place 8h + 2t + e has
column 4t + 2h + e, which is the order in which weights are unpacked (`csrc/hopper_weights.cuh`);
of a row's eight pieces of 8, piece c is at c ^ (row % 8), which is the 128-byte swizzle. Numbers
beyond F16 are cut off at its largest. Knows no product.
"""

import numpy as np

from llamagraph.program.launch import Buffer, Geometry, In, Out, Traffic, Work, kernel
from llamagraph.program.tape import Tape

LARGEST_F16 = 65504.0
COLUMNS = 64  # of a panel


def halves(x: np.ndarray) -> np.ndarray:
    """x rounded to F16, cut off at its largest number."""
    return np.clip(x, -LARGEST_F16, LARGEST_F16).astype(np.float16)


def _swapped(pieces: np.ndarray) -> np.ndarray:
    """(panels, rows, 8, 8) with piece c of row r at c ^ (r % 8); its own inverse."""
    where = np.arange(8) ^ (np.arange(pieces.shape[1])[:, None] & 7)
    return np.take_along_axis(pieces, where[None, :, :, None], axis=2)


def in_panels(x: np.ndarray) -> np.ndarray:
    """(rows, n_in) as panels: float16 (n_in / 64, rows, 64)."""
    rows, n_in = x.shape
    columns = halves(x).reshape(rows, n_in // COLUMNS, 4, 4, 2, 2)  # of 16: t, h, e
    pieces = columns.transpose(1, 0, 2, 4, 3, 5).reshape(-1, rows, 8, 8)
    return _swapped(pieces).reshape(-1, rows, COLUMNS)


def from_panels(panels: np.ndarray) -> np.ndarray:
    """The rows of panels: float32 (rows, n_in)."""
    n_panels, rows, _ = panels.shape
    pieces = _swapped(panels.reshape(n_panels, rows, 8, 8))
    columns = pieces.reshape(n_panels, rows, 4, 2, 4, 2).transpose(1, 0, 2, 4, 3, 5)
    return columns.reshape(rows, -1).astype(np.float32)


def rows_of(x: Buffer) -> int:
    """Of activations, in panels or row after row."""
    return x.shape[1] if x.dtype == "F16" else x.shape[0]


def panels(tape: Tape, name: str, rows: int, n_in: int) -> Buffer:
    """A scratch buffer for panels of `rows` rows."""
    return tape.scratch(name, n_in // COLUMNS, rows, COLUMNS, dtype="F16")


def _geometry(target, x: Buffer, *rest) -> Geometry:
    return Geometry((-(-x.shape[1] // 1024), x.shape[0], 1), 256)


def _cost(work: Work, x: Buffer, n_rows, out, n_in: int, rows: int) -> Traffic:
    n = min(work.n_rows, rows) * n_in
    return Traffic(4 * n, 2 * n)


def _example(rng):
    for rows, n_rows, n_in in ((8, 7, 64), (32, 32, 576), (128, 33, 1088), (512, 511, 2048)):
        x = rng.standard_normal((rows, n_in), np.float32)
        x[0, :2] = 1e6, -1e6
        out = np.empty((n_in // COLUMNS, rows, COLUMNS), np.float16)
        yield (x, np.array([n_rows], np.int32), out, n_in, rows), {}


@kernel("panels.cu", geometry=_geometry, cost=_cost, example=_example)
def to_panels(x: In, n_rows: In, out: Out, n_in: int, rows: int) -> None:
    """out = x in panels. x: (rows, n_in); out: F16 (n_in / 64, rows, 64)."""
    n = n_rows[0]
    out[:, :n] = in_panels(x[:n])


def pack(tape: Tape, x: Buffer, n_rows: Buffer, label: str) -> Buffer:
    """Rows of floats in panels."""
    rows, n_in = x.shape
    out = panels(tape, f"{label}.x", rows, n_in)
    tape.launch(to_panels, x, n_rows, out, n_in, rows, label=f"{label}.x", variant="panels")
    return out
