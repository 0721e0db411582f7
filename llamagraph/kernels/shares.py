"""How a product with one row is shared out: teams of warps, rows split among warps, blocks.

The rule is for any GPU; `scripts/tune` measures, and what it found stands in the target.
"""

from collections.abc import Iterator, Sequence

from llamagraph.kernels.layouts import FLOATS, Weight, tiles_of, type_of
from llamagraph.program.launch import Geometry
from llamagraph.program.target import Target

WARPS = 16  # of a block, at most: with 128 registers a thread they fill a multiprocessor
STATIC_SHARED = 8192  # bytes that the kernels take beside the row, at most


def row_bytes(n_in: int, dtype: str) -> int:
    """Shared memory of a row of activations, with its gaps (gemv.cuh)."""
    blocks = n_in // 32
    return blocks * 144 if dtype in FLOATS else -(-blocks // 8) * (2 * 144 + 8 * 16)


def fits(target: Target, weights: Sequence[Weight]) -> bool:
    """Whether the row that the weights meet fits into a block's shared memory."""
    needed = max(row_bytes(w.shape[-1], type_of(w)) for w in weights)
    return needed + STATIC_SHARED <= target.shared_per_block


def matrix_key(weights: Sequence[Weight], parts: int = 1) -> str:
    """What the best shares of a product depend on: type, layout, length and number of rows."""
    t, n_out = weights[0], sum(tiles_of(w).n_out for w in weights)
    return f"{type_of(t)} {t.layout} {t.shape[-1]} {n_out} {parts}"


def possible_shares(weights: Sequence[Weight], parts: int = 1) -> Iterator[dict[str, int]]:
    """All shares that a block of WARPS warps has room for, a row's tiles split evenly."""
    n_tiles = tiles_of(weights[0]).n_tiles
    for split in sorted({-(-n_tiles // n) for n in range(1, n_tiles + 1)}):
        for teams in range(1, WARPS // (parts * split) + 1):
            yield {"TEAMS": teams, "SPLIT": split}


def shares(target: Target, weights: Sequence[Weight], parts: int = 1) -> dict[str, int]:
    """TEAMS of warps, each with a group of rows, and the SPLIT of a row's tiles among its warps.

    As measured on the target; else rows are split first, evenly: a small matrix has few groups.
    Teams are added while there are more groups than multiprocessors, and until no thread has over
    16 activations to bring in.
    """
    for key, teams, split in target.tuning:
        if key == matrix_key(weights, parts):
            return {"TEAMS": teams, "SPLIT": split}
    most, t = WARPS // parts, tiles_of(weights[0])
    split = -(-t.n_tiles // -(-t.n_tiles // most))
    groups = sum(tiles_of(w).n_groups for w in weights) // parts
    bring_in = -(-weights[0].shape[-1] // (16 * 32 * parts * split))
    teams = min(most // split, max(bring_in, -(-groups // target.n_sm)))
    return {"TEAMS": teams, "SPLIT": split}


def most_blocks(target: Target, warps: int) -> int:
    """Blocks that run at once; more would only bring in the row again."""
    return target.n_sm * (WARPS // warps)


def place(target: Target, weight: Weight, parts: int, teams: int, split: int) -> Geometry:
    warps = teams * parts * split
    blocks = min(-(-tiles_of(weight).n_groups // teams), most_blocks(target, warps))
    return Geometry((blocks, 1, 1), 32 * warps, row_bytes(weight.shape[-1], type_of(weight)))
