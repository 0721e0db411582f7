"""How a GPU stores a weight: tiles in which a lane owns a piece of one row. Pure arithmetic.

A *unit* is a lane's share: a few blocks of one row, their quants first and their scales last. RW
rows and 32 / RW units are a tile, cut into pieces of 16 bytes a lane, so that every load of a warp
is one run of 512 bytes; what is left of a unit follows as pieces of 8, 4 and 2 bytes. The tiles of
RW rows follow each other along the row, the last with fewer units where they do not divide; rows
are padded where RW does not divide them. All bits are the file's. `csrc/tiles.cuh` reads what is
written here.

Knows types and shapes, no file and no device's memory.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, Protocol

from llamagraph.errors import LlamaGraphError
from llamagraph.gguf.quants import QUANTS
from llamagraph.program.target import Target


class Weight(Protocol):
    """What is asked of a weight here; a Buffer is one."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def layout(self) -> str: ...


class Packing(NamedTuple):
    """A block of `weights`: bytes of its head, its high bits and its quants, as the file has them.

    `blocks` are the numbers of blocks that a unit may have, the best first.
    """

    weights: int
    head: int
    high: int
    quants: int
    blocks: tuple[int, ...] = (1,)


# Where the head is small, a unit has as many blocks as make whole 16-byte pieces of the heads.
PACKINGS = MappingProxyType(
    {
        "F32": Packing(32, 0, 0, 128),
        "F16": Packing(32, 0, 0, 64, (2, 1)),
        "BF16": Packing(32, 0, 0, 64, (2, 1)),
        "Q4_0": Packing(32, 2, 0, 16, (8, 4, 2, 1)),
        "Q4_1": Packing(32, 4, 0, 16, (8, 4, 2, 1)),
        "Q5_0": Packing(32, 2, 4, 16, (8, 4, 2, 1)),
        "Q5_1": Packing(32, 4, 4, 16, (8, 4, 2, 1)),
        "Q8_0": Packing(32, 2, 0, 32, (4, 2, 1)),
        "IQ4_NL": Packing(32, 2, 0, 16, (8, 4, 2, 1)),
        "MXFP4": Packing(32, 1, 0, 16, (8, 4, 2)),
        "Q2_K": Packing(256, 0, 0, 84),
        "Q3_K": Packing(256, 0, 0, 110),
        "Q4_K": Packing(256, 0, 0, 144),
        "Q5_K": Packing(256, 0, 0, 176),
        "Q6_K": Packing(256, 0, 0, 210),
        "IQ4_XS": Packing(256, 8, 0, 128),
    }
)
FLOATS = ("F32", "F16", "BF16")  # activations meet them as floats, other types as int8


class Tiles(NamedTuple):
    """The numbers of a tiled weight: rows, units a row, rows a tile, and a block's bytes.

    In this order they are the arguments of the kernel `repack`.
    """

    n_out: int
    n_units: int
    rows: int
    blocks: int
    head: int
    high: int
    quants: int

    @property
    def unit_bytes(self) -> int:
        return self.blocks * (self.head + self.high + self.quants)

    @property
    def row_bytes(self) -> int:
        return self.n_units * self.unit_bytes

    @property
    def n_groups(self) -> int:
        """Groups of `rows` rows, the last padded."""
        return -(-self.n_out // self.rows)

    @property
    def n_bytes(self) -> int:
        return self.n_groups * self.rows * self.row_bytes

    @property
    def n_tiles(self) -> int:
        """Tiles of a group."""
        return -(-self.n_units // (32 // self.rows))

    def pieces(self) -> list[int]:
        """Sizes of a unit's pieces, in bytes."""
        sizes, left = [16] * (self.unit_bytes // 16), self.unit_bytes % 16
        return sizes + [size for size in (8, 4, 2) if left & size]


def _blocks(dtype: str, n_in: int) -> int:
    """Blocks of a unit in rows of `n_in` weights; 0 where the type has no units that fit."""
    if (packing := PACKINGS.get(dtype)) is None:
        return 0
    return next((m for m in packing.blocks if n_in % (m * packing.weights) == 0), 0)


def layout(target: Target, dtype: str, shape: Sequence[int]) -> str:
    """The order in which `target` stores a weight; its name is a Buffer's `layout`.

    "": the file's bytes. "rows16": tiles of 16 rows. "f16.rows16": tiles of numbers that were
    converted to F16, for the types with no kernels of their own. Vectors are F32 everywhere. All
    matrices that share an input have equal tiles, so the rule looks at the length of a row alone:
    short rows come in small matrices, where fewer rows a tile keep more multiprocessors busy.
    Raises LlamaGraphError for rows that are no multiple of 32 weights.
    """
    if not target.is_cuda or len(shape) < 2:
        return ""
    n_in = shape[-1]
    if n_in % 32:
        raise LlamaGraphError(
            f"{dtype} weight of shape {tuple(shape)}: a GPU needs rows of a multiple of 32 "
            f"weights; use --device cpu"
        )
    rows = f"rows{8 if n_in <= 1024 else 16}"
    return rows if _blocks(dtype, n_in) else f"f16.{rows}"


def stored_type(dtype: str, layout: str) -> str:
    """The type in which a weight of the file's type `dtype` is stored."""
    return "F16" if layout.startswith("f16.") else dtype


def tiles(dtype: str, shape: Sequence[int], layout: str) -> Tiles:
    """The tiles of a weight whose layout has any."""
    return _tiles(dtype, tuple(shape), layout)


@lru_cache(256)  # a model's layers are alike
def _tiles(dtype: str, shape: tuple[int, ...], layout: str) -> Tiles:
    stored, n_in = stored_type(dtype, layout), shape[-1]
    packing, blocks = PACKINGS[stored], _blocks(stored, n_in)
    assert blocks, f"{stored} rows of {n_in} have no units"
    n_units = n_in // (blocks * packing.weights)
    rows = int(layout.rpartition("rows")[2])
    return Tiles(math.prod(shape[:-1]), n_units, rows, blocks, *packing[1:4])


def stored_bytes(dtype: str, shape: Sequence[int], layout: str) -> int:
    """Bytes of a weight on the device."""
    if "rows" in layout:
        return tiles(dtype, shape, layout).n_bytes
    quant = QUANTS[stored_type(dtype, layout)]
    return math.prod(shape) // quant.block * quant.n_bytes


def tiles_of(weight: Weight) -> Tiles:
    return tiles(weight.dtype, weight.shape, weight.layout)


def type_of(weight: Weight) -> str:
    return stored_type(weight.dtype, weight.layout)


def unit_weights(weight: Weight) -> int:
    """Weights of a unit."""
    return weight.shape[-1] // tiles_of(weight).n_units


def tile_constants(weight: Weight) -> dict[str, int | str]:
    """The compile-time constants of a kernel that reads the weight; row-major has no tiles."""
    if "rows" not in weight.layout:
        return {"TYPE": type_of(weight), "UNIT": 0, "RW": 0}
    return {"TYPE": type_of(weight), "UNIT": unit_weights(weight), "RW": tiles_of(weight).rows}


def shared_layout(weights: Sequence[Weight]) -> bool:
    """Whether one kernel instance reads all of the weights."""
    return len({(type_of(w), w.layout, w.shape[-1]) for w in weights}) == 1


def conversion(weight: Weight) -> str:
    """Why a weight is stored in another type than the file's; empty where it is not."""
    stored = type_of(weight)
    return "" if stored == weight.dtype else f"{weight.dtype} is converted to {stored} at load"
