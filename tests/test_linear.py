"""Products with a weight: which kernels are chosen, and what a row of activations loses as int8."""

import numpy as np
import pytest

from llamagraph.kernels import gemv
from llamagraph.kernels.examples import random_weight
from llamagraph.kernels.layouts import layout, stored_bytes, tile_constants
from llamagraph.kernels.linear import (
    linear,
    linear_add,
    linear_residual,
    linear_rows,
    norm_linear,
    qkv,
)
from llamagraph.kernels.mlp import mlp
from llamagraph.kernels.step import step_io
from llamagraph.program.launch import Buffer, StepKey
from llamagraph.program.tape import Tape
from llamagraph.program.target import target_named
from llamagraph.program.weights import Weights


def weights_of(target, tensors):
    """A tree of weights, from type and shape by name."""
    buffers, offset = {}, 0
    for name, (dtype, *shape) in tensors.items():
        order = layout(target, dtype, shape)
        stop = offset + stored_bytes(dtype, shape, order)
        buffers[name] = Buffer(name, "weights", offset, stop, dtype, tuple(shape), order)
        offset = stop
    return Weights(buffers, "test.gguf")


def plan(target, rows, tensors, operation):
    """The launches that `operation(tape, hidden, weights)` writes."""
    target = target_named(target)
    tape = Tape(target, StepKey(rows), step_io(64))
    weights = weights_of(target, tensors)
    n_embd = next(iter(tensors.values()))[-1]
    operation(tape, tape.scratch("hidden", rows, n_embd), weights)
    return tape.program().launches


def names(launches):
    return [launch.kernel.name for launch in launches]


def heads(q="Q4_K", k="Q4_K", v="Q4_K", **more):
    return {"attn_q.weight": (q, 2048, 2048), "attn_k.weight": (k, 512, 2048),
            "attn_v.weight": (v, 512, 2048), "attn_norm.weight": ("F32", 2048), **more}


def feed_forward(gate="Q4_K", up="Q4_K", **more):
    return {"ffn_gate.weight": (gate, 8192, 2048), "ffn_up.weight": (up, 8192, 2048),
            "ffn_down.weight": ("Q6_K", 2048, 8192), "ffn_norm.weight": ("F32", 2048), **more}


def plan_qkv(tensors, rows=1, target="sm_90a"):
    return plan(target, rows, tensors, lambda tape, x, w: qkv(tape, x, w, 1e-5))


def plan_mlp(tensors, rows=1, target="sm_90a"):
    return plan(target, rows, tensors, lambda tape, x, w: mlp(tape, x, w, 1e-5))


def test_one_row_takes_a_launch_for_q_k_and_v():
    (launch,) = plan_qkv(heads())
    assert launch.kernel.name == "gemv_norm_qkv"
    assert dict(launch.kernel.constants)["OTHER_BLOCKS"] == 0


def test_a_second_type_has_its_share_of_the_blocks():
    (launch,) = plan_qkv(heads(v="Q6_K"))
    constants = dict(launch.kernel.constants)
    blocks, others = launch.geometry.grid[0], constants["OTHER_BLOCKS"]
    assert (constants["TYPE"], constants["OTHER_TYPE"]) == ("Q4_K", "Q6_K")
    assert (constants["K_OTHER"], constants["V_OTHER"]) == (0, 1)
    assert 0 < others < blocks / 2
    assert launch.variant == "Q4_K Q6_K"


@pytest.mark.parametrize("types", [("Q4_K", "Q5_K", "Q6_K"), ("Q4_K", "Q4_K", "F16")])
def test_what_one_launch_cannot_mix_takes_three(types):
    assert names(plan_qkv(heads(*types))) == ["gemv_norm"] * 3


def test_biases_are_added_by_the_same_launch():
    biases = {f"attn_{p}.bias": ("F32", n) for p, n in (("q", 2048), ("k", 512), ("v", 512))}
    assert names(plan_qkv(heads(**biases))) == ["gemv_norm_qkv_bias"]
    assert names(plan_qkv(heads(**{"attn_q.bias": ("F32", 2048)}))) == [
        "gemv_norm", "add_bias", "gemv_norm", "gemv_norm",
    ]


def test_many_rows_are_normed_once_and_multiplied_on_tensor_cores():
    assert names(plan_qkv(heads(), rows=64, target="sm_80")) == ["rms_norm"] + ["gemm_rows"] * 3
    assert names(plan_mlp(feed_forward(), rows=512, target="sm_80")) == [
        "rms_norm", "gemm_rows", "gemm_rows", "gate_act", "gemm_add",
    ]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_few_rows_go_through_panels_to_single_warps(target):
    norm, product = plan_qkv(heads(v="Q6_K"), rows=32, target=target)
    assert (norm.kernel.name, product.kernel.name) == ("rms_norm_panels", "warps_qkv")
    assert product.variant.startswith("Q4_K Q6_K mma ")
    assert names(plan_mlp(feed_forward(), rows=8, target=target)) == [
        "rms_norm_panels", "warps_gated", "warps_add",
    ]
    gated = "hopper_gated" if target == "sm_90a" else "warps_gated"
    assert names(plan_mlp(feed_forward(), rows=32, target=target))[1:] == [gated, "warps_add"]
    assert names(plan_qkv(heads(), rows=8, target="sm_75")) == ["rms_norm"] + ["gemm_rows"] * 3


def test_many_rows_on_a_hopper_go_through_panels():
    norm, product = plan_qkv(heads(v="Q6_K"), rows=512)
    assert (norm.kernel.name, product.kernel.name) == ("rms_norm_panels", "hopper_qkv")
    assert product.variant.startswith("Q4_K Q6_K wgmma 128x")
    assert names(plan_mlp(feed_forward(), rows=512)) == [
        "rms_norm_panels", "hopper_gated", "hopper_add",
    ]


def test_what_one_launch_of_a_hopper_cannot_mix_takes_more():
    biases = {f"attn_{p}.bias": ("F32", n) for p, n in (("q", 2048), ("k", 512), ("v", 512))}
    assert names(plan_qkv(heads(k="Q5_K"), rows=64)) == ["rms_norm_panels"] + ["hopper_rows"] * 3
    assert names(plan_qkv(heads(**biases), rows=64)) == [
        "rms_norm_panels", "hopper_qkv", *["add_bias"] * 3,
    ]
    assert names(plan_mlp(feed_forward(up="Q5_K"), rows=64)) == [
        "rms_norm_panels", "hopper_rows", "hopper_rows", "gate_act_panels", "hopper_add",
    ]


def test_beside_a_weight_without_panels_a_norm_has_plain_rows():
    assert names(plan_qkv(heads("F32", "F32"), rows=64)) == [
        "rms_norm", "gemm_rows", "gemm_rows", "to_panels", "hopper_rows",
    ]
    assert names(plan_mlp(feed_forward("Q3_K", "Q3_K"), rows=64)) == [
        "rms_norm", "gemm_rows", "gemm_rows", "gate_act_panels", "hopper_add",
    ]


def test_rows_of_floats_are_packed_for_one_product():
    launches = plan("sm_90a", 64, {"w.weight": ("Q4_K", 512, 512)},
                    lambda tape, x, w: linear(tape, x, w.w))
    assert names(launches) == ["to_panels", "hopper_rows"]


def test_numpy_has_one_product():
    assert names(plan_qkv(heads(), target="numpy")) == ["rms_norm"] + ["linear_rows"] * 3


def test_one_row_takes_two_launches_for_a_feed_forward_block():
    gate_up, down = plan_mlp(feed_forward())
    assert (gate_up.kernel.name, down.kernel.name) == ("gemv_norm_gated", "gemv_add")
    assert gate_up.label == "ffn_gate_up"


def test_a_post_norm_comes_between_down_and_the_sum():
    launches = plan_mlp(feed_forward(**{"post_ffw_norm.weight": ("F32", 2048)}))
    assert names(launches) == ["gemv_norm_gated", "gemv", "rms_norm_add"]


def test_gate_and_up_of_two_types_are_apart():
    assert names(plan_mlp(feed_forward(up="Q5_K"))) == [
        "rms_norm", "gemv", "gemv", "gate_act", "gemv_add",
    ]


def test_a_row_that_does_not_fit_shared_memory_goes_to_the_tensor_cores():
    tensors = {"w.weight": ("F16", 4096, 28672)}
    for target, chosen in (("sm_90a", "gemv"), ("sm_75", "gemm_rows")):
        launches = plan(target, 1, tensors, lambda tape, x, w: linear(tape, x, w.w))
        assert names(launches) == [chosen]


def test_the_reason_says_what_was_converted():
    tensors = {"w.weight": ("IQ2_XS", 64, 512), "n.weight": ("F32", 512)}
    (launch,) = plan("sm_90a", 1, tensors, lambda t, x, w: norm_linear(t, x, w.n, w.w, 1e-5))
    assert launch.variant == "F16"
    assert launch.reason == "one row, with n; IQ2_XS is converted to F16 at load"


def test_every_block_has_whole_teams_and_fits():
    """Of usual matrices: at most 512 threads, and not many more blocks than run at once."""
    for dtype in ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "F16", "F32"):
        for shape in ((64, 256), (576, 1536), (2048, 2048), (4096, 14336), (128256, 4096)):
            tensors = {"w.weight": (dtype, *shape)}
            for target in ("sm_75", "sm_90a"):
                launches = plan(target, 1, tensors, lambda t, x, w: linear_residual(
                    t, x, w.w, t.scratch("out", 1, w.w.weight.shape[0])))
                for launch in launches:
                    if launch.kernel.name == "gemm_add":
                        continue
                    constants = dict(launch.kernel.constants)
                    warps = constants["TEAMS"] * constants["SPLIT"]
                    assert launch.geometry.block == 32 * warps <= 512
                    assert launch.geometry.grid[0] <= target_named(target).n_sm * (16 // warps)


def test_int8_activations_are_as_near_as_their_scale():
    x = np.random.default_rng(0).standard_normal((1, 256)).astype(np.float32)
    x[0, :32] = 0
    near = gemv.quantised(x)
    step = np.abs(x.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
    assert (np.abs(near - x).reshape(-1, 32) <= step * 0.5001).all()
    assert (near[0, :32] == 0).all()


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "F16"])
def test_one_row_is_within_a_hundredth_of_the_exact_product(dtype):
    rng = np.random.default_rng(0)
    weight = random_weight(rng, dtype, (512, 1024), "rows16")
    x = rng.standard_normal((1, 1024), np.float32)
    out = np.empty((1, 512), np.float32)
    target = target_named("sm_90a")
    gemv.gemv.reference(weight.matrix, x, out, **gemv.constants(target, [weight]))
    exact = weight.matrix.astype(np.float64) @ x[0]
    assert np.linalg.norm(out - exact) <= 1e-2 * np.linalg.norm(exact)


def test_numpy_products_leave_rows_beyond_the_true_ones():
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((4, 16)), rng.standard_normal((8, 16))
    out = np.full((4, 8), 7.0)
    linear_rows.reference(weight, x, [3], out)
    assert np.allclose(out[:3], x[:3] @ weight.T)
    assert (out[3] == 7).all()
    linear_add.reference(weight, x, [1], out)
    assert np.allclose(out[0], 2 * (x[0] @ weight.T))
    assert np.allclose(out[1:3], x[1:3] @ weight.T)


def test_tiles_are_named_by_type_unit_and_rows():
    weight = weights_of(target_named("sm_90a"), {"w.weight": ("Q5_0", 8, 576)}).w.weight
    assert tile_constants(weight) == {"TYPE": "Q5_0", "UNIT": 64, "RW": 8}
