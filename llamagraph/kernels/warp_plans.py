"""Which products of few rows single warps do, and how they share them: arithmetic and figures.

A block has TEAMS groups of 16 outputs, SPLIT warps share the units of a group's columns, BLOCKS
blocks share the columns; STAGES steps are copied ahead. Knows no kernel; `gemm_warps.py` is planned
here.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from llamagraph.kernels.layouts import Weight, tiles_of, type_of, unit_weights
from llamagraph.kernels.panels import COLUMNS
from llamagraph.kernels.warp_groups import TYPES
from llamagraph.program.target import Target

OUTPUTS = 16  # of a warp
WARPS = 16  # of a block, at most: with 128 registers a thread they fill a multiprocessor
WARPS_OF_MANY_SUMS = 12  # where each has two weights' sums with 32 rows
WARPS_OF_HIGH_BITS = 8  # where it has those with 16 rows, of these types, which are more to unpack:
HIGH_BITS = ("Q5_K", "Q6_K")
MOST_STAGES = 8
STRIDE = 20  # floats that a row of a warp's sums takes
TILE_ROWS = (8, 16, 32)


class Plan(NamedTuple):
    tile_rows: int
    teams: int
    split: int
    cluster: int
    stages: int
    whole: bool
    reason: str = ""

    @property
    def warps(self) -> int:
        return self.teams * self.split

    @property
    def constants(self) -> dict[str, int | str]:
        return {"TILE_ROWS": self.tile_rows, "TEAMS": self.teams, "SPLIT": self.split,
                "BLOCKS": self.cluster, "STAGES": self.stages, "WHOLE": int(self.whole)}

    @property
    def variant(self) -> str:
        shared = self.split * self.cluster
        return f"mma {OUTPUTS * self.teams}x{self.tile_rows}{f' / {shared}' if shared > 1 else ''}"


class Stored(NamedTuple):
    """What a plan asks of a weight: units of a row, weights and bytes of a unit, HIGH_BITS."""

    n_units: int
    columns: int
    unit_bytes: int
    high_bits: bool

    def steps(self, how: Plan) -> int:
        return -(-self.n_units // (how.cluster * how.split))

    def shared(self, how: Plan, parts: int) -> tuple[int, int]:
        """Bytes of shared memory that are always there, and those of a stage.

        A stage has a unit of each warp's outputs, and the rows' columns of a step if a block does
        not have the whole of its share of them.
        """
        columns = 2 * how.tile_rows * how.split * self.columns
        units = OUTPUTS * how.warps * parts * self.unit_bytes
        return (columns * self.steps(how), units) if how.whole else (0, columns + units)


def _stored(weights: Sequence[Weight]) -> tuple[Stored, ...]:
    different = {w.layout + type_of(w): w for w in weights}
    return tuple(Stored(tiles_of(w).n_units, unit_weights(w), tiles_of(w).unit_bytes,
                        type_of(w) in HIGH_BITS) for w in different.values())


def _shared_bytes(stored: Sequence[Stored], how: Plan, parts: int) -> int:
    both = (s.shared(how, parts) for s in stored)
    sums = 4 * how.warps * parts * how.tile_rows * STRIDE
    return max(sums, *(fixed + how.stages * stage for fixed, stage in both))


def shared_bytes(weights: Sequence[Weight], how: Plan, parts: int = 1) -> int:
    """Dynamic shared memory of a block; the sums take the place of the stages at the end."""
    return _shared_bytes(_stored(weights), how, parts)


def takes(target: Target, weight: Weight, rows: int) -> bool:
    """Whether so many rows can be multiplied with the weight here."""
    return (target.is_cuda and int(target.name[3:].rstrip("a")) >= 80 and rows in TILE_ROWS
            and type_of(weight) in TYPES and unit_weights(weight) % COLUMNS == 0
            and tiles_of(weight).rows <= OUTPUTS
            and shared_bytes([weight], Plan(rows, 1, 1, 1, 2, False), 2) <= target.shared_per_block)


def _possible(target: Target, stored: Sequence[Stored], tile_rows: int, parts: int
              ) -> Iterator[Plan]:
    """All ways to share that a block has room for."""
    n_units = min(s.n_units for s in stored)
    warps = WARPS_OF_MANY_SUMS if parts * tile_rows > 32 else WARPS
    if (parts, tile_rows) == (2, 16) and any(s.high_bits for s in stored):
        warps = WARPS_OF_HIGH_BITS
    for cluster, teams in product((1, 2) if target.name == "sm_90a" else (1,), range(1, warps + 1)):
        splits = range(1, min(warps // teams, n_units // cluster) + 1)
        for split, whole in product(splits, (tile_rows == 8, False)):  # more rows take too long
            how = Plan(tile_rows, teams, split, cluster, 1, whole)
            steps, stages = max(s.steps(how) for s in stored), MOST_STAGES
            for fixed, stage in (s.shared(how, parts) for s in stored):
                stages = min(stages, steps, (target.shared_per_block - fixed) // stage)
            how = how._replace(stages=stages)
            if (stages >= min(2, steps)
                    and _shared_bytes(stored, how, parts) <= target.shared_per_block):
                yield how


# Measured on an H200, in nanoseconds: the rest of a launch, adding up within a cluster, bytes of
# weights and of rows into a multiprocessor; unpacking a weight's byte, and 64 columns of 16 outputs
# for each eight rows.
LAUNCH_TIME, CLUSTER_TIME, WEIGHT_BYTE_TIME, ROW_BYTE_TIME = 1800, 1350, 0.031, 0.013
UNPACK_TIME, EIGHT_TIME = 0.078, 9
IDLE = 1.9  # warps' turns in which a scheduler waits, whatever their number
WAITING = 1.22  # what it costs that warps wait for each other in every step


def _time(target: Target, groups: Sequence[int], stored: Sequence[Stored], how: Plan, parts: int
          ) -> float:
    """Nanoseconds of a product of so many groups of outputs."""
    first = stored[0]
    blocks = sum(-(-n // how.teams) for n in groups) * how.cluster
    waves = -(-blocks // (target.n_sm // how.cluster * how.cluster))
    units, steps = -(-first.n_units // how.cluster), first.steps(how)
    reading = OUTPUTS * how.teams * parts * units * first.unit_bytes * WEIGHT_BYTE_TIME
    reading += 2 * units * first.columns * how.tile_rows * ROW_BYTE_TIME
    unpack = OUTPUTS * first.unit_bytes * UNPACK_TIME  # of a unit
    each = unpack + EIGHT_TIME * how.tile_rows / 8 * first.columns / COLUMNS
    turns = IDLE + -(-how.warps // 4)  # of a scheduler
    work = steps * turns * parts * each * (1 if how.whole else WAITING)
    wave = max(reading, work) + 0.8 * min(reading, work) / steps
    return LAUNCH_TIME + CLUSTER_TIME * (how.cluster > 1) + waves * wave


@lru_cache(256)  # a model's layers are alike
def _best(target: Target, groups: tuple[int, ...], stored: tuple[Stored, ...], rows: int,
          parts: int) -> Plan:
    return min(_possible(target, stored, rows, parts),
               key=lambda how: (_time(target, groups, stored, how, parts), how))


def plan(target: Target, weights: Sequence[Weight], rows: int, parts: int = 1) -> Plan:
    """How a product is shared so that it is done first."""
    groups = tuple(-(-w.shape[0] // OUTPUTS) for w in weights)
    how = _best(target, groups, _stored(weights), rows, parts)
    return how._replace(reason=f"{sum(groups)} groups of {OUTPUTS} outputs for {target.n_sm} "
                               f"multiprocessors, {how.stages} steps ahead")
