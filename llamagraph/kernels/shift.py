"""Moves a part of a layer's KV cache to earlier positions, where a full context drops tokens.

Values move as they are. Keys are stored after their rotation, so they are turned back by the
distance and stored as their type has them; a factor that came with the rotation stays. What moves,
and how far, is in `io`: a program that does this is made once. Knows no token and no model.
"""

from dataclasses import replace

import numpy as np

from llamagraph.kernels.attention import AttentionShape, LayerKV
from llamagraph.kernels.copy import copy_launch
from llamagraph.kernels.kv import Cache, random_cache
from llamagraph.kernels.rope import rotate
from llamagraph.program.launch import Buffer, Geometry, In, InOut, Traffic, Work, kernel
from llamagraph.program.tape import Tape

BLOCKS = 1024  # each goes on to further positions


def _geometry(target, from_k: Buffer, *args, **constants) -> Geometry:
    return Geometry((min(from_k.shape[0], BLOCKS), 1, 1), 128)


def _cost(work: Work, from_k: Buffer, from_v: Buffer, *args, **constants) -> Traffic:
    half = (from_k.n_bytes + from_v.n_bytes) // 2
    return Traffic(half, half)


_EXAMPLES = (  # KV heads, head_dim, types, n_rot, slots, first, end, distance, neox
    (2, 16, "F32 F32", 16, 64, 40, 64, 32, 0),
    (3, 64, "F16 F16", 64, 300, 157, 300, 150, 0),
    (3, 64, "Q8_0 Q8_0", 64, 300, 157, 300, 150, 0),
    (3, 64, "Q4_0 BF16", 64, 300, 157, 300, 150, 1),
    (1, 80, "F16 F32", 32, 96, 20, 250, 17, 1),
    (2, 6, "F32 F16", 4, 7, 3, 11, 3, 0),
    (8, 128, "F16 F16", 128, 2500, 1300, 2500, 1200, 1),
    (8, 128, "Q8_0 Q4_0", 128, 2500, 1300, 2500, 1200, 0),
    (1, 256, "BF16 Q8_0", 256, 48, 5001, 9000, 5000, 1),
    (5, 96, "Q8_0 F16", 64, 48, 60, 100, 30, 1),
    (2, 64, "F16 F16", 64, 40, 30, 30, 20, 0),  # nothing
)


def _example(rng):
    for n_head_kv, dim, types, n_rot, slots, first, end, distance, neox in _EXAMPLES:
        type_k, type_v = types.split()
        caches = [random_cache(rng, slots, n_head_kv, dim, dtype) for dtype in 2 * types.split()]
        inv_freq = (10000.0 ** (-np.arange(n_rot // 2) / (n_rot // 2))).astype(np.float32)
        yield (*caches, inv_freq, np.array([first, end, distance], np.int32), slots), {
            "NEOX": neox, "TYPE_K": type_k, "TYPE_V": type_v, "N_HEAD_KV": n_head_kv,
            "HEAD_DIM": dim, "N_ROT": n_rot}


@kernel("shift.cu", geometry=_geometry, cost=_cost, example=_example)
def kv_shift(from_k: In, from_v: In, cache_k: InOut, cache_v: InOut, inv_freq: In, moved: In,
             n_slots: int, *, NEOX: int, TYPE_K: str, TYPE_V: str, N_HEAD_KV: int, HEAD_DIM: int,
             N_ROT: int) -> None:
    """Keys and values of the positions first .. end - 1 become those of `distance` before.

    Caches, and where they come from, are as in `kernels.kv`, slot = position % n_slots; inv_freq:
    (N_ROT / 2,); moved: first, end, distance. Of more positions than there are slots the last ones
    move. A cache may come from itself where distance >= end - first, unless it wraps.
    """
    first, end, distance = (int(n) for n in moved)
    where = np.arange(max(first, end - n_slots), end)
    source, target = (Cache(x, TYPE_K, N_HEAD_KV, HEAD_DIM) for x in (from_k, cache_k))
    k = source.read(where % n_slots)
    angle = np.float32(distance) * inv_freq
    rotate(k, np.cos(angle), -np.sin(angle), NEOX)
    slots = (where - distance) % n_slots
    target.write(slots, k)
    cache_v[slots] = from_v[where % n_slots]


def _staged(tape: Tape, name: str, cache: Buffer) -> Buffer:
    """A copy of a layer's keys or values."""
    room = tape.scratch(f"staged_{name}", cache.n_bytes, dtype="U8")
    staged = replace(room, dtype=cache.dtype, shape=cache.shape)
    copy_launch(tape, cache, staged, f"stage_{name}",
                "a ring: slots are read after others have been written")
    return staged


def shift(tape: Tape, kv: LayerKV, shape: AttentionShape, inv_freq: Buffer, n_ctx: int) -> None:
    """Moves what `io`'s `moved` says within a layer's cache."""
    n_slots, n_head_kv, head_dim = kv.k.shape
    wraps = n_slots < n_ctx
    source = (_staged(tape, "k", kv.k), _staged(tape, "v", kv.v)) if wraps else (kv.k, kv.v)
    how = kv_shift(NEOX=int(shape.neox), TYPE_K=kv.k.dtype, TYPE_V=kv.v.dtype,
                   N_HEAD_KV=n_head_kv, HEAD_DIM=head_dim, N_ROT=2 * inv_freq.shape[0])
    tape.launch(how, *source, kv.k, kv.v, inv_freq, tape.io["moved"], n_slots, label="shift",
                variant="neox" if shape.neox else "norm",
                reason="from a copy" if wraps else "in place: no slot is both read and written")
