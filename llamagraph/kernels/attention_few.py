"""Attention of few query rows: blocks share the chunks of the KV cache (`csrc/attention_few.cu`).

The block that comes last combines a row's chunks, or a kernel of its own does. Knows no rotation
and no model.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from llamagraph.kernels.attend import (
    MAX_CHUNKS,
    Chunk,
    Scoring,
    attend,
    chunk_length,
    chunks,
    count_chunks,
    merge,
    visible,
)
from llamagraph.kernels.kv import Cache, pair, random_cache
from llamagraph.program.launch import Buffer, Geometry, In, InOut, Out, Traffic, Var, Work, kernel

BLOCKS = Var("n_attn_blocks")
HEADS = 8  # query heads of one KV head that a block takes


def split_grid(rows: int, n_head: int, n_head_kv: int, warps: int) -> Geometry:
    """Blocks that share the chunks, for each row and up to HEADS heads of a KV head."""
    return Geometry((BLOCKS, n_head_kv * -(-n_head // n_head_kv // HEADS), rows), 32 * warps)


def _slot_bytes(cache_k: Buffer, cache_v: Buffer) -> int:
    return sum(cache.n_bytes // cache.shape[0] for cache in (cache_k, cache_v))


def kv_traffic(work: Work, q: Buffer, cache_k: Buffer, cache_v: Buffer, window: int) -> Traffic:
    """q and what is visible of the caches, read once; as much written as q has."""
    n = work.n_rows * q.shape[1] * 4
    return Traffic(n + visible(work.kv_len, window) * _slot_bytes(cache_k, cache_v), n)


def rope_traffic(work: Work, q: Buffer, k: Buffer, v: Buffer, cache_k: Buffer, cache_v: Buffer,
                 window: int) -> Traffic:
    """The same, but the new keys and values are read as they come, and written into the caches."""
    read, written = kv_traffic(work, q, cache_k, cache_v, window)
    slot = _slot_bytes(cache_k, cache_v)
    fresh = 4 * (k.shape[1] + v.shape[1]) - slot
    return Traffic(read + work.n_rows * fresh, written + work.n_rows * slot)


def _split_geometry(target: Any, q: Buffer, *args: Any, N_HEAD: int, N_HEAD_KV: int, WARPS: int,
                    **constants: Any) -> Geometry:
    return split_grid(q.shape[0], N_HEAD, N_HEAD_KV, WARPS)


def _combine_geometry(target: Any, chunks: Buffer, *args: Any, HEAD_DIM: int, **constants: Any
                      ) -> Geometry:
    return Geometry((chunks.shape[1], chunks.shape[0], 1), 32 * -(-HEAD_DIM // 64))


def cost(work: Work, q: Buffer, cache_k: Buffer, cache_v: Buffer, *args: Any, **constants: Any
         ) -> Traffic:
    """Of a kernel whose last argument but one is the window."""
    return kv_traffic(work, q, cache_k, cache_v, args[-2])


def _combine_cost(work: Work, chunks: Buffer, pos: Buffer, n_rows: Buffer, out: Buffer,
                  window: int, *, CHUNK: int, **constants: Any) -> Traffic:
    n = work.n_rows * out.shape[1] * 4
    return Traffic(n * count_chunks(work.kv_len, window, CHUNK), n)


_EXAMPLES = (  # heads, KV heads, head_dim, types, rows, n_rows, pos, slots, softcap, window, chunk
    (4, 2, 16, "F32 F32", 2, 1, 45, 64, 0.0, 0, 16),
    (9, 3, 64, "F16 F16", 1, 1, 0, 256, 0.0, 0, 128),
    (9, 3, 64, "F16 F16", 8, 7, 60, 256, 0.0, 0, 128),
    (9, 3, 64, "Q8_0 Q8_0", 1, 1, 3000, 3072, 0.0, 0, 128),
    (32, 8, 128, "F16 F16", 2, 2, 1000, 1024, 0.0, 0, 16),
    (32, 8, 128, "BF16 Q4_0", 2, 2, 1000, 1024, 0.0, 0, 16),
    (3, 3, 80, "F16 F16", 2, 2, 900, 384, 0.0, 200, 16),
    (16, 1, 96, "F16 F16", 8, 8, 62, 96, 30.0, 0, 16),
    (16, 1, 96, "Q4_0 Q8_0", 8, 8, 62, 96, 30.0, 0, 16),
    (4, 1, 256, "F16 F16", 1, 1, 5000, 1024, 50.0, 512, 128),
    (24, 2, 128, "Q4_0 BF16", 1, 1, 777, 1024, 0.0, 33, 16),
    (2, 2, 128, "F32 F32", 1, 1, 300, 512, 0.0, 0, 128),
)


def inputs(rng: Any, n_head: int, n_head_kv: int, head_dim: int, types: str, rows: int,
           n_slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q (rows, n_head * head_dim) and the caches, of the `types` of k and v: "F16 Q8_0"."""
    q = rng.standard_normal((rows, n_head * head_dim), np.float32)
    k, v = (random_cache(rng, n_slots, n_head_kv, head_dim, dtype) for dtype in types.split())
    return q, k, v


def type_constants(types: str) -> dict[str, str]:
    return dict(zip(("TYPE_K", "TYPE_V"), types.split(), strict=True))


def _examples(rng: Any) -> Iterator[tuple[tuple, tuple, dict]]:
    """The inputs (q, caches, pos, n_rows), the numbers, and the constants."""
    for n_head, n_head_kv, dim, types, rows, n, pos, slots, softcap, window, chunk in _EXAMPLES:
        seen = (*inputs(rng, n_head, n_head_kv, dim, types, rows, slots), np.array([pos], np.int32),
                np.array([n], np.int32))
        yield seen, (dim**-0.5, softcap, window, slots), {
            "N_HEAD": n_head, "N_HEAD_KV": n_head_kv, "HEAD_DIM": dim, **type_constants(types),
            "CHUNK": chunk, "MAX_CHUNKS": MAX_CHUNKS, "WARPS": 8 if chunk > 16 else 4,
        }


def empty_chunks(q: np.ndarray, HEAD_DIM: int) -> np.ndarray:
    """Room for partial results, as `attention_split` has it."""
    rows, width = q.shape
    return np.zeros((rows, width // HEAD_DIM, MAX_CHUNKS * (HEAD_DIM + 2)), np.float32)


def _decode_example(rng: Any) -> Iterator[tuple[tuple, dict]]:
    for seen, how, constants in _examples(rng):
        q = seen[0]
        yield (*seen, empty_chunks(q, constants["HEAD_DIM"]), np.zeros(64, np.uint32),
               np.empty_like(q), *how), constants


def _split_example(rng: Any) -> Iterator[tuple[tuple, dict]]:
    for seen, how, constants in _examples(rng):
        yield (*seen, empty_chunks(seen[0], constants["HEAD_DIM"]), *how), constants


def _combine_example(rng: Any) -> Iterator[tuple[tuple, dict]]:
    for args, constants in _split_example(rng):
        attention_split.reference(*args, **constants)
        q, _, _, pos, n_rows, found, _, _, window, _ = args
        yield (found, pos, n_rows, np.empty_like(q), window), constants


@kernel("attention_few.cu", geometry=_split_geometry, cost=cost, example=_decode_example)
def attention_decode(q: In, cache_k: In, cache_v: In, pos: In, n_rows: In, partials: InOut,
                     counters: InOut, out: Out, scale: float, softcap: float, window: int,
                     n_slots: int, *, N_HEAD: int, N_HEAD_KV: int, HEAD_DIM: int, TYPE_K: str,
                     TYPE_V: str, CHUNK: int, MAX_CHUNKS: int, WARPS: int) -> None:
    """Blocks share a row's chunks and the last of them combines.

    q, out: (rows, N_HEAD * HEAD_DIM); caches as in `kernels.kv`; partials: room as in
    `attention_split`. Row r sees the positions up to pos + r, the last `window` of them if not 0.
    """
    how = Scoring(scale, softcap, window)
    k, v = pair(cache_k, cache_v, (TYPE_K, TYPE_V), N_HEAD_KV, HEAD_DIM)
    for r in range(n_rows[0]):
        first = int(pos[0]) + r
        chunk = chunk_length(visible(first + 1, window), CHUNK)
        out[r] = attend(q[r : r + 1], k, v, first, how, chunk)[0]


def parts_of(row: np.ndarray, head_dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views of a row's partial results: acc (n_head, MAX_CHUNKS, head_dim), m and l."""
    n = MAX_CHUNKS * head_dim
    acc = row[:, :n].reshape(len(row), MAX_CHUNKS, head_dim)
    return acc, row[:, n : n + MAX_CHUNKS], row[:, n + MAX_CHUNKS :]


@kernel("attention_few.cu", geometry=_split_geometry, cost=cost, example=_split_example)
def attention_split(q: In, cache_k: In, cache_v: In, pos: In, n_rows: In, chunks: Out,
                    scale: float, softcap: float, window: int, n_slots: int, *, N_HEAD: int,
                    N_HEAD_KV: int, HEAD_DIM: int, TYPE_K: str, TYPE_V: str, CHUNK: int,
                    MAX_CHUNKS: int, WARPS: int) -> None:
    """Each chunk of a row by itself, counted from the first that the row sees.

    chunks: (rows, N_HEAD, MAX_CHUNKS * (HEAD_DIM + 2)): of a head the weighted values of all
    chunks, then their maximal scores, then the sums of their weights.
    """
    how = Scoring(scale, softcap, window)
    k, v = pair(cache_k, cache_v, (TYPE_K, TYPE_V), N_HEAD_KV, HEAD_DIM)
    for r in range(n_rows[0]):
        split_row(q[r], k, v, int(pos[0]) + r, how, CHUNK, chunks[r])


def split_row(q: np.ndarray, k: Cache, v: Cache, first: int, how: Scoring, smallest: int,
              row: np.ndarray) -> None:
    """One row of `attention_split`, into its partial results `row`."""
    head_dim = k.head_dim
    acc, m, l = parts_of(row, head_dim)  # noqa: E741
    length = chunk_length(visible(first + 1, how.window), smallest)
    heads = q.reshape(1, -1, head_dim)
    for c, part in enumerate(chunks(heads, k, v, first, how, length)):
        acc[:, c] = part.acc.reshape(-1, head_dim)
        m[:, c], l[:, c] = part.m.reshape(-1), part.l.reshape(-1)


@kernel("attention_few.cu", geometry=_combine_geometry, cost=_combine_cost,
        example=_combine_example)
def attention_combine(chunks: In, pos: In, n_rows: In, out: Out, window: int, *, N_HEAD: int,
                      N_HEAD_KV: int, HEAD_DIM: int, TYPE_K: str, TYPE_V: str, CHUNK: int,
                    MAX_CHUNKS: int, WARPS: int) -> None:
    """Combines a row's chunks, as `attention_split` left them. out: (rows, N_HEAD * HEAD_DIM)."""
    for r in range(n_rows[0]):
        acc, m, l = parts_of(chunks[r], HEAD_DIM)  # noqa: E741
        n = count_chunks(int(pos[0]) + r + 1, window, CHUNK)
        out[r] = merge(Chunk(m[:, c], l[:, c], acc[:, c]) for c in range(n)).reshape(-1)
