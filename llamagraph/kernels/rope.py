"""Rotary position embedding (Su et al., arXiv:2104.09864) and the write into the KV cache.

The frequencies come as a table, so linear, llama3 and YaRN scaling are all one kernel. Knows no
attention; on a GPU steps of few rows do this inside it, with the same maths (`csrc/rope.cuh`).
"""

import numpy as np

from llamagraph.kernels.kv import empty, pair
from llamagraph.program.launch import Buffer, Geometry, In, InOut, Traffic, Work, kernel
from llamagraph.program.tape import Tape

HEADS = 8  # of q, k and v that a block has


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, neox: int) -> None:
    """Rotates the first 2 * cos.shape[-1] numbers of each head in place.

    x: (rows, heads, head_dim); cos, sin: (rows, 1, n_rot / 2). Pairs are neighbours, or with
    `neox` the two halves of the rotated part.
    """
    half = cos.shape[-1]
    a, b = (x[..., :half], x[..., half : 2 * half]) if neox else (
        x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    )
    a[:], b[:] = a * cos - b * sin, a * sin + b * cos


def _geometry(target, q: Buffer, *args, N_HEAD: int, N_HEAD_KV: int, **constants) -> Geometry:
    return Geometry((q.shape[0], -(-(N_HEAD + 2 * N_HEAD_KV) // HEADS), 1), 256)


def _cost(work: Work, q: Buffer, k: Buffer, v, inv_freq, pos, n_rows, cache_k: Buffer,
          cache_v: Buffer, mscale, n_slots: int, **constants) -> Traffic:
    n, slots = work.n_rows, (cache_k.n_bytes + cache_v.n_bytes) // n_slots
    return Traffic(4 * n * (q.shape[1] + 2 * k.shape[1]),
                   n * (4 * (q.shape[1] + k.shape[1]) + slots))


_EXAMPLES = (  # q heads, kv heads, head_dim, n_rot, position, slots, mscale, neox, types
    (4, 2, 16, 16, 8, 10, 1.0, 0, "F32 F32"),
    (4, 2, 16, 16, 8, 10, 1.0, 1, "F32 F32"),
    (9, 3, 64, 64, 0, 512, 1.0, 0, "F16 F16"),
    (9, 3, 64, 64, 700, 512, 1.0, 0, "Q8_0 Q4_0"),
    (5, 1, 80, 32, 131000, 96, 1.2, 1, "F16 BF16"),
    (5, 1, 96, 32, 131000, 96, 1.2, 1, "Q4_0 Q8_0"),
    (3, 3, 6, 4, 70000, 7, 0.9, 0, "F32 F32"),
    (32, 8, 128, 128, 131068, 300, 1.0, 1, "F16 F16"),
    (32, 8, 128, 128, 131068, 300, 1.0, 1, "BF16 Q8_0"),
)


def _example(rng):
    for n_head, n_head_kv, dim, n_rot, pos, slots, mscale, neox, types in _EXAMPLES:
        q, k, v = (rng.standard_normal((4, n * dim), np.float32)
                   for n in (n_head, n_head_kv, n_head_kv))
        caches = [empty(slots, n_head_kv, dim, dtype).array for dtype in types.split()]
        inv_freq = (10000.0 ** (-np.arange(n_rot // 2) / (n_rot // 2))).astype(np.float32)
        type_k, type_v = types.split()
        yield (q, k, v, inv_freq, np.array([pos], np.int32), np.array([3], np.int32), *caches,
               mscale, slots), {"NEOX": neox, "TYPE_K": type_k, "TYPE_V": type_v,
                                "N_HEAD": n_head, "N_HEAD_KV": n_head_kv, "HEAD_DIM": dim,
                                "N_ROT": n_rot}


@kernel("rope.cu", geometry=_geometry, cost=_cost, example=_example)
def rope_store(q: InOut, k: InOut, v: In, inv_freq: In, pos: In, n_rows: In, cache_k: InOut,
               cache_v: InOut, mscale: float, n_slots: int, *, NEOX: int, TYPE_K: str,
               TYPE_V: str, N_HEAD: int, N_HEAD_KV: int, HEAD_DIM: int, N_ROT: int) -> None:
    """Rotates q and k in place by (pos + row) * inv_freq and stores k, v in the rows' slots.

    q: (rows, N_HEAD * HEAD_DIM); k, v: (rows, N_HEAD_KV * HEAD_DIM); inv_freq: (N_ROT / 2,);
    caches as in `kernels.kv`. A slot is the position modulo n_slots.
    """
    n = n_rows[0]
    where = np.arange(pos[0], pos[0] + n)
    angle = where[:, None, None].astype(np.float32) * inv_freq
    cos, sin = (turn(angle) * np.float32(mscale) for turn in (np.cos, np.sin))
    for x in (q, k):
        rotate(x[:n].reshape(n, -1, HEAD_DIM), cos, sin, NEOX)
    slots = where % n_slots
    caches = pair(cache_k, cache_v, (TYPE_K, TYPE_V), N_HEAD_KV, HEAD_DIM)
    for cache, x in zip(caches, (k, v), strict=True):
        cache.write(slots, x[:n].reshape(n, -1, HEAD_DIM))


def store(tape: Tape, q: Buffer, k: Buffer, v: Buffer, inv_freq: Buffer, cache_k: Buffer,
          cache_v: Buffer, *, neox: bool, mscale: float) -> None:
    """Rotates every row of q and k and writes k, v to the cache; shapes as in `rope_store`."""
    n_slots, n_head_kv, head_dim = cache_k.shape
    how = rope_store(NEOX=int(neox), TYPE_K=cache_k.dtype, TYPE_V=cache_v.dtype,
                     N_HEAD=q.shape[1] // head_dim, N_HEAD_KV=n_head_kv, HEAD_DIM=head_dim,
                     N_ROT=2 * inv_freq.shape[0])
    tape.launch(how, q, k, v, inv_freq, tape.io["pos"], tape.io["n_rows"], cache_k, cache_v,
                mscale, n_slots, label="rope", variant="neox" if neox else "norm")
