"""What attention is, in numpy: chunks of positions, their weighted values, how they are combined.

KV is cut into chunks by the KV length alone and the chunks' results are combined in order, so the
number of blocks that share the chunks never changes a bit of the answer. The running maximum and
sum are those of Milakov and Gimelshein (arXiv:1805.02867). Knows no kernel and no launch.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from llamagraph.kernels.kv import Cache

MAX_CHUNKS = 64
MASKED = np.float32(-1e30)
LOG2_E = np.float32(1.44269504)


class Chunk(NamedTuple):
    """m, l: (n_head_kv, queries a KV head), the maximal score and the sum of the weights
    exp(score - m); acc: (n_head_kv, queries, head_dim), the values weighted by them."""

    m: np.ndarray
    l: np.ndarray  # noqa: E741
    acc: np.ndarray


class Scoring(NamedTuple):
    """How scores are made: `window` 0 sees everything, `softcap` 0 caps nothing."""

    scale: float
    softcap: float
    window: int


def chunk_length(n_visible: int, smallest: int) -> int:
    """Positions a chunk: `smallest` times a power of two, so that MAX_CHUNKS are enough.

    Chunks begin at multiples of the length, so a window may touch one more than it fills.
    """
    length = smallest
    while length * (MAX_CHUNKS - 1) < n_visible:
        length *= 2
    return length


def visible(kv_len: int, window: int) -> int:
    """How many positions the last of `kv_len` sees."""
    return min(kv_len, window) if window else kv_len


def count_chunks(kv_len: int, window: int, smallest: int) -> int:
    """Chunks that the last of `kv_len` positions sees something of."""
    length = chunk_length(visible(kv_len, window), smallest)
    return -(-kv_len // length) - (kv_len - visible(kv_len, window)) // length


def halves(x: np.ndarray) -> np.ndarray:
    """float32, rounded to what a half can hold."""
    return x.astype(np.float16).astype(np.float32)


def chunks(q: np.ndarray, k: Cache, v: Cache, first: int, how: Scoring, chunk: int,
           round_to_half: bool = False, origin: int | None = None) -> Iterator[Chunk]:
    """The chunks that rows of queries see, in order; they begin at `origin`, or at multiples.

    q: (n, n_head, head_dim), of the positions from `first` on; slot = position % n_slots. With
    `round_to_half` queries, keys, values and weights are halves, and maxima are the next whole
    powers of two above, as many rows on a GPU have it.
    """
    n_slots, n_head_kv, head_dim = k.n_slots, k.n_head_kv, k.head_dim
    n, group = len(q), q.shape[1] // n_head_kv
    queries = (
        q.reshape(n, n_head_kv, group, head_dim).transpose(1, 0, 2, 3)
        .reshape(n_head_kv, n * group, head_dim) * np.float32(how.scale)
    )
    queries = halves(queries) if round_to_half else queries
    low = max(0, first - how.window + 1) if how.window else 0
    origin = low - low % chunk if origin is None else origin
    for start in range(origin, first + n, chunk):
        where = np.arange(max(start, low), min(start + chunk, first + n))
        slots = slice(where[0], where[-1] + 1) if where[-1] < n_slots else where % n_slots
        keys, values = (c.read(slots).transpose(1, 0, 2) for c in (k, v))
        if round_to_half:
            keys, values = halves(keys), halves(values)
        scores = queries @ keys.transpose(0, 2, 1)  # (n_head_kv, n * group, chunk)
        if how.softcap:
            scores = np.float32(how.softcap) * np.tanh(scores / np.float32(how.softcap))
        if n > 1:
            rows = np.repeat(first + np.arange(n), group)  # the position of each query
            hidden = where > rows[:, None]
            if how.window:
                hidden |= where <= rows[:, None] - how.window
            scores[:, hidden] = MASKED  # finite: a row may see nothing of a chunk
        m = scores.max(axis=-1)
        if round_to_half:
            m = np.ceil(m * LOG2_E) / LOG2_E
        p = np.exp(scores - m[..., None])
        yield Chunk(m, p.sum(axis=-1), (halves(p) if round_to_half else p) @ values)


def merge(parts: Iterator[Chunk]) -> np.ndarray:
    """The answer of chunks that are combined from left to right: acc's shape."""
    m, total, acc = next(parts)
    for part in parts:
        top = np.maximum(m, part.m)
        keep, add = np.exp(m - top), np.exp(part.m - top)
        total = total * keep + part.l * add
        acc = acc * keep[..., None] + part.acc * add[..., None]
        m = top
    return acc / total[..., None]


def attend(q: np.ndarray, k: Cache, v: Cache, first: int, how: Scoring, chunk: int,
           round_to_half: bool = False) -> np.ndarray:
    """Attention of rows (n, n_head * head_dim) from position `first` on."""
    n = len(q)
    heads = q.reshape(n, -1, k.head_dim)
    found = merge(chunks(heads, k, v, first, how, chunk, round_to_half))
    return found.reshape(k.n_head_kv, n, -1, k.head_dim).transpose(1, 0, 2, 3).reshape(n, -1)
