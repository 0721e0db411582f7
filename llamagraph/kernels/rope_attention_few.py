"""Attention of up to 32 query rows with their rotation and the write into the KV cache, in a launch
(`csrc/rope_attention_few.cu`). The references are the unfused kernels'. Knows no model.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from llamagraph.kernels.attention_few import inputs, rope_traffic
from llamagraph.kernels.attention_rows import attention_rows
from llamagraph.kernels.panels import COLUMNS, in_panels
from llamagraph.kernels.rope import rope_store
from llamagraph.program.launch import Buffer, Geometry, In, InOut, Out, Traffic, Work, kernel
from llamagraph.program.target import Target

MOST_ROWS = 32
QUERIES = 16  # of a block
WARPS = 8
TILE = 16 * WARPS  # positions of a round


def shared_bytes(rows: int, head_dim: int, n_rot: int) -> int:
    """What a block needs of shared memory, as `Shared` has it."""
    tiles = 1 if rows > 8 else 2
    halves = (tiles * TILE + QUERIES + rows) * (head_dim + 8) + QUERIES * (TILE + 8)
    return 2 * halves + 4 * rows * n_rot + 8 * WARPS * QUERIES


def takes_few(target: Target, rows: int, head_dim: int, n_rot: int, types: tuple[str, str]) -> bool:
    """Whether `rope_attention_few` can attend for so many rows."""
    return (target.is_cuda and 1 < rows <= MOST_ROWS and types == ("F16", "F16")
            and head_dim % 32 == 0 and n_rot % 4 == 0
            and shared_bytes(rows, head_dim, n_rot) <= target.shared_per_block)


def _geometry(target: Any, q: Buffer, *args: Any, N_HEAD: int, N_HEAD_KV: int, HEAD_DIM: int,
              N_ROT: int, ROWS: int, **constants: Any) -> Geometry:
    return Geometry((N_HEAD_KV, -(-ROWS * (N_HEAD // N_HEAD_KV) // QUERIES), 1), 32 * WARPS,
                    shared_bytes(ROWS, HEAD_DIM, N_ROT))


def _cost(work: Work, q: Buffer, k: Buffer, v: Buffer, *args: Any, **constants: Any) -> Traffic:
    return rope_traffic(work, q, k, v, args[3], args[4], args[-2])


_EXAMPLES = (  # heads, KV heads, head_dim, rows, n_rows, pos, slots, n_rot, softcap, window, neox
    (4, 2, 32, 2, 2, 45, 64, 32, 0.0, 0, 0),
    (9, 3, 64, 8, 8, 0, 256, 64, 0.0, 0, 0),
    (9, 3, 64, 8, 7, 252, 512, 64, 0.0, 0, 1),
    (3, 3, 96, 8, 8, 900, 640, 32, 0.0, 200, 1),
    (4, 1, 96, 8, 3, 126, 256, 96, 30.0, 0, 0),
    (32, 8, 128, 8, 8, 37, 640, 128, 0.0, 0, 0),
    (32, 8, 128, 8, 5, 300, 640, 128, 0.0, 0, 0),
    (16, 2, 64, 8, 8, 2500, 1280, 64, 0.0, 1000, 0),
    (18, 1, 64, 4, 3, 100, 128, 64, 0.0, 0, 1),
    (32, 8, 128, 32, 17, 0, 128, 128, 0.0, 0, 1),
    (9, 3, 64, 32, 32, 300, 640, 64, 0.0, 100, 0),
    (4, 1, 256, 8, 8, 1000, 768, 256, 50.0, 64, 1),
    (32, 8, 128, 16, 13, 50, 640, 128, 0.0, 0, 0),
    (8, 2, 64, 8, 7, 20, 256, 64, 0.0, 5, 0),
    (8, 2, 64, 32, 30, 40, 256, 64, 0.0, 5, 1),
)


def _example(rng: Any) -> Iterator[tuple[tuple, dict]]:
    for n_head, n_kv, dim, rows, n, pos, slots, n_rot, softcap, window, neox in _EXAMPLES:
        q, cache_k, cache_v = inputs(rng, n_head, n_kv, dim, "F16 F16", rows, slots)
        k, v = (rng.standard_normal((rows, n_kv * dim), np.float32) for _ in range(2))
        for x in (q, k, v):
            x[n:] = np.nan  # rows that are not there
        inv_freq = (10000.0 ** (-np.arange(n_rot // 2) / (n_rot // 2))).astype(np.float32)
        where = np.array([pos], np.int32), np.array([n], np.int32)
        yield (q, k, v, inv_freq, *where, cache_k, cache_v, np.empty_like(q), dim**-0.5, softcap,
               1.25, window, slots), {
            "N_HEAD": n_head, "N_HEAD_KV": n_kv, "HEAD_DIM": dim, "TYPE_K": "F16", "TYPE_V": "F16",
            "N_ROT": n_rot, "NEOX": neox, "ROWS": rows, "QUERIES": QUERIES}


def _panels_example(rng: Any) -> Iterator[tuple[tuple, dict]]:
    for args, constants in _example(rng):
        rows, width = args[0].shape
        if width % COLUMNS == 0:
            out = np.empty((width // COLUMNS, rows, COLUMNS), np.float16)
            yield (*args[:8], out, *args[9:]), {**constants, "PANELS": 1}


@kernel("rope_attention_few.cu", geometry=_geometry, cost=_cost, example=_example)
def rope_attention_few(q: In, k: In, v: In, inv_freq: In, pos: In, n_rows: In, cache_k: InOut,
                       cache_v: InOut, out: Out, scale: float, softcap: float, mscale: float,
                       window: int, n_slots: int, *, N_HEAD: int, N_HEAD_KV: int, HEAD_DIM: int,
                       TYPE_K: str, TYPE_V: str, N_ROT: int, NEOX: int, ROWS: int, QUERIES: int
                       ) -> None:
    """`rope_store`, but q and k stay as they are, and `attention_rows`.

    q, out: (ROWS, N_HEAD * HEAD_DIM); k, v: (ROWS, N_HEAD_KV * HEAD_DIM); inv_freq: (N_ROT / 2,);
    caches as in `kernels.kv`, of halves.
    """
    q, k = q.copy(), k.copy()
    shape = {"N_HEAD": N_HEAD, "N_HEAD_KV": N_HEAD_KV, "HEAD_DIM": HEAD_DIM, "TYPE_K": TYPE_K,
             "TYPE_V": TYPE_V}
    rope_store.reference(q, k, v, inv_freq, pos, n_rows, cache_k, cache_v, mscale, n_slots,
                         NEOX=NEOX, N_ROT=N_ROT, **shape)
    attention_rows.reference(q, cache_k, cache_v, pos, n_rows, out, scale, softcap, window,
                             n_slots, QUERIES=QUERIES, **shape)


@kernel("rope_attention_few.cu", geometry=_geometry, cost=_cost, example=_panels_example)
def rope_attention_few_panels(q: In, k: In, v: In, inv_freq: In, pos: In, n_rows: In,
                              cache_k: InOut, cache_v: InOut, out: Out, scale: float,
                              softcap: float, mscale: float, window: int, n_slots: int, *,
                              N_HEAD: int, N_HEAD_KV: int, HEAD_DIM: int, TYPE_K: str, TYPE_V: str,
                              N_ROT: int, NEOX: int, ROWS: int, QUERIES: int, PANELS: int) -> None:
    """The same, into panels: F16 (N_HEAD * HEAD_DIM / 64, ROWS, 64)."""
    n, rows = n_rows[0], np.empty_like(q)
    rope_attention_few.reference(
        q, k, v, inv_freq, pos, n_rows, cache_k, cache_v, rows, scale, softcap, mscale, window,
        n_slots, N_HEAD=N_HEAD, N_HEAD_KV=N_HEAD_KV, HEAD_DIM=HEAD_DIM, TYPE_K=TYPE_K,
        TYPE_V=TYPE_V, N_ROT=N_ROT, NEOX=NEOX, ROWS=ROWS, QUERIES=QUERIES)
    out[:, :n] = in_panels(rows[:n])
