"""Which instances are compiled where there are too many."""

import pathlib
import sys
from itertools import product
from typing import Any

import pytest

from llamagraph.kernels.attention_rows import attention_rows_split
from llamagraph.kernels.gemm_hopper import hopper_add, hopper_rows
from llamagraph.kernels.gemm_warps import warps_add, warps_gated, warps_rows
from llamagraph.kernels.panels import to_panels

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "scripts"))
from checks.cover import covering, features, representative

TYPES = ("Q4_K", "Q6_K", "F16")
ENTRIES: dict[Any, dict[str, Any]] = {  # and what names them
    hopper_add: {"ADD": 1}, hopper_rows: {},
    warps_add: {"ADD": 1}, warps_rows: {}, warps_gated: {"ACT": "silu"},
}
HOPPER = [
    kernel(TYPE=dtype, UNIT=256, RW=16, TILE_ROWS=rows, SPLIT=split, ROW_STAGES=stages,
           **ENTRIES[kernel])
    for kernel, dtype, rows, split, stages in product(
        (hopper_add, hopper_rows), TYPES, (8, 64, 256), (1, 2), (2, 3))
]
WARPS = [
    kernel(TYPE=dtype, UNIT=256, RW=16, N_IN=n_in, TILE_ROWS=rows, TEAMS=teams, SPLIT=2, BLOCKS=1,
           STAGES=stages, GROUPS=groups if rows == 8 else 1, **ENTRIES[kernel])
    for kernel, dtype, n_in, rows, teams, stages, groups in product(
        (warps_add, warps_rows, warps_gated), TYPES, (2048, 4096), (8, 32), (1, 8), (2, 3), (1, 2))
]


@pytest.mark.parametrize(("all_", "shape"), [(HOPPER, "SPLIT"), (WARPS, "TEAMS")])
def test_every_type_and_every_tile_of_every_entry_is_there(all_, shape):
    few = list(covering(all_))
    assert len(few) < len(all_) / 4
    for feature in [lambda k: (k.name, dict(k.constants)["TYPE"]),
                    lambda k: (k.name, dict(k.constants)["TILE_ROWS"]),
                    lambda k: (dict(k.constants)["TYPE"], dict(k.constants)["TILE_ROWS"]),
                    lambda k: (dict(k.constants)["TILE_ROWS"], dict(k.constants)[shape])]:
        assert set(map(feature, few)) == set(map(feature, all_))
    assert set().union(*map(features, few)) == set().union(*map(features, all_))


def test_the_largest_tiles_come_first():
    """They need most registers."""
    assert dict(next(covering(HOPPER)).constants)["TILE_ROWS"] == 256


def test_the_most_warps_come_first():
    """They have fewest registers each."""
    first = dict(next(covering(WARPS)).constants)
    assert (first["TILE_ROWS"], first["TEAMS"]) == (32, 8)


@pytest.mark.parametrize("name", ["N_IN", "STAGES", "GROUPS"])
def test_what_is_only_a_number_asks_for_no_instance(name):
    alike: dict[tuple, set] = {}
    for kernel in WARPS:
        rest = (kernel.name, *(item for item in kernel.constants if item[0] != name))
        alike.setdefault(rest, set()).add(features(kernel))
    assert all(len(different) == 1 for different in alike.values())


def test_of_eight_rows_an_odd_number_of_units_is_other_code():
    def of(n_in, rows):
        how = {"TEAMS": 1, "SPLIT": 2, "BLOCKS": 1, "STAGES": 2, "GROUPS": 1}
        return features(warps_rows(TYPE="F16", UNIT=64, RW=16, N_IN=n_in, TILE_ROWS=rows, **how))
    assert of(4096, 8) != of(4160, 8)
    assert of(4096, 32) == of(4160, 32)


def test_of_attention_only_the_number_of_chunks_counts_for_nothing():
    all_ = [attention_rows_split(HEAD_DIM=dim, TYPE_K=dtype, MAX_CHUNKS=n)
            for dim, dtype, n in product((64, 128), ("F16", "Q8_0"), (2, 4, 8))]
    assert len(representative(all_)) == 4


def test_the_sources_are_thinned_one_by_one():
    assert representative([*HOPPER, *WARPS]) == {*covering(HOPPER), *covering(WARPS)}


def test_other_kernels_are_all_kept():
    assert to_panels in representative([*HOPPER, to_panels])
    assert representative([to_panels]) == {to_panels}
