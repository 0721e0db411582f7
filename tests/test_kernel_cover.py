"""Which instances are compiled where there are too many."""

import pathlib
import sys
from itertools import product

from llamagraph.kernels.gemm_hopper import hopper_add, hopper_rows
from llamagraph.kernels.panels import to_panels

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "scripts"))
from checks.cover import covering, features, representative

ALL = [
    kernel(TYPE=dtype, UNIT=256, RW=16, TILE_ROWS=rows, SPLIT=split, ROW_STAGES=stages)
    for kernel, dtype, rows, split, stages in product(
        (hopper_add, hopper_rows), ("Q4_K", "Q6_K", "F16"), (8, 64, 256), (1, 2), (2, 3))
]


def test_every_type_and_every_tile_of_every_entry_is_there():
    few = list(covering(ALL))
    assert len(few) < len(ALL) / 4
    for feature in [lambda k: (k.name, dict(k.constants)["TYPE"]),
                    lambda k: (k.name, dict(k.constants)["TILE_ROWS"]),
                    lambda k: (dict(k.constants)["TILE_ROWS"], dict(k.constants)["SPLIT"])]:
        assert set(map(feature, few)) == set(map(feature, ALL))
    assert set().union(*map(features, few)) == set().union(*map(features, ALL))


def test_the_largest_tiles_come_first():
    """They need most registers."""
    assert dict(next(covering(ALL)).constants)["TILE_ROWS"] == 256


def test_other_kernels_are_all_kept():
    assert to_panels in representative([*ALL, to_panels])
    assert representative([to_panels]) == {to_panels}
