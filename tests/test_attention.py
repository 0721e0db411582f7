"""Which kernels of attention a step takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamagraph.errors import LlamaGraphError
from llamagraph.kernels.attend import MAX_CHUNKS, count_chunks
from llamagraph.kernels.attention import (
    FEW_KV,
    LONG_KV,
    AttentionShape,
    LayerKV,
    attention,
    attention_class,
    attention_vars,
    smallest_chunk,
)
from llamagraph.kernels.kv import cache_buffer
from llamagraph.kernels.layouts import layout, stored_bytes
from llamagraph.kernels.step import step_io
from llamagraph.planner import step_key
from llamagraph.program.launch import Buffer, StepKey, dense
from llamagraph.program.tape import Tape
from llamagraph.program.target import target_named
from llamagraph.program.weights import Weights


@given(st.integers(1, 1 << 20))
def test_blocks_are_a_power_of_two_and_enough(kv_len):
    target = target_named("sm_90a")
    (n,) = attention_vars(target, kv_len).values()
    assert n & (n - 1) == 0 and count_chunks(kv_len, 0, smallest_chunk(target)) <= n <= MAX_CHUNKS


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
    caches = LayerKV(*(
        cache_buffer(f"cache_{x}", i << 24, (96, shape.n_head_kv, shape.head_dim), kv)
        for i, x in enumerate("kv")
    ))
    attention(tape, tape.scratch("hidden", rows, 512), weights, shape, caches,
              weights.rope.weight, 1e-5)
    return tape.program().launches


def labels(launches):
    return [launch.label for launch in launches]


def test_numpy_takes_a_launch_a_step_of_the_maths():
    before, after = ["attn_norm", "attn_q", "attn_k", "attn_v", "rope"], ["attn_output"]
    assert labels(plan("numpy", kv="F32")) == [*before, "attn", *after]
    long = plan("numpy", kv="F32", depth="long")
    assert labels(long) == [*before, "attn", "attn_combine", *after]
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
    assert constants["NEOX"] == 1 and constants["CHUNK"] == 128
    assert constants["TYPE_K"] == constants["TYPE_V"] == "F16"
    *_, split, combine, output = plan(depth="long", more=norms)
    assert [split.kernel.name, combine.kernel.name] == ["rope_attention_split", "attention_combine"]
    assert labels([split, combine, output]) == ["attn", "attn_combine", "attn_output"]


def test_a_layer_with_one_norm_alone_is_not_fused():
    found = labels(plan(more=("attn_q_norm",)))
    assert found[-4:] == ["attn_q_norm", "rope", "attn", "attn_output"]


@pytest.mark.parametrize(("target", "rows", "kv", "names"), [
    ("numpy", 8, "F32", ["attention_plain"]),
    ("sm_80", 64, "F16", ["attention_rows_split", "attention_rows_combine"]),
    ("sm_80", 4096, "F16", ["attention_rows"]),
    ("sm_90a", 32, "Q8_0", ["attention_wgmma_split", "attention_rows_combine"]),
    ("sm_90a", 4096, "F16", ["attention_wgmma"]),
    ("sm_90a", 4096, "F32", ["attention_rows"]),
])
def test_the_number_of_rows_and_the_architecture_choose(target, rows, kv, names):
    store, *attend, _ = plan(target, rows=rows, kv=kv)[-2 - len(names):]
    assert store.kernel.name == "rope_store" and [x.kernel.name for x in attend] == names


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("more", [(), ("attn_q_norm",), ("attn_q_norm", "attn_k_norm")])
def test_few_rows_on_a_gpu_have_rope_and_the_cache_in_the_same_launch(target, more):
    found = plan(target, rows=8, more=more)
    attn = found[-2]
    assert attn.kernel.name == "rope_attention_few" and "rope" not in labels(found)
    assert attn.geometry.grid == (2, 2, 1)  # 4 query heads of 8 rows are 32 queries


@pytest.mark.parametrize(("target", "rows", "depth", "kv", "dim"), [
    ("sm_90a", 64, "short", "F16", 64), ("sm_90a", 8, "long", "F16", 64),
    ("sm_90a", 8, "short", "Q8_0", 64), ("sm_90a", 8, "short", "F16", 80),
    ("sm_75", 8, "short", "F16", 128), ("sm_120", 8, "short", "F16", 256),
])
def test_others_have_a_launch_for_rope_and_chunks_of_the_kv(target, rows, depth, kv, dim):
    shape = AttentionShape(n_head=8, n_head_kv=2, head_dim=dim, scale=1.0)
    found = labels(plan(target, rows, depth, shape, kv))
    assert "rope" in found and "attn_combine" in found


@pytest.mark.parametrize("rows", [2, 8, 32, 128, 512])
def test_blocks_of_rows_fill_the_machine_and_not_more(rows):
    launch = next(x for x in plan(rows=rows, depth="long") if x.label == "attn")
    kv_heads, tiles, n_chunks = launch.geometry.grid
    assert (kv_heads, tiles) == (2, -(-rows * 4 // 128))
    assert n_chunks == 1 or kv_heads * tiles * n_chunks <= target_named("sm_90a").n_sm
    assert not launch.vars()


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


@pytest.mark.parametrize("dim", [72, 512])
def test_heads_that_a_gpu_has_no_kernel_for_are_an_error(dim):
    shape = AttentionShape(n_head=2, n_head_kv=1, head_dim=dim, scale=1.0)
    with pytest.raises(LlamaGraphError, match=rf"{dim} numbers.*--device cpu"):
        attention(
            Tape(target_named("sm_90a"), StepKey(), step_io(8)), dense("h", "scratch", 0, (1, 64)),
            Weights({}, "m.gguf"), shape,
            LayerKV(*(cache_buffer(n, 0, (8, 1, dim), "F16") for n in "kv")),
            dense("rope", "weights", 0, (4,)), 1e-5,
        )


@pytest.mark.parametrize(("rows", "limit"), [(1, LONG_KV), (8, FEW_KV), (32, FEW_KV)])
def test_the_depth_class_changes_once(rows, limit):
    assert [attention_class(limit - 1, rows), attention_class(limit, rows)] == ["short", "long"]


def test_many_rows_are_of_one_class():
    assert attention_class(1 << 20, 64) == "short"


@pytest.mark.parametrize(("n_rows", "depth"), [(1, "short"), (5, "long"), (64, "short")])
def test_a_step_has_the_class_of_its_rows(n_rows, depth):
    assert step_key(n_rows, FEW_KV + 50, "last", "greedy").attention == depth
