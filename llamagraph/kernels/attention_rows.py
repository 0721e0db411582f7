"""Attention of many query rows: blocks share the rows, and where these are few the KV too.

`csrc/attention_rows.cu` is for all architectures, `csrc/attention_wgmma.cu` for sm_90a. A block
has QUERIES queries of one KV head: a query is a row and one head of the group. Where the KV is cut,
`attention_rows_combine` puts the chunks together, in order. Knows no model.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from llamagraph.kernels.attend import LOG2_E, MASKED, Chunk, Scoring, attend, chunks, merge
from llamagraph.kernels.attention_few import cost, inputs, type_constants
from llamagraph.kernels.kv import Cache, pair
from llamagraph.kernels.panels import COLUMNS, in_panels
from llamagraph.program.launch import Buffer, Geometry, In, Out, Traffic, Work, kernel

NUMPY_CHUNK = 256  # positions that numpy takes at a time
NOTHING = np.float32(-3e38)  # the maximum of a chunk of which a query sees nothing
ALIGNMENT = 128  # positions: a chunk holds whole tiles of any of the kernels


def chunk_of_rows(pos: int, n_rows: int, window: int, smallest: int, most: int) -> tuple[int, int]:
    """Where the first chunk begins, and the length of all, from what the rows see together."""
    low = max(0, pos + 1 - window) if window else 0
    low -= low % ALIGNMENT
    share = -(-(pos + n_rows - low) // (most * ALIGNMENT)) * ALIGNMENT
    return low, max(smallest, share)


def _grid(rows: int, n_head: int, n_head_kv: int, queries: int, n_chunks: int = 1
          ) -> tuple[int, int, int]:
    return n_head_kv, -(-rows * (n_head // n_head_kv) // queries), n_chunks


def _geometry(target: Any, q: Buffer, *args: Any, N_HEAD: int, N_HEAD_KV: int, QUERIES: int,
              MAX_CHUNKS: int = 1, **constants: Any) -> Geometry:
    return Geometry(_grid(q.shape[0], N_HEAD, N_HEAD_KV, QUERIES, MAX_CHUNKS), 128)


def _plain_geometry(target: Any, *args: Any, **constants: Any) -> Geometry:
    return Geometry((1, 1, 1), 1)


def _wgmma_geometry(target: Any, q: Buffer, *args: Any, N_HEAD: int, N_HEAD_KV: int,
                    HEAD_DIM: int, TYPE_K: str, TYPE_V: str, QUERIES: int, MAX_CHUNKS: int = 1,
                    **constants: Any) -> Geometry:
    tile, stages = (64, 2) if HEAD_DIM > 128 else (128, 3)
    shared = 2 * HEAD_DIM * (QUERIES + 2 * stages * tile) + 32 * stages  # q; k and v; barriers
    converts = (TYPE_K, TYPE_V) != ("F16", "F16")
    copiers = 2 if converts and HEAD_DIM <= 128 else 1  # warpgroups
    return Geometry(_grid(q.shape[0], N_HEAD, N_HEAD_KV, QUERIES, MAX_CHUNKS),
                    128 * copiers + 2 * QUERIES, shared)


def _combine_geometry(target: Any, chunks: Buffer, *args: Any, N_HEAD: int, HEAD_DIM: int,
                      **constants: Any) -> Geometry:
    return Geometry((N_HEAD, chunks.shape[0], 1), 32 * -(-HEAD_DIM // 128))


def _combine_cost(work: Work, chunks: Buffer, n_rows: Buffer, out: Buffer, *, N_HEAD: int,
                  HEAD_DIM: int, MAX_CHUNKS: int) -> Traffic:
    n = work.n_rows * N_HEAD * HEAD_DIM * 4
    return Traffic(n * MAX_CHUNKS, n)


_EXAMPLES = (  # heads, KV heads, head_dim, types, rows, n_rows, pos, slots, softcap, window, chunks
    (9, 3, 64, "F16 F16", 32, 32, 0, 128, 0.0, 0, 4),
    (9, 3, 64, "F16 F16", 128, 33, 200, 256, 0.0, 0, 6),
    (9, 3, 64, "Q8_0 Q4_0", 128, 33, 200, 256, 0.0, 0, 6),
    (2, 2, 80, "F16 BF16", 128, 100, 900, 640, 0.0, 200, 4),
    (4, 1, 96, "Q8_0 Q8_0", 32, 9, 70, 128, 30.0, 0, 2),
    (8, 2, 128, "F16 F16", 512, 512, 37, 640, 0.0, 0, 2),
    (8, 2, 128, "Q8_0 Q8_0", 512, 512, 37, 640, 0.0, 0, 2),
    (8, 2, 128, "F32 F32", 32, 17, 37, 640, 0.0, 0, 2),
    (4, 1, 256, "F16 F16", 128, 128, 1000, 768, 50.0, 64, 4),
    (32, 8, 128, "F16 F16", 8, 5, 3000, 3072, 0.0, 0, 16),
    (32, 8, 128, "Q4_0 BF16", 8, 5, 3000, 3072, 0.0, 0, 16),
    (16, 2, 64, "F16 F16", 8, 8, 2500, 1280, 0.0, 1000, 8),
    (7, 1, 256, "BF16 Q8_0", 8, 2, 600, 640, 0.0, 0, 2),
)


def runs_on_wgmma(head_dim: int, *types: str) -> bool:
    """Whether `attention_wgmma` has room for such heads, and can copy such caches."""
    return head_dim in (64, 128, 256) and "F32" not in types


def _examples(rng: Any, queries: int = 0) -> Iterator[tuple]:
    """The inputs, the numbers, the constants, and how many chunks; with `queries` for wgmma."""
    for n_head, n_head_kv, dim, types, rows, n, pos, slots, softcap, window, most in _EXAMPLES:
        if queries and not runs_on_wgmma(dim, *types.split()):
            continue
        q, k, v = inputs(rng, n_head, n_head_kv, dim, types, rows, slots)
        where = np.array([pos], np.int32), np.array([n], np.int32)
        yield (q, k, v, *where), (dim**-0.5, softcap, window, slots), {
            "N_HEAD": n_head, "N_HEAD_KV": n_head_kv, "HEAD_DIM": dim, **type_constants(types),
            "QUERIES": queries or queries_of_block(dim),
        }, most


def queries_of_block(head_dim: int) -> int:
    """How many queries a block of `attention_rows` has."""
    return 64 if head_dim <= 128 else 32


def _whole(*args: Any) -> Iterator[tuple[tuple, dict]]:
    for seen, how, constants, _ in _examples(*args):
        yield (*seen, np.empty_like(seen[0]), *how), constants


def _cut(*args: Any) -> Iterator[tuple[tuple, dict]]:
    for seen, how, constants, most in _examples(*args):
        rows, width = seen[0].shape
        dim = constants["HEAD_DIM"]
        found = np.zeros((rows, width // dim, most * (dim + 2)), np.float32)
        yield (*seen, found, *how), {**constants, "CHUNK": 128, "MAX_CHUNKS": most}


def _wgmma_example(rng: Any) -> Iterator[tuple[tuple, dict]]:
    yield from _whole(rng, 128)


def _wgmma_split_example(rng: Any) -> Iterator[tuple[tuple, dict]]:
    yield from _cut(rng, 128)


def _combine_example(rng: Any) -> Iterator[tuple[tuple, dict]]:
    for args, constants in _cut(rng):
        attention_rows_split.reference(*args, **constants)
        kept = {name: constants[name] for name in ("N_HEAD", "HEAD_DIM", "MAX_CHUNKS")}
        yield (args[5], args[4], np.empty_like(args[0])), kept


def _combine_panels_example(rng: Any) -> Iterator[tuple[tuple, dict]]:
    for (parts, n_rows, q), constants in _combine_example(rng):
        if q.shape[1] % COLUMNS == 0:
            shape = q.shape[1] // COLUMNS, len(q), COLUMNS
            yield (parts, n_rows, np.empty(shape, np.float16)), constants


@kernel("attention_rows.cu", geometry=_geometry, cost=cost, example=_whole)
def attention_rows(q: In, cache_k: In, cache_v: In, pos: In, n_rows: In, out: Out, scale: float,
                   softcap: float, window: int, n_slots: int, *, N_HEAD: int, N_HEAD_KV: int,
                   HEAD_DIM: int, TYPE_K: str, TYPE_V: str, QUERIES: int) -> None:
    """Row r sees the positions up to pos + r, the last `window` of them if not 0.

    q, out: (rows, N_HEAD * HEAD_DIM); caches as in `kernels.kv`. Keys, values, scaled queries and
    weights are halves.
    """
    n, how = n_rows[0], Scoring(scale, softcap, window)
    k, v = pair(cache_k, cache_v, (TYPE_K, TYPE_V), N_HEAD_KV, HEAD_DIM)
    out[:n] = attend(q[:n], k, v, int(pos[0]), how, NUMPY_CHUNK, round_to_half=True)


@kernel("", geometry=_plain_geometry, cost=cost)
def attention_plain(q: In, cache_k: In, cache_v: In, pos: In, n_rows: In, out: Out, scale: float,
                    softcap: float, window: int, n_slots: int, *, N_HEAD: int, N_HEAD_KV: int,
                    HEAD_DIM: int, TYPE_K: str, TYPE_V: str) -> None:
    """The same in float32 throughout: numpy's own."""
    n, how = n_rows[0], Scoring(scale, softcap, window)
    k, v = pair(cache_k, cache_v, (TYPE_K, TYPE_V), N_HEAD_KV, HEAD_DIM)
    out[:n] = attend(q[:n], k, v, int(pos[0]), how, NUMPY_CHUNK)


@kernel("attention_wgmma.cu", geometry=_wgmma_geometry, cost=cost, example=_wgmma_example,
        arch="sm_90a")
def attention_wgmma(q: In, cache_k: In, cache_v: In, pos: In, n_rows: In, out: Out, scale: float,
                    softcap: float, window: int, n_slots: int, *, N_HEAD: int, N_HEAD_KV: int,
                    HEAD_DIM: int, TYPE_K: str, TYPE_V: str, QUERIES: int) -> None:
    """`attention_rows` on sm_90a."""
    attention_rows.reference(
        q, cache_k, cache_v, pos, n_rows, out, scale, softcap, window, n_slots, N_HEAD=N_HEAD,
        N_HEAD_KV=N_HEAD_KV, HEAD_DIM=HEAD_DIM, TYPE_K=TYPE_K, TYPE_V=TYPE_V, QUERIES=QUERIES,
    )


@kernel("attention_rows.cu", geometry=_geometry, cost=cost, example=_cut)
def attention_rows_split(q: In, cache_k: In, cache_v: In, pos: In, n_rows: In, chunks: Out,
                         scale: float, softcap: float, window: int, n_slots: int, *, N_HEAD: int,
                         N_HEAD_KV: int, HEAD_DIM: int, TYPE_K: str, TYPE_V: str, QUERIES: int,
                         CHUNK: int, MAX_CHUNKS: int) -> None:
    """Each chunk of the rows by itself: see `chunk_of_rows`.

    MAX_CHUNKS is even. chunks: (rows, N_HEAD, MAX_CHUNKS * (HEAD_DIM + 2)): of a head the weighted
    values of all chunks, then the maxima of their scores in powers of two, then the sums of their
    weights.
    """
    n, how = n_rows[0], Scoring(scale, softcap, window)
    found = split_parts(chunks[:n], HEAD_DIM, MAX_CHUNKS)
    for part, nothing in zip(found, (0, NOTHING, 0), strict=True):
        part[:] = nothing
    k, v = pair(cache_k, cache_v, (TYPE_K, TYPE_V), N_HEAD_KV, HEAD_DIM)
    cut_rows(q[:n], k, v, int(pos[0]), how, CHUNK, found)


def split_parts(chunks: np.ndarray, head_dim: int, most: int) -> tuple[np.ndarray, ...]:
    """Views of rows' partial results: acc (rows, n_head, most, head_dim), m and l."""
    n = most * head_dim
    acc = chunks[..., :n].reshape(*chunks.shape[:2], most, head_dim)
    return acc, chunks[..., n : n + most], chunks[..., n + most :]


def cut_rows(q: np.ndarray, k: Cache, v: Cache, first: int, how: Scoring, smallest: int,
             found: tuple[np.ndarray, ...]) -> None:
    """Fills in what the rows see of each chunk."""
    n, n_head_kv, dim = len(q), k.n_head_kv, k.head_dim
    acc, m, l = found  # noqa: E741
    origin, length = chunk_of_rows(first, n, how.window, smallest, m.shape[-1])

    def by_row(x: np.ndarray) -> np.ndarray:
        """(n_head_kv, n * group, ..) as (n, n_head, ..)"""
        x = x.reshape(n_head_kv, n, -1, *x.shape[2:])
        return np.moveaxis(x, 1, 0).reshape(n, -1, *x.shape[3:])

    parts = chunks(q.reshape(n, -1, dim), k, v, first, how, length, True, origin)
    for c, part in enumerate(parts):
        seen = by_row(part.m) > MASKED / 2
        m[:, :, c] = np.where(seen, np.rint(by_row(part.m) * LOG2_E), NOTHING)
        l[:, :, c] = np.where(seen, by_row(part.l), 0)
        acc[:, :, c] = np.where(seen[..., None], by_row(part.acc), 0)


@kernel("attention_wgmma.cu", geometry=_wgmma_geometry, cost=cost, example=_wgmma_split_example,
        arch="sm_90a")
def attention_wgmma_split(q: In, cache_k: In, cache_v: In, pos: In, n_rows: In, chunks: Out,
                          scale: float, softcap: float, window: int, n_slots: int, *, N_HEAD: int,
                          N_HEAD_KV: int, HEAD_DIM: int, TYPE_K: str, TYPE_V: str, QUERIES: int,
                          CHUNK: int, MAX_CHUNKS: int) -> None:
    """`attention_rows_split` on sm_90a."""
    attention_rows_split.reference(
        q, cache_k, cache_v, pos, n_rows, chunks, scale, softcap, window, n_slots, N_HEAD=N_HEAD,
        N_HEAD_KV=N_HEAD_KV, HEAD_DIM=HEAD_DIM, TYPE_K=TYPE_K, TYPE_V=TYPE_V, QUERIES=QUERIES,
        CHUNK=CHUNK, MAX_CHUNKS=MAX_CHUNKS,
    )


@kernel("attention_combine.cu", geometry=_combine_geometry, cost=_combine_cost,
        example=_combine_example)
def attention_rows_combine(chunks: In, n_rows: In, out: Out, *, N_HEAD: int, HEAD_DIM: int,
                           MAX_CHUNKS: int) -> None:
    """Combines what `attention_rows_split` left. out: (rows, N_HEAD * HEAD_DIM)."""
    n = n_rows[0]
    acc, m, l = split_parts(chunks[:n], HEAD_DIM, MAX_CHUNKS)  # noqa: E741
    parts = (Chunk(m[:, :, c] / LOG2_E, l[:, :, c], acc[:, :, c]) for c in range(MAX_CHUNKS))
    out[:n] = merge(parts).reshape(n, -1)


@kernel("attention_combine.cu", geometry=_combine_geometry, cost=_combine_cost,
        example=_combine_panels_example)
def attention_rows_combine_panels(chunks: In, n_rows: In, out: Out, *, N_HEAD: int, HEAD_DIM: int,
                                  MAX_CHUNKS: int) -> None:
    """As `attention_rows_combine`, into panels: F16 (N_HEAD * HEAD_DIM / 64, rows, 64)."""
    n = n_rows[0]
    rows = np.empty((n, N_HEAD * HEAD_DIM), np.float32)
    attention_rows_combine.reference(chunks, n_rows, rows, N_HEAD=N_HEAD, HEAD_DIM=HEAD_DIM,
                                     MAX_CHUNKS=MAX_CHUNKS)
    out[:, :n] = in_panels(rows)
