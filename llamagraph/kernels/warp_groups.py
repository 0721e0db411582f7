"""Which products of many rows warp groups do (sm_90a), and in which tiles: arithmetic and figures.

A block has 128 outputs and up to 256 rows of a product at a time, in stages of shared memory that
are copied ahead. Knows no kernel; `gemm_hopper.py` is planned here.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from llamagraph.kernels.layouts import Weight, tiles_of, type_of, unit_weights
from llamagraph.kernels.panels import COLUMNS
from llamagraph.program.target import Target

ARCH = "sm_90a"
TYPES = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
TILE_OUT = 128
TILE_ROWS = (256, 128, 64, 32, 16, 8)
MOST_STAGES = 8
RESERVED = 1024  # bytes of shared memory that each of two blocks on a multiprocessor takes beside
SPLITS = (1, 2, 4, 8)  # blocks of a cluster that share the columns of a tile
# Measured on an H200, in microseconds: 64 columns of a tile of so many rows, the rest of a launch
# and of a tile, and the adding up within a cluster, by the row.
STEP_TIME = {256: 0.66, 128: 0.41, 64: 0.30, 32: 0.265, 16: 0.26, 8: 0.255}
TWO_BLOCKS_TIME = {32: 0.47, 16: 0.45, 8: 0.43}
# A cluster lies within a group of multiprocessors, which larger ones do not fill: 32 of four blocks
# took twice as long as 64 of two.
SHARE_OF_CLUSTERS = {1: 1.0, 2: 1.0, 4: 0.85, 8: 0.85}
LAUNCH_TIME, TILE_TIME, SPLIT_TIME, SPLIT_ROW_TIME = 3.0, 1.0, 1.0, 0.012


class Stages(NamedTuple):
    """How many copies of 64 columns of the rows, and of a stored tile, are under way at once."""

    rows: int
    weights: int


def weight_bytes(weights: Sequence[Weight]) -> int:
    """Bytes of a stage of weights, for those of one or two layouts."""
    return max(TILE_OUT * (32 // t.rows) * t.unit_bytes for t in map(tiles_of, weights))


def shared_bytes(stage: int, tile_rows: int, stages: Stages) -> int:
    """Dynamic shared memory of a block, where a stage of weights has so many bytes.

    The stages, aligned to 1024, two barriers for each, and three.
    """
    return 1056 + stages.rows * (tile_rows * COLUMNS * 2 + 16) + stages.weights * (stage + 16)


def choose_stages(target: Target, stage: int, tile_rows: int, blocks: int = 1) -> Stages | None:
    """As many as there is room for; None where there is none for two of each."""
    room = target.shared_per_block if blocks == 1 else target.shared_per_block // 2 - RESERVED
    for rows in range(MOST_STAGES if tile_rows <= 128 else 4, 1, -1):
        n = (room - shared_bytes(stage, tile_rows, Stages(rows, 0))) // (stage + 16)
        if n >= 2:
            return Stages(rows, min(n, MOST_STAGES))
    return None


def takes(target: Target, weight: Weight, rows: int) -> bool:
    """Whether so many rows can be multiplied with the weight here."""
    return (target.name == ARCH and rows % 8 == 0 and type_of(weight) in TYPES
            and unit_weights(weight) % COLUMNS == 0
            and choose_stages(target, weight_bytes([weight]), TILE_ROWS[-1]) is not None)


class Plan(NamedTuple):
    tile_rows: int
    split: int
    stages: Stages
    blocks: int = 1
    reason: str = ""

    @property
    def constants(self) -> dict[str, int | str]:
        return {"TILE_ROWS": self.tile_rows, "SPLIT": self.split, "BLOCKS": self.blocks,
                "ROW_STAGES": self.stages.rows, "WEIGHT_STAGES": self.stages.weights}

    @property
    def variant(self) -> str:
        return f"wgmma {TILE_OUT}x{self.tile_rows}{f' / {self.split}' if self.split > 1 else ''}"


def fits(stage: int, tile_rows: int, split: int, stages: Stages, turns: int) -> bool:
    """Whether a block has room for the sums that the others of its cluster send it.

    Of several tiles in turn every block must get sums: that tells it that the others are done with
    the tile before.
    """
    eights = tile_rows // 8
    if turns > 1 and split > eights:
        return False
    if tile_rows == TILE_ROWS[0] and split > 2:  # no register is left for more
        return False
    sent = (split - 1) * 4096 * (eights // min(split, eights))  # 128 outputs of 8 rows as F32
    return sent <= shared_bytes(stage, tile_rows, stages) - 1056 - 16 * sum(stages)


class Product(NamedTuple):
    """What the time of a launch depends on beside its tile."""

    outputs: int  # tiles of outputs
    steps: float  # of 64 columns
    stored: int  # tiles of a row's columns


def n_clusters(target: Target, blocks: int, split: int) -> int:
    """How many clusters of `split` blocks run at once, with so many blocks on a multiprocessor."""
    return int(target.n_sm * blocks * SHARE_OF_CLUSTERS[split]) // split


def _time(at_once: int, p: Product, rows: int, split: int, tile_rows: int,
          step: float) -> float:
    """Microseconds of a product, for so many clusters; a block has whole stored tiles."""
    if p.stored < split:
        return float("inf")
    turns = -(-(-(-rows // tile_rows) * p.outputs) // at_once)
    steps = -(-p.stored // split) / p.stored * p.steps
    each = TILE_TIME + (SPLIT_TIME + SPLIT_ROW_TIME * tile_rows) * (split > 1)
    return LAUNCH_TIME + turns * (each + steps * step)


def _reason(target: Target, n_tiles: int, split: int, blocks: int) -> str:
    how = f"{n_tiles} tiles for {target.n_sm} multiprocessors"
    how += f", each shared by {split}" if split > 1 else ""
    return how + (", two blocks on each" if blocks > 1 else "")


def plan(target: Target, weights: Sequence[Weight], rows: int) -> Plan:
    """The tile, and the blocks that share its columns, with which a launch is done first."""
    found, stage = [], weight_bytes(weights)
    p = Product(sum(-(-w.shape[0] // TILE_OUT) for w in weights), weights[0].shape[-1] / COLUMNS,
                tiles_of(weights[0]).n_tiles)
    for tile_rows, blocks in product(TILE_ROWS, (1, 2)):
        step = (STEP_TIME if blocks == 1 else TWO_BLOCKS_TIME).get(tile_rows)
        stages = choose_stages(target, stage, tile_rows, blocks)
        if step is None or stages is None or tile_rows >= 2 * rows:
            continue
        for split in SPLITS:
            clusters = n_clusters(target, blocks, split)
            turns = -(-rows // tile_rows * p.outputs // clusters)
            if fits(stage, tile_rows, split, stages, turns):
                time = _time(clusters, p, rows, split, tile_rows, step)
                found.append((time, tile_rows, split, stages, blocks))
    _, tile_rows, split, stages, blocks = min(found)
    n_tiles = -(-rows // tile_rows) * p.outputs
    return Plan(tile_rows, split, stages, blocks, _reason(target, n_tiles, split, blocks))
