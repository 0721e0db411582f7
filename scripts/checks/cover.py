"""A few instances of kernels that have very many.

Products of many and of few rows have those of tiles times types times entries. Here each entry
occurs with every way in which its weights are stored and with every number of rows of a tile, each
type with every number of rows, and each shape - of tile, split, warps and blocks - with some entry:
but not each way in each shape. What goes wrong for one such pair alone is not seen here, but by
compiling all (`scripts/check-kernels --all`).

How many columns there are, how many groups a warp meets them with, into how many chunks attention
of many rows is shared and how long a ring is count for nothing: they are numbers in the same code.
But of eight rows a warp takes small units in pairs where their number is even.
"""

from collections.abc import Collection, Hashable, Iterator
from typing import Any

from llamagraph.program.launch import Kernel

SOURCES = (  # whose instances are too many
    "attention_rows.cu", "attention_wgmma.cu", "gemm_hopper.cu", "gemm_warps.cu",
)
STORED = ("TYPE", "UNIT", "RW", "V_TYPE", "V_UNIT", "V_RW", "ACT")
LENGTHS = ("N_IN", "GROUPS", "MAX_CHUNKS", "STAGES", "ROW_STAGES", "WEIGHT_STAGES")
ENTRY = ("ADD",)  # says what the kernel's name says


def features(kernel: Kernel) -> frozenset[Hashable]:
    """What an instance has that some instance must be compiled with."""
    constants = dict(kernel.constants)
    stored = tuple(item for item in kernel.constants if item[0] in STORED)
    shape = tuple(item for item in kernel.constants if item[0] not in STORED + LENGTHS + ENTRY)
    if "TYPE" not in constants:  # no product
        return frozenset({(kernel.name, shape)})
    dtype, rows = constants["TYPE"], constants["TILE_ROWS"]
    pairs = "GROUPS" in constants and rows == 8 and constants["N_IN"] // constants["UNIT"] % 2 == 0
    return frozenset({(kernel.name, stored), (kernel.name, rows), (dtype, rows, pairs), shape})


def _strain(kernel: Kernel) -> tuple[int, int]:
    """Grows with the registers that an instance needs; then as those that are there grow fewer."""
    constants: dict[str, Any] = dict(kernel.constants)
    return constants.get("TILE_ROWS", 0), constants.get("TEAMS", 1) * constants.get("SPLIT", 1)


def covering(kernels: Collection[Kernel]) -> Iterator[Kernel]:
    """Instances that have every feature, those that may run out of registers first."""
    left = set().union(*map(features, kernels))
    hardest = sorted(sorted(kernels, key=str), key=_strain, reverse=True)
    for needed in (4, 3, 2, 1):  # how many of its features no earlier one has
        for kernel in hardest:
            if len(features(kernel) & left) >= needed:
                left -= features(kernel)
                yield kernel


def representative(kernels: Collection[Kernel]) -> set[Kernel]:
    """The instances without most of those of `SOURCES`."""
    few = {k for k in kernels if k.source not in SOURCES}
    for source in SOURCES:
        few |= set(covering([k for k in kernels if k.source == source]))
    return few
