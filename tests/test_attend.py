"""Attention's kernels against a plain softmax over all that a row sees."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamagraph.kernels.attend import MAX_CHUNKS, chunk_length, count_chunks, visible
from llamagraph.kernels.attention_few import (
    attention_combine,
    attention_decode,
    attention_split,
    empty_chunks,
    inputs,
    parts_of,
    type_constants,
)
from llamagraph.kernels.attention_rows import (
    ALIGNMENT,
    attention_plain,
    attention_rows,
    attention_rows_combine,
    attention_rows_split,
    attention_wgmma,
    chunk_of_rows,
)
from llamagraph.kernels.kv import pair
from llamagraph.kernels.norm import rms_norm_heads
from llamagraph.kernels.rope import rope_store
from llamagraph.kernels.rope_attention import rope_attention_decode, rope_attention_split

CASES = [  # heads, KV heads, head_dim, rows, pos, slots, softcap, window
    (9, 3, 64, 3, 0, 64, 0.0, 0),
    (4, 4, 80, 8, 130, 256, 0.0, 0),
    (6, 1, 96, 5, 70, 90, 20.0, 0),
    (8, 2, 128, 1, 260, 300, 0.0, 100),
    (16, 1, 128, 2, 1000, 160, 0.0, 77),  # the ring has gone round
    (4, 1, 256, 4, 517, 96, 50.0, 33),
    (2, 2, 64, 40, 300, 192, 0.0, 64),
    (3, 1, 64, 20, 0, 64, 0.0, 1),
]


def plain(q, k, v, pos, scale, softcap, window):
    """Softmax attention in float64, a row and a head at a time."""
    n_slots, n_head_kv, dim = k.n_slots, k.n_head_kv, k.head_dim
    cache_k, cache_v = k.read(slice(None)), v.read(slice(None))
    heads = q.reshape(len(q), -1, dim).astype(np.float64)
    out = np.empty_like(heads)
    for r in range(len(q)):
        last = pos + r
        where = np.arange(max(0, last - window + 1) if window else 0, last + 1) % n_slots
        for h in range(heads.shape[1]):
            kv = h * n_head_kv // heads.shape[1]
            s = cache_k[where, kv].astype(np.float64) @ heads[r, h] * scale
            s = softcap * np.tanh(s / softcap) if softcap else s
            p = np.exp(s - s.max())
            out[r, h] = p / p.sum() @ cache_v[where, kv].astype(np.float64)
    return out.reshape(q.shape)


class Case:
    """Random inputs of a case, for caches of types."""

    def __init__(self, case, types="F32 F32", chunk=16):
        n_head, n_head_kv, dim, rows, self.pos, slots, softcap, window = case
        rng = np.random.default_rng(5)
        self.q, self.k, self.v = inputs(rng, n_head, n_head_kv, dim, types, rows, slots)
        self.seen = (self.q, self.k, self.v, np.array([self.pos], np.int32),
                     np.array([rows], np.int32))
        self.scoring, self.window = (dim**-0.5, softcap, window), window
        self.how = (*self.scoring, slots)
        self.shape = {"N_HEAD": n_head, "N_HEAD_KV": n_head_kv, "HEAD_DIM": dim,
                      **type_constants(types)}
        self.tiled = {**self.shape, "QUERIES": 64}
        self.chunked = {**self.shape, "CHUNK": chunk, "MAX_CHUNKS": MAX_CHUNKS, "WARPS": 8}

    def plain(self):
        c = self.shape
        caches = pair(self.k, self.v, (c["TYPE_K"], c["TYPE_V"]), c["N_HEAD_KV"], c["HEAD_DIM"])
        return plain(self.q, *caches, self.pos, *self.scoring)

    def split(self):
        found = np.full_like(empty_chunks(self.q, self.shape["HEAD_DIM"]), np.nan)
        attention_split.reference(*self.seen, found, *self.how, **self.chunked)
        return found

    def combined(self, found):
        out = np.empty_like(self.q)
        attention_combine.reference(found, *self.seen[3:], out, self.window, **self.chunked)
        return out

    def in_rows(self):
        """Through `attention_rows_split` and its combination, with chunks of 128."""
        most, dim = 4, self.shape["HEAD_DIM"]
        found = np.full((len(self.q), self.shape["N_HEAD"], most * (dim + 2)), np.nan, np.float32)
        attention_rows_split.reference(*self.seen, found, *self.how, CHUNK=128, MAX_CHUNKS=most,
                                       **self.tiled)
        out = np.empty_like(self.q)
        attention_rows_combine.reference(found, self.seen[4], out, N_HEAD=self.shape["N_HEAD"],
                                         HEAD_DIM=dim, MAX_CHUNKS=most)
        return out

    def by(self, kernel):
        out = np.empty_like(self.q)
        constants = self.tiled if kernel.arch or kernel.source else self.shape
        kernel.reference(*self.seen, out, *self.how, **constants)
        return out


def error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


TYPE_PAIRS = ["F32 F32", "F16 F16", "BF16 BF16", "Q8_0 Q8_0", "Q4_0 Q4_0", "F16 Q8_0"]


@pytest.mark.parametrize("types", TYPE_PAIRS)
@pytest.mark.parametrize("case", CASES)
def test_every_variant_is_plain_softmax_attention(case, types):
    if case[2] % 32 and "_" in types:
        pytest.skip("a head is no whole blocks")
    c = Case(case, types)
    decoded, expected = np.empty_like(c.q), c.plain()
    attention_decode.reference(*c.seen, empty_chunks(c.q, c.shape["HEAD_DIM"]),
                               np.zeros(8, np.uint32), decoded, *c.how, **c.chunked)
    for found in (decoded, c.combined(c.split()), c.by(attention_plain)):
        assert error(found, expected) < 1e-6
    for found in (c.by(attention_rows), c.by(attention_wgmma), c.in_rows()):
        assert error(found, expected) < 1e-3


@pytest.mark.parametrize("chunk", [16, 64, 256])
def test_the_length_of_chunks_changes_rounding_alone(chunk):
    c = Case(CASES[4], chunk=chunk)
    assert error(c.combined(c.split()), c.plain()) < 1e-6


@pytest.mark.parametrize("case", CASES[3:6])
def test_a_chunk_depends_on_its_own_positions_alone(case):
    """So whichever block takes it, and however many blocks there are, its bits are the same."""
    c = Case(case)
    before = c.split()
    rng, row = np.random.default_rng(6), len(c.q) - 1
    last, dim = c.pos + row, c.shape["HEAD_DIM"]
    low = last + 1 - visible(last + 1, c.window)
    length = chunk_length(visible(last + 1, c.window), 16)
    for i in range(count_chunks(last + 1, c.window, 16)):
        c = Case(case)
        start = (low // length + i) * length
        kept = np.arange(max(start, low), min(start + length, last + 1)) % len(c.k)
        others = np.setdiff1d(np.arange(len(c.k)), kept)
        c.k[others] = rng.standard_normal(c.k[others].shape)
        c.v[others] = rng.standard_normal(c.v[others].shape)
        for a, b in zip(parts_of(before[row], dim), parts_of(c.split()[row], dim), strict=True):
            assert np.array_equal(a[:, i], b[:, i])
            assert np.isfinite(a[:, i]).all()


def test_rows_past_n_rows_and_chunks_past_the_last_are_left_alone():
    c = Case(CASES[1])
    c.seen[4][0] = 3
    found, out = c.split(), np.full_like(c.q, np.nan)
    assert np.isnan(found[3:]).all() and np.isnan(found[0, :, -1]).all()
    attention_rows.reference(*c.seen, out, *c.how, **c.tiled)
    assert np.isnan(out[3:]).all() and np.isfinite(out[:3]).all()


FUSED_ONLY = ("N_ROT", "NEOX", "QK_NORM")  # constants that the unfused kernels do not have


def fused_example(index):
    """An example of the fused kernel, and the same through the unfused ones."""
    assert rope_attention_decode.example
    args, c = list(rope_attention_decode.example(np.random.default_rng(1)))[index]
    q, k, v, q_norm, k_norm, inv_freq, pos, cache_k, cache_v, partials, counters, out, *how = args
    scale, softcap, mscale, eps, window, slots = how
    unfused = [x.copy() for x in (q, k, cache_k, cache_v, np.empty_like(out))]
    q, k, keys, values, expected = unfused
    one = np.array([1], np.int32)
    shape = {name: c[name] for name in ("N_HEAD", "N_HEAD_KV", "HEAD_DIM", "TYPE_K", "TYPE_V")}
    if c["QK_NORM"]:
        rms_norm_heads.reference(q_norm, one, q, eps, HEAD_DIM=c["HEAD_DIM"])
        rms_norm_heads.reference(k_norm, one, k, eps, HEAD_DIM=c["HEAD_DIM"])
    rope_store.reference(q, k, v, inv_freq, pos, one, keys, values, mscale, slots, NEOX=c["NEOX"],
                         N_ROT=c["N_ROT"], **shape)
    attention_decode.reference(
        q, keys, values, pos, one, partials, counters, expected, scale, softcap, window, slots,
        CHUNK=c["CHUNK"], MAX_CHUNKS=MAX_CHUNKS, WARPS=c["WARPS"], **shape,
    )
    return args, c, (keys, values, expected)


@pytest.mark.parametrize("index", range(11))
def test_the_fused_kernels_are_the_unfused_ones(index):
    args, c, (keys, values, expected) = fused_example(index)
    seen, (partials, counters, out), how = args[:9], args[9:12], args[12:]
    again = [x.copy() for x in seen[7:9]]
    found = empty_chunks(args[0], c["HEAD_DIM"])
    rope_attention_split.reference(*seen[:7], *again, found, *how, **c)
    rope_attention_decode.reference(*seen, partials, counters, out, *how, **c)
    assert np.array_equal(out, expected)
    for cache, other in zip(seen[7:9], again, strict=True):
        assert np.array_equal(cache, other)
    assert np.array_equal(seen[7], keys) and np.array_equal(seen[8], values)
    combined, shape = np.empty_like(out), {n: c[n] for n in c if n not in FUSED_ONLY}
    attention_combine.reference(found, seen[6], np.array([1], np.int32), combined, how[4], **shape)
    assert error(combined, expected) < 1e-6


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 20), st.sampled_from([16, 64, 256]))
def test_there_is_room_for_all_chunks(kv_len, window, smallest):
    assert 1 <= visible(kv_len, window) <= kv_len
    assert 1 <= count_chunks(kv_len, window, smallest) <= MAX_CHUNKS
    length = chunk_length(visible(kv_len, window), smallest)
    low = kv_len - visible(kv_len, window)
    assert count_chunks(kv_len, window, smallest) == len(
        {low // length, *range(low // length, (kv_len - 1) // length + 1)}
    )


@given(st.integers(0, 1 << 20), st.integers(1, 512), st.integers(0, 1 << 16), st.integers(1, 32))
def test_chunks_of_rows_hold_all_that_they_see(pos, n_rows, window, most):
    first, length = chunk_of_rows(pos, n_rows, window, 256, most)
    assert first % ALIGNMENT == length % ALIGNMENT == 0 and length >= 256
    assert first <= (max(0, pos + 1 - window) if window else 0) < first + ALIGNMENT
    assert first + most * length >= pos + n_rows
