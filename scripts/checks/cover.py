"""A few instances of a kernel that has very many: those of tiles times types times entries.

Each entry occurs with every way in which its weights are stored and with every number of rows of a
tile, and each shape of tile, split and blocks with some entry - but not each way in each shape.
What goes wrong for one such pair alone is not seen here, but by compiling all
(`scripts/check-kernels --all`).
"""

from collections.abc import Collection, Hashable, Iterator

from llamagraph.program.launch import Kernel

SOURCES = ("gemm_hopper.cu",)  # whose instances are too many
STORED = ("TYPE", "UNIT", "RW", "V_TYPE", "V_UNIT", "V_RW", "ACT")
LENGTHS = ("ROW_STAGES", "WEIGHT_STAGES")  # how long a ring is changes no code


def features(kernel: Kernel) -> frozenset[Hashable]:
    """What an instance has that some instance must be compiled with."""
    stored = tuple(item for item in kernel.constants if item[0] in STORED)
    shape = tuple(item for item in kernel.constants if item[0] not in STORED + LENGTHS)
    rows = dict(kernel.constants)["TILE_ROWS"]
    return frozenset({(kernel.name, stored), (kernel.name, rows), shape})


def covering(kernels: Collection[Kernel]) -> Iterator[Kernel]:
    """Instances that have every feature, those with most registers first."""
    left = set().union(*map(features, kernels))
    for needed in (3, 2, 1):  # how many of its features no earlier one has
        for kernel in sorted(kernels, key=lambda k: (-dict(k.constants)["TILE_ROWS"], str(k))):
            if len(features(kernel) & left) >= needed:
                left -= features(kernel)
                yield kernel


def representative(kernels: Collection[Kernel]) -> set[Kernel]:
    """The instances without most of those of `SOURCES`."""
    many = [k for k in kernels if k.source in SOURCES]
    return {k for k in kernels if k.source not in SOURCES} | set(covering(many))
