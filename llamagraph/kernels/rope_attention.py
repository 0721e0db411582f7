"""Attention of one query row with its rotation and the write into the KV cache, in one launch
(`csrc/rope_attention.cu`). The references are the unfused kernels'. Knows no model.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from llamagraph.kernels.attend import MAX_CHUNKS, Scoring
from llamagraph.kernels.attention_few import (
    attention_decode,
    empty_chunks,
    inputs,
    rope_traffic,
    split_grid,
    split_row,
    type_constants,
)
from llamagraph.kernels.kv import pair
from llamagraph.kernels.norm import rms_norm_heads
from llamagraph.kernels.rope import rope_store
from llamagraph.program.launch import Buffer, Geometry, In, InOut, Out, Traffic, Work, kernel


def _geometry(target: Any, *args: Any, N_HEAD: int, N_HEAD_KV: int, WARPS: int, **constants: Any
              ) -> Geometry:
    return split_grid(1, N_HEAD, N_HEAD_KV, WARPS)


def _cost(work: Work, q: Buffer, k: Buffer, v: Buffer, *args: Any, **constants: Any) -> Traffic:
    return rope_traffic(work, q, k, v, args[4], args[5], args[-2])


_EXAMPLES = (  # heads, KV heads, head_dim, types, n_rot, pos, slots, softcap, window, chunk, neox,
    (4, 2, 16, "F32 F32", 16, 45, 64, 0.0, 0, 16, 0, 0),  # norms
    (9, 3, 64, "F16 F16", 64, 0, 256, 0.0, 0, 128, 0, 0),
    (9, 3, 64, "Q8_0 Q8_0", 64, 63, 256, 0.0, 0, 128, 0, 0),
    (9, 3, 64, "F16 F16", 64, 3007, 3072, 0.0, 0, 128, 0, 0),
    (32, 8, 128, "F16 F16", 128, 1000, 1024, 0.0, 0, 16, 1, 1),
    (32, 8, 128, "Q8_0 Q4_0", 128, 1000, 1024, 0.0, 0, 16, 1, 1),
    (3, 3, 80, "F16 BF16", 32, 900, 384, 0.0, 200, 16, 1, 0),
    (16, 1, 96, "Q4_0 F16", 96, 64, 96, 30.0, 0, 16, 0, 0),
    (4, 1, 256, "F16 F16", 256, 5000, 1024, 50.0, 512, 128, 1, 1),
    (24, 2, 128, "BF16 Q8_0", 128, 777, 1024, 0.0, 1, 16, 1, 0),
    (2, 2, 128, "F32 F32", 128, 300, 512, 0.0, 0, 128, 1, 0),
)


def _examples(rng: Any) -> Iterator[tuple[tuple, tuple, dict]]:
    """The inputs up to the caches, the numbers, and the constants."""
    for n_head, n_kv, dim, types, n_rot, pos, slots, softcap, window, chunk, neox, norms in (
        _EXAMPLES
    ):
        q, cache_k, cache_v = inputs(rng, n_head, n_kv, dim, types, 1, slots)
        k, v = (rng.standard_normal((1, n_kv * dim), np.float32) for _ in range(2))
        q_norm, k_norm = (rng.standard_normal(dim, np.float32) for _ in range(2))
        inv_freq = (10000.0 ** (-np.arange(n_rot // 2) / (n_rot // 2))).astype(np.float32)
        yield (q, k, v, q_norm, k_norm, inv_freq, np.array([pos], np.int32), cache_k, cache_v), (
            dim**-0.5, softcap, 1.25, 1e-6, window, slots,
        ), {"N_HEAD": n_head, "N_HEAD_KV": n_kv, "HEAD_DIM": dim, **type_constants(types),
            "CHUNK": chunk, "MAX_CHUNKS": MAX_CHUNKS, "N_ROT": n_rot, "NEOX": neox,
            "QK_NORM": norms, "WARPS": 8 if chunk > 16 else 4}


def _decode_example(rng: Any) -> Iterator[tuple[tuple, dict]]:
    for seen, how, constants in _examples(rng):
        yield (*seen, empty_chunks(seen[0], constants["HEAD_DIM"]), np.zeros(64, np.uint32),
               np.empty_like(seen[0]), *how), constants


def _split_example(rng: Any) -> Iterator[tuple[tuple, dict]]:
    for seen, how, constants in _examples(rng):
        yield (*seen, empty_chunks(seen[0], constants["HEAD_DIM"]), *how), constants


def _prepare(q, k, v, q_norm, k_norm, inv_freq, pos, cache_k, cache_v, mscale, eps, *, n_slots,
             norms, **constants) -> np.ndarray:
    """Stores the new position; the normed and rotated q (1, n_head * head_dim)."""
    q, k, one = q.copy(), k.copy(), np.ones(1, np.int32)
    if norms:
        for x, weight in ((q, q_norm), (k, k_norm)):
            rms_norm_heads.reference(weight, one, x, eps, HEAD_DIM=constants["HEAD_DIM"])
    rope_store.reference(q, k, v, inv_freq, pos, one, cache_k, cache_v, mscale, n_slots,
                         **constants)
    return q


@kernel("rope_attention.cu", geometry=_geometry, cost=_cost, example=_decode_example)
def rope_attention_decode(q: In, k: In, v: In, q_norm: In, k_norm: In, inv_freq: In, pos: In,
                          cache_k: InOut, cache_v: InOut, partials: InOut, counters: InOut,
                          out: Out, scale: float, softcap: float, mscale: float, eps: float,
                          window: int, n_slots: int, *, N_HEAD: int, N_HEAD_KV: int, HEAD_DIM: int,
                          TYPE_K: str, TYPE_V: str, CHUNK: int, MAX_CHUNKS: int, N_ROT: int,
                          NEOX: int, QK_NORM: int, WARPS: int) -> None:
    """`rms_norm_heads` of q and k with QK_NORM, `rope_store`, `attention_decode`, for one row.

    q: (1, N_HEAD * HEAD_DIM); k, v: (1, N_HEAD_KV * HEAD_DIM); norms: (HEAD_DIM,), not read without
    QK_NORM; inv_freq: (N_ROT / 2,); caches as in `kernels.kv`.
    """
    shape = {"N_HEAD": N_HEAD, "N_HEAD_KV": N_HEAD_KV, "HEAD_DIM": HEAD_DIM, "TYPE_K": TYPE_K,
             "TYPE_V": TYPE_V}
    ready = _prepare(q, k, v, q_norm, k_norm, inv_freq, pos, cache_k, cache_v, mscale, eps,
                     n_slots=n_slots, norms=QK_NORM, N_ROT=N_ROT, NEOX=NEOX, **shape)
    attention_decode.reference(
        ready, cache_k, cache_v, pos, [1], partials, counters, out, scale, softcap, window,
        n_slots, CHUNK=CHUNK, MAX_CHUNKS=MAX_CHUNKS, WARPS=WARPS, **shape,
    )


@kernel("rope_attention.cu", geometry=_geometry, cost=_cost, example=_split_example)
def rope_attention_split(q: In, k: In, v: In, q_norm: In, k_norm: In, inv_freq: In, pos: In,
                         cache_k: InOut, cache_v: InOut, chunks: Out, scale: float, softcap: float,
                         mscale: float, eps: float, window: int, n_slots: int, *, N_HEAD: int,
                         N_HEAD_KV: int, HEAD_DIM: int, TYPE_K: str, TYPE_V: str, CHUNK: int,
                         MAX_CHUNKS: int, N_ROT: int, NEOX: int, QK_NORM: int, WARPS: int) -> None:
    """The same with `attention_split`: chunks (1, N_HEAD, MAX_CHUNKS * (HEAD_DIM + 2))."""
    shape = {"N_HEAD": N_HEAD, "N_HEAD_KV": N_HEAD_KV, "HEAD_DIM": HEAD_DIM, "TYPE_K": TYPE_K,
             "TYPE_V": TYPE_V}
    ready = _prepare(q, k, v, q_norm, k_norm, inv_freq, pos, cache_k, cache_v, mscale, eps,
                     n_slots=n_slots, norms=QK_NORM, N_ROT=N_ROT, NEOX=NEOX, **shape)
    keys, values = pair(cache_k, cache_v, (TYPE_K, TYPE_V), N_HEAD_KV, HEAD_DIM)
    split_row(ready[0], keys, values, int(pos[0]), Scoring(scale, softcap, window), CHUNK,
              chunks[0])
