"""Attention against a plain softmax over all that a row sees, and which kernels a step takes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamagraph.errors import LlamaGraphError
from llamagraph.kernels.attend import MAX_CHUNKS, chunk_length, count_chunks, visible
from llamagraph.kernels.attention import (
    LONG_KV,
    AttentionShape,
    LayerKV,
    attention,
    attention_class,
    attention_vars,
)
from llamagraph.kernels.attention_few import (
    attention_combine,
    attention_decode,
    attention_split,
    empty_chunks,
    inputs,
    parts_of,
)
from llamagraph.kernels.attention_rows import attention_rows
from llamagraph.kernels.layouts import layout, stored_bytes
from llamagraph.kernels.norm import rms_norm_heads
from llamagraph.kernels.rope import rope_store
from llamagraph.kernels.rope_attention import rope_attention_decode, rope_attention_split
from llamagraph.kernels.step import step_io
from llamagraph.program.launch import Buffer, StepKey, dense
from llamagraph.program.tape import Tape
from llamagraph.program.target import target_named
from llamagraph.program.weights import Weights

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


def plain(q, cache_k, cache_v, pos, scale, softcap, window):
    """Softmax attention in float64, a row and a head at a time."""
    n_slots, n_head_kv, dim = cache_k.shape
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
    """Random inputs of a case, for caches of a type."""

    def __init__(self, case, kv="F32", chunk=16):
        n_head, n_head_kv, dim, rows, self.pos, slots, softcap, window = case
        rng = np.random.default_rng(5)
        self.q, self.k, self.v = inputs(rng, n_head, n_head_kv, dim, kv, rows, slots)
        self.seen = (self.q, self.k, self.v, np.array([self.pos], np.int32),
                     np.array([rows], np.int32))
        self.scoring, self.window = (dim**-0.5, softcap, window), window
        self.how = (*self.scoring, slots)
        self.shape = {"N_HEAD": n_head, "N_HEAD_KV": n_head_kv, "HEAD_DIM": dim, "KV": kv}
        self.chunked = {**self.shape, "CHUNK": chunk, "MAX_CHUNKS": MAX_CHUNKS}

    def plain(self):
        return plain(self.q, self.k, self.v, self.pos, *self.scoring)

    def split(self):
        found = np.full_like(empty_chunks(self.q, self.shape["HEAD_DIM"]), np.nan)
        attention_split.reference(*self.seen, found, *self.how, **self.chunked)
        return found

    def combined(self, found):
        out = np.empty_like(self.q)
        attention_combine.reference(found, *self.seen[3:], out, self.window, **self.chunked)
        return out


def error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("kv", ["F32", "F16"])
@pytest.mark.parametrize("case", CASES)
def test_every_variant_is_plain_softmax_attention(case, kv):
    c = Case(case, kv)
    decoded, by_rows = np.empty_like(c.q), np.empty_like(c.q)
    attention_decode.reference(*c.seen, empty_chunks(c.q, c.shape["HEAD_DIM"]),
                               np.zeros(8, np.uint32), decoded, *c.how, **c.chunked)
    attention_rows.reference(*c.seen, by_rows, *c.how, **c.shape)
    assert error(decoded, c.plain()) < 1e-6
    assert error(c.combined(c.split()), c.plain()) < 1e-6
    assert error(by_rows, c.plain()) < (1e-6 if kv == "F32" else 1e-3)


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
    attention_rows.reference(*c.seen, out, *c.how, **c.shape)
    assert np.isnan(out[3:]).all() and np.isfinite(out[:3]).all()


FUSED_ONLY = ("N_ROT", "NEOX", "QK_NORM")  # constants that the unfused kernels do not have


def fused_example(index):
    """An example of the fused kernel, and the same through the unfused ones."""
    args, c = list(rope_attention_decode.example(np.random.default_rng(1)))[index]
    q, k, v, q_norm, k_norm, inv_freq, pos, cache_k, cache_v, partials, counters, out, *how = args
    scale, softcap, mscale, eps, window, slots = how
    unfused = [x.copy() for x in (q, k, cache_k, cache_v, np.empty_like(out))]
    q, k, keys, values, expected = unfused
    one = np.array([1], np.int32)
    shape = {name: c[name] for name in ("N_HEAD", "N_HEAD_KV", "HEAD_DIM", "KV")}
    if c["QK_NORM"]:
        rms_norm_heads.reference(q_norm, one, q, eps, HEAD_DIM=c["HEAD_DIM"])
        rms_norm_heads.reference(k_norm, one, k, eps, HEAD_DIM=c["HEAD_DIM"])
    rope_store.reference(q, k, v, inv_freq, pos, one, keys, values, mscale, slots, NEOX=c["NEOX"],
                         N_ROT=c["N_ROT"], **shape)
    attention_decode.reference(
        q, keys, values, pos, one, partials, counters, expected, scale, softcap, window, slots,
        CHUNK=c["CHUNK"], MAX_CHUNKS=MAX_CHUNKS, **shape,
    )
    return args, c, (keys, values, expected)


@pytest.mark.parametrize("index", range(10))
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


@given(st.integers(1, 1 << 20))
def test_blocks_are_a_power_of_two_and_enough(kv_len):
    (n,) = attention_vars(target_named("sm_90a"), kv_len).values()
    assert n & (n - 1) == 0 and count_chunks(kv_len, 0, 64) <= n <= MAX_CHUNKS


SHAPE = AttentionShape(n_head=8, n_head_kv=2, head_dim=64, scale=0.125, neox=True)


def weights_of(target, shape, more):
    """A layer's weights for rows of 512 numbers; `more` are those of norms."""
    q, kv, dim = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim, shape.head_dim
    sizes = {"attn_norm": (512,), "attn_q": (q, 512), "attn_k": (kv, 512), "attn_v": (kv, 512),
             "attn_output": (512, q), "rope": (dim // 2,), "attn_q_norm": (dim,),
             "attn_k_norm": (dim,), "post_attention_norm": (512,)}
    buffers, offset = {}, 0
    for name, size in sizes.items():
        if not name.endswith("_norm") or name in ("attn_norm", *more):
            order = layout(target, "F32", size)
            stop = offset + stored_bytes("F32", size, order)
            buffers[f"{name}.weight"] = Buffer(name, "weights", offset, stop, "F32", size, order)
            offset = stop
    return Weights(buffers, "test.gguf")


def plan(target="sm_90a", rows=1, depth="short", shape=SHAPE, kv="F16", more=()):
    """The launches of the operation."""
    tape = Tape(target_named(target), StepKey(rows, attention=depth), step_io(96))
    weights = weights_of(tape.target, shape, more)
    caches = LayerKV(*(dense(f"cache_{x}", "kv", i << 24, (96, shape.n_head_kv, shape.head_dim), kv)
                       for i, x in enumerate("kv")))
    attention(tape, tape.scratch("hidden", rows, 512), weights, shape, caches,
              weights.rope.weight, 1e-5)
    return tape.program().launches


def labels(launches):
    return [launch.label for launch in launches]


def test_numpy_takes_a_launch_a_step_of_the_maths():
    before, after = ["attn_norm", "attn_q", "attn_k", "attn_v", "rope"], ["attn_output"]
    assert labels(plan("numpy", kv="F32")) == [*before, "attn", *after]
    assert labels(plan("numpy", depth="long")) == [*before, "attn", "attn_combine", *after]
    norms = ("attn_q_norm", "attn_k_norm", "post_attention_norm")
    assert labels(plan("numpy", rows=32, more=norms)) == [
        *before[:4], "attn_q_norm", "attn_k_norm", "rope", "attn", *after, "post_attention_norm"
    ]


@pytest.mark.parametrize("norms", [(), ("attn_q_norm", "attn_k_norm")])
def test_one_row_on_a_gpu_has_rope_and_the_cache_in_the_same_launch(norms):
    *_, attn, output = plan(more=norms)
    assert (attn.kernel.name, attn.label, output.label) == (
        "rope_attention_decode", "attn", "attn_output"
    )
    constants = dict(attn.kernel.constants)
    assert (constants["QK_NORM"], constants["N_ROT"]) == (int(bool(norms)), 64)
    assert constants["NEOX"] == 1 and constants["CHUNK"] == 64 and constants["KV"] == "F16"
    *_, split, combine, output = plan(depth="long", more=norms)
    assert [split.kernel.name, combine.kernel.name] == ["rope_attention_split", "attention_combine"]
    assert labels([split, combine, output]) == ["attn", "attn_combine", "attn_output"]


def test_a_layer_with_one_norm_alone_is_not_fused():
    found = labels(plan(more=("attn_q_norm",)))
    assert found[-4:] == ["attn_q_norm", "rope", "attn", "attn_output"]


@pytest.mark.parametrize(("rows", "name"), [(8, "attention_decode"), (32, "attention_rows")])
def test_the_number_of_rows_chooses(rows, name):
    assert [x.kernel.name for x in plan(rows=rows)[-3:-1]] == ["rope_store", name]


@pytest.mark.parametrize("target", ["numpy", "sm_75", "sm_90a"])
@pytest.mark.parametrize(("rows", "depth"), [(1, "short"), (1, "long"), (8, "short")])
def test_what_depends_on_the_depth_is_unstable(target, rows, depth):
    for launch in plan(target, rows, depth):
        assert launch.stable == (launch.label not in ("attn", "attn_combine"))
        assert launch.stable or launch.reason
        assert not (launch.vars() and launch.stable)


def test_large_groups_have_several_blocks():
    shape = AttentionShape(n_head=36, n_head_kv=3, head_dim=128, scale=1.0)
    *_, attn, _ = plan(shape=shape)
    assert attn.geometry.grid[1:] == (6, 1) and attn.vars() == {"n_attn_blocks"}


@pytest.mark.parametrize(("dim", "kv"), [(72, "F16"), (512, "F16"), (64, "F32")])
def test_heads_that_a_gpu_has_no_kernel_for_are_an_error(dim, kv):
    shape = AttentionShape(n_head=2, n_head_kv=1, head_dim=dim, scale=1.0)
    with pytest.raises(LlamaGraphError, match=rf"{dim} numbers .* {kv}.*--device cpu"):
        attention(
            Tape(target_named("sm_90a"), StepKey(), step_io(8)), dense("h", "scratch", 0, (1, 64)),
            Weights({}, "m.gguf"), shape,
            LayerKV(*(Buffer(n, "kv", 0, 64, kv, (8, 1, dim)) for n in "kv")),
            dense("rope", "weights", 0, (4,)), 1e-5,
        )


def test_the_depth_class_changes_once():
    assert (attention_class(LONG_KV - 1), attention_class(LONG_KV)) == ("short", "long")
