"""Which products of few rows single warps do, and how they share them: arithmetic and figures.

A block has TEAMS * GROUPS groups of 16 outputs, SPLIT warps share the units of a team's columns,
BLOCKS blocks share the columns; STAGES steps are copied ahead. Of eight rows a warp keeps those
numbers in registers that meet its units (`csrc/warp_columns.cuh`), for GROUPS groups one after the
other; of more rows all are in shared memory, a step at a time, and a team has one group
(`csrc/gemm_warps.cuh`). Knows no kernel; `gemm_warps.py` is planned here.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from llamagraph.kernels.layouts import Weight, tiles_of, type_of, unit_weights
from llamagraph.kernels.panels import COLUMNS
from llamagraph.kernels.warp_groups import TYPES
from llamagraph.program.target import Target

OUTPUTS = 16  # of a group
WARPS = 16  # of a block, at most: with 128 registers a thread they fill a multiprocessor
WARPS_OF_MANY_SUMS = 12  # where each has two weights' sums with 32 rows
WARPS_OF_HIGH_BITS = 8  # where it has those with 16 rows, of these types, which are more to unpack:
HIGH_BITS = ("Q5_K", "Q6_K")
MOST_STAGES = 8
MOST_GROUPS = 16
UNDER_WAY = 80_000  # bytes of weights on their way to a block that suffice
EIGHT = 8  # rows of the smallest tile
STRIDE = 20  # floats that a row of a warp's sums takes
TILE_ROWS = (EIGHT, 16, 32)


class Plan(NamedTuple):
    tile_rows: int
    teams: int
    split: int
    cluster: int
    stages: int
    groups: int = 1
    reason: str = ""

    @property
    def warps(self) -> int:
        return self.teams * self.split

    @property
    def outputs(self) -> int:
        return OUTPUTS * self.teams * self.groups

    @property
    def constants(self) -> dict[str, int | str]:
        return {"TILE_ROWS": self.tile_rows, "TEAMS": self.teams, "SPLIT": self.split,
                "BLOCKS": self.cluster, "STAGES": self.stages, "GROUPS": self.groups}

    @property
    def variant(self) -> str:
        shared = self.split * self.cluster
        return f"mma {self.outputs}x{self.tile_rows}{f' / {shared}' if shared > 1 else ''}"


class Stored(NamedTuple):
    """What a plan asks of a weight: units of a row, weights and bytes of a unit, HIGH_BITS."""

    n_units: int
    columns: int
    unit_bytes: int
    high_bits: bool

    @property
    def share(self) -> int:
        """Units that a warp with columns of its own has at a time."""
        return 2 if (self.n_units % 2 == 0 and 2 * self.columns <= 256
                     and 2 * OUTPUTS * self.unit_bytes <= 4096) else 1

    def turns(self, how: Plan) -> int:
        """How often a warp has other columns."""
        each = self.share if how.tile_rows == EIGHT else 1
        return -(-self.n_units // (how.cluster * how.split * each))

    def shared(self, how: Plan, parts: int) -> int:
        """Bytes of shared memory: stages of weights and of rows, and the sums."""
        if how.tile_rows > EIGHT:
            columns = 2 * how.tile_rows * how.split * self.columns
            units = OUTPUTS * how.warps * parts * self.unit_bytes
            sums = 4 * how.warps * parts * how.tile_rows * STRIDE
            return max(sums, how.stages * (columns + units))
        each = how.groups * parts
        sums = 4 * OUTPUTS * EIGHT * each
        rows = 2 * EIGHT * self.share * self.columns
        weights = how.stages * OUTPUTS * self.share * self.unit_bytes
        if how.split * self.share == self.n_units:  # sums take the rows' place
            return how.warps * (weights + max(rows, sums))
        return how.warps * (weights + -(-how.stages // each) * rows + sums)


def _stored(weights: Sequence[Weight]) -> tuple[Stored, ...]:
    different = {w.layout + type_of(w): w for w in weights}
    return tuple(Stored(tiles_of(w).n_units, unit_weights(w), tiles_of(w).unit_bytes,
                        type_of(w) in HIGH_BITS) for w in different.values())


def shared_bytes(weights: Sequence[Weight], how: Plan, parts: int = 1) -> int:
    """Dynamic shared memory of a block."""
    return max(s.shared(how, parts) for s in _stored(weights))


def takes(target: Target, weight: Weight, rows: int) -> bool:
    """Whether so many rows can be multiplied with the weight here."""
    return (target.is_cuda and int(target.name[3:].rstrip("a")) >= 80 and rows in TILE_ROWS
            and type_of(weight) in TYPES and unit_weights(weight) % COLUMNS == 0
            and tiles_of(weight).rows <= OUTPUTS
            and shared_bytes([weight], Plan(rows, 1, 1, 1, 2), 2) <= target.shared_per_block)


def _with_stages(target: Target, stored: Sequence[Stored], how: Plan, parts: int, most: int
                 ) -> Iterator[Plan]:
    """The plan with as many stages as there is use and room for."""
    turns = max(s.turns(how) for s in stored) * how.groups
    most = min(most, turns * (parts if how.tile_rows == EIGHT else 1))
    for stages in range(most, min(2, most) - 1, -1):
        if all(s.shared(how._replace(stages=stages), parts) <= target.shared_per_block
               for s in stored):
            yield how._replace(stages=stages)
            return


def _ahead(stored: Stored, how: Plan, parts: int) -> int:
    """Stages of eight rows that suffice: the first columns' weights, and those that come next."""
    stage = stored.share * stored.unit_bytes * OUTPUTS * how.warps
    return min(max(2, UNDER_WAY // stage), max(3, how.groups * parts + 1), MOST_STAGES)


def _possible(target: Target, stored: Sequence[Stored], tile_rows: int, parts: int
              ) -> Iterator[Plan]:
    """All ways to share that a block has room for."""
    if tile_rows == EIGHT:
        n_shares = min(s.n_units // s.share for s in stored)
        for teams, groups in product(range(1, WARPS + 1), range(1, MOST_GROUPS // parts + 1)):
            for split in range(1, min(WARPS // teams, n_shares) + 1):
                how = Plan(EIGHT, teams, split, 1, 1, groups)
                yield from _with_stages(target, stored, how, parts, _ahead(stored[0], how, parts))
        return
    n_units = min(s.n_units for s in stored)
    warps = WARPS_OF_MANY_SUMS if parts * tile_rows > 32 else WARPS
    if (parts, tile_rows) == (2, 16) and any(s.high_bits for s in stored):
        warps = WARPS_OF_HIGH_BITS
    for cluster, teams in product((1, 2) if target.name == "sm_90a" else (1,), range(1, warps + 1)):
        for split in range(1, min(warps // teams, n_units // cluster) + 1):
            how = Plan(tile_rows, teams, split, cluster, 1)
            yield from _with_stages(target, stored, how, parts, MOST_STAGES)


# Measured on an H200, in nanoseconds: the rest of a launch, adding up within a cluster, bytes of
# weights and of rows into a multiprocessor; unpacking a weight's byte, and 64 columns of 16 outputs
# for each eight rows.
LAUNCH_TIME, CLUSTER_TIME, WEIGHT_BYTE_TIME, ROW_BYTE_TIME = 1800, 1350, 0.031, 0.013
UNPACK_TIME, EIGHT_TIME = 0.078, 9
IDLE = 1.9  # warps' turns in which a scheduler waits, whatever their number
WAITING = 1.22  # what it costs that warps wait for each other in every step
# Of eight rows: the work on a column of 16 outputs, that on a group's at least, and what of the
# shorter of work and reading does not happen meanwhile. Where there is room for two blocks, one
# multiprocessor may get two while others have none. The few blocks of the launch before, of
# attention or a norm, make those wait whose many warps leave no registers for both.
COLUMN_TIME, GROUP_TIME, APART, TWO_BLOCKS = 0.9, 560, 0.25, 1.5
LATE_TIME, WARPS_BESIDE, BLOCKS_BEFORE = 180, 8, 16


def _time(target: Target, groups: Sequence[int], stored: Sequence[Stored], how: Plan, parts: int
          ) -> float:
    """Nanoseconds of a product of so many groups of outputs."""
    first = stored[0]
    blocks = sum(-(-n // (how.teams * how.groups)) for n in groups) * how.cluster
    waves = -(-blocks // (target.n_sm // how.cluster * how.cluster))
    units, turns = -(-first.n_units // how.cluster), first.turns(how)
    reading = how.outputs * parts * units * first.unit_bytes * WEIGHT_BYTE_TIME
    reading += 2 * units * first.columns * how.tile_rows * ROW_BYTE_TIME
    if how.tile_rows == EIGHT:
        each = first.share * first.columns * COLUMN_TIME * -(-how.warps // 4)
        work = turns * how.groups * parts * max(each, GROUP_TIME)
        reading += (how.teams - 1) * 2 * units * first.columns * EIGHT * ROW_BYTE_TIME
        wave = max(reading, work) + APART * min(reading, work)
        room = 2 * max(s.shared(how, parts) for s in stored) < target.shared_per_block
        if room and how.warps <= WARPS_BESIDE and 2 * blocks > target.n_sm:
            wave *= TWO_BLOCKS
        late = how.warps > WARPS_BESIDE and blocks > target.n_sm - BLOCKS_BEFORE
        return LAUNCH_TIME + LATE_TIME * late + waves * wave
    unpack = OUTPUTS * first.unit_bytes * UNPACK_TIME  # of a unit
    each = unpack + EIGHT_TIME * how.tile_rows / 8 * first.columns / COLUMNS
    work = turns * (IDLE + -(-how.warps // 4)) * parts * each * WAITING
    wave = max(reading, work) + 0.8 * min(reading, work) / turns
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
