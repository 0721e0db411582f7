"""Rotary positions against complex numbers, and the write into the slots of the cache."""

import numpy as np
import pytest

from llamagraph.kernels.kv import empty, pair
from llamagraph.kernels.rope import rope_store, store
from llamagraph.kernels.step import step_io
from llamagraph.program.launch import StepKey, dense
from llamagraph.program.tape import Tape
from llamagraph.program.target import target_named


def turned(x: np.ndarray, angle: np.ndarray, mscale: float, neox: int) -> np.ndarray:
    """Pairs of numbers as complex numbers, times mscale * e^(i * angle). x: (rows, heads, dim)."""
    out, half = x.astype(np.float64), angle.shape[-1]
    a, b = (slice(0, half), slice(half, 2 * half)) if neox else (
        slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    )
    z = (out[..., a] + 1j * out[..., b]) * mscale * np.exp(1j * angle)[:, None]
    out[..., a], out[..., b] = z.real, z.imag
    return out


def test_pairs_turn_by_their_angle_and_slots_go_round():
    assert rope_store.example
    for args, c in rope_store.example(np.random.default_rng(0)):
        q, k, v, inv_freq, pos, n_rows, cache_k, cache_v, mscale, n_slots = args
        n, dim, before = n_rows[0], c["HEAD_DIM"], (q.copy(), k.copy())
        rope_store.reference(*args, **c)
        where = np.arange(pos[0], pos[0] + n)
        angle = (where[:, None].astype(np.float32) * inv_freq).astype(np.float64)
        for now, then in zip((q, k), before, strict=True):
            expected = turned(then[:n].reshape(n, -1, dim), angle, mscale, c["NEOX"])
            assert np.allclose(now[:n].reshape(n, -1, dim), expected, atol=2e-6)
            assert np.array_equal(now[n:], then[n:])
        types = c["TYPE_K"], c["TYPE_V"]
        for cache, x in zip(pair(cache_k, cache_v, types, c["N_HEAD_KV"], dim), (k, v),
                            strict=True):
            stored, others = empty(n, c["N_HEAD_KV"], dim, cache.dtype), np.ones(n_slots, bool)
            stored.write(np.arange(n), x[:n].reshape(n, -1, dim))
            assert np.array_equal(cache.array[where % n_slots], stored.array)
            others[where % n_slots] = False
            assert not cache.array[others].any()


@pytest.mark.parametrize("rows", [8, 512])
def test_one_launch_with_the_shapes_as_constants(rows):
    tape = Tape(target_named("sm_90a"), StepKey(rows=rows), step_io(100))
    q, k, v = (dense(n, "scratch", 0, (rows, w)) for n, w in (("q", 512), ("k", 128), ("v", 128)))
    caches = [dense("cache", "kv", 0, (96, 2, 64), "F16") for _ in range(2)]
    store(tape, q, k, v, dense("rope", "weights", 0, (24,)), *caches, neox=True, mscale=1.5)
    (launch,) = tape.program().launches
    assert dict(launch.kernel.constants) == {
        "NEOX": 1, "TYPE_K": "F16", "TYPE_V": "F16", "N_HEAD": 8, "N_HEAD_KV": 2,
        "HEAD_DIM": 64, "N_ROT": 48
    }
    assert launch.geometry.grid == (rows, 2, 1)  # 12 heads of q, k and v, 8 a block
    assert launch.args[-2:] == (1.5, 96)
