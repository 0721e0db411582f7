"""A weight times the one row of a decode step, fused with what comes before and after it.

A launch costs about two microseconds whatever it does, so a layer's products are as few launches
as they can be: norm and quantisation of the row are done again by every block. The row meets
integer weights as int8 with a scale per 32, float weights as it is. Knows no layer and no order of
launches.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from llamagraph.kernels.activations import ACTIVATIONS
from llamagraph.kernels.examples import RawWeight, random_weight
from llamagraph.kernels.layouts import (
    FLOATS,
    PACKINGS,
    Weight,
    layout,
    tile_constants,
    tiles_of,
    type_of,
)
from llamagraph.kernels.shares import fits, most_blocks, place, row_bytes, shares
from llamagraph.program.launch import Geometry, In, InOut, Out, kernel
from llamagraph.program.target import TARGETS, Target


def quantised(x: np.ndarray) -> np.ndarray:
    """x as int8 times a scale per 32: q = round(x * 127 / max|x|), ties to even."""
    blocks = x.reshape(-1, 32)
    amax = np.abs(blocks).max(axis=1, keepdims=True)
    inverse = np.where(amax > 1e-30, np.float32(127) / np.maximum(amax, 1e-30), 0)
    q = np.rint(blocks * inverse.astype(np.float32))
    return (q * (amax * np.float32(1 / 127))).reshape(x.shape)


def _row(x: np.ndarray, dtype: str) -> np.ndarray:
    """The row as weights of a type meet it."""
    return x[0] if dtype in FLOATS else quantised(x[0])


def _rms_factor(x: np.ndarray, eps: float) -> np.float32:
    mean = np.einsum("ri,ri->", x, x, dtype=np.float32) / np.float32(x.shape[-1])
    return np.float32(1) / np.sqrt(mean + np.float32(eps))


# ---- Constants ----------------------------------------------------------------------------------


def constants(target: Target, weights: Sequence[Weight], parts: int = 1) -> dict[str, int | str]:
    """The constants of a product with weights of one shape and layout."""
    n_out, n_in = tiles_of(weights[0]).n_out, weights[0].shape[-1]
    return {**tile_constants(weights[0]), "N_IN": n_in, "N_OUT": n_out,
            **shares(target, weights, parts)}


def qkv_constants(target: Target, q: Weight, k: Weight, v: Weight) -> dict[str, int | str]:
    """The constants of the three products: k and v may be stored in one other way than q.

    OTHER_BLOCKS of the blocks do what is stored so: as many as let both kinds end together.
    """
    same = [w for w in (q, k, v) if tile_constants(w) == tile_constants(q)]
    other = [w for w in (k, v) if tile_constants(w) != tile_constants(q)]
    share = shares(target, [q, k, v])
    most = most_blocks(target, share["TEAMS"] * share["SPLIT"])
    kinds = [(sum(tiles_of(w).n_groups for w in weights), tiles_of(weights[0]).row_bytes)
             for weights in (same, other) if weights]

    def slowest(n_blocks: int) -> int:
        """Bytes of a row that the busiest team reads, with so many blocks for the other kind."""
        return max(-(-groups // (share["TEAMS"] * n)) * n_bytes
                   for (groups, n_bytes), n in zip(kinds, (most - n_blocks, n_blocks), strict=True))

    blocks = min(range(1, most), key=slowest) if other else 0
    stored = tile_constants(other[0] if other else q)
    return {
        **tile_constants(q), **share, "N_IN": q.shape[-1], "OTHER_BLOCKS": blocks,
        **{f"OTHER_{name}": value for name, value in stored.items()},
        **{f"N_{name}": tiles_of(w).n_out for name, w in zip("QKV", (q, k, v), strict=True)},
        **{f"{name}_OTHER": int(w in other) for name, w in (("K", k), ("V", v))},
    }


def fuses(target: Target, q: Weight, k: Weight, v: Weight) -> bool:
    """Whether one launch can do all three."""
    stored = {tuple(tile_constants(w).values()) for w in (q, k, v)}
    as_floats = {type_of(w) in FLOATS for w in (q, k, v)}
    return (
        len(stored - {tuple(tile_constants(q).values())}) < 2
        and len(as_floats) == 1
        and fits(target, (q, k, v))
    )


# ---- Kernels ------------------------------------------------------------------------------------


def _geometry(target, weight: Weight, *rest, TEAMS: int, SPLIT: int, **_) -> Geometry:
    return place(target, weight, 1, TEAMS, SPLIT)


def _gated_geometry(target, hidden, norm, gate: Weight, *rest, TEAMS: int, SPLIT: int, **_
                    ) -> Geometry:
    return place(target, gate, 2, TEAMS, SPLIT)


def _qkv_geometry(target, hidden, norm, q: Weight, k: Weight, v: Weight, *rest, TEAMS: int,
                  SPLIT: int, OTHER_BLOCKS: int, K_OTHER: int, V_OTHER: int, **_) -> Geometry:
    same = [q] + [w for w, other in ((k, K_OTHER), (v, V_OTHER)) if not other]
    groups = sum(tiles_of(w).n_groups for w in same)
    blocks = min(-(-groups // TEAMS), most_blocks(target, TEAMS * SPLIT) - OTHER_BLOCKS)
    shared = row_bytes(q.shape[-1], type_of(q))
    return Geometry((blocks + OTHER_BLOCKS, 1, 1), 32 * TEAMS * SPLIT, shared)


def _shapes() -> Iterator[tuple[str, tuple[int, int], str]]:
    """Every type, with every size of a unit, odd numbers of rows and units, and many steps."""
    for dtype, packing in PACKINGS.items():
        if dtype in FLOATS:
            shapes = [(33, 96, "rows8"), (50, 640, "rows16"), (40, 4608, "rows16")]
        elif packing.weights == 256:
            shapes = [(50, 768, "rows8"), (33, 1280, "rows16"), (40, 9216, "rows16")]
        else:
            shapes = [(50, 32 * 18, "rows8"), (33, 32 * 20, "rows16"), (40, 32 * 9, "rows16"),
                      (16, 32 * 288, "rows16")]
        for n_out, n_in, rows in shapes:
            if dtype != "MXFP4" or n_in % 64 == 0:
                yield dtype, (n_out, n_in), rows
    yield "Q4_0", (40, 2304), "rows32"
    yield "Q8_0", (6001, 576), "rows8"  # more groups than teams
    yield "Q4_K", (16, 18944), "rows16"  # activations in two goes
    yield "IQ2_XS", (20, 512), "f16.rows16"


def _products(rng) -> Iterator[tuple[RawWeight, np.ndarray, dict]]:
    for dtype, shape, rows in _shapes():
        weight = random_weight(rng, dtype, shape, rows)
        x = rng.standard_normal((1, shape[1]), np.float32)
        yield weight, x, constants(TARGETS["sm_90a"], [weight])


def _norm_weight(rng, n: int) -> np.ndarray:
    return rng.uniform(0.5, 1.5, n).astype(np.float32)


def _example(rng):
    for weight, x, how in _products(rng):
        yield (weight, x, np.empty((1, weight.shape[0]), np.float32)), how


def _add_example(rng):
    for weight, x, how in _products(rng):
        hidden = rng.standard_normal((1, weight.shape[0]), np.float32)
        yield (weight, x, hidden), {**how, "ADD": 1}


def _norm_example(rng):
    for weight, x, how in _products(rng):
        out = np.empty((1, weight.shape[0]), np.float32)
        yield (weight, x, _norm_weight(rng, x.shape[1]), out, 1e-5), {**how, "NORM": 1}


def _gated_example(rng):
    for i, (gate, x, _) in enumerate(_products(rng)):
        up = random_weight(rng, gate.dtype, gate.shape, gate.layout)
        how = {**constants(TARGETS["sm_90a"], [gate, up], 2), "ACT": ("silu", "gelu")[i % 2]}
        norm = _norm_weight(rng, x.shape[1]) / np.float32(np.sqrt(x.shape[1]))
        yield (x, norm, gate, up, np.empty((1, gate.shape[0]), np.float32), 1e-5), how


def _qkv_inputs(rng):
    kinds = (
        ("Q4_K", "Q4_K", "Q4_K", 1280), ("Q4_K", "Q4_K", "Q6_K", 2048),
        ("Q5_0", "Q5_0", "Q8_0", 896), ("Q5_K", "Q8_0", "Q8_0", 256),
        ("Q4_1", "Q4_1", "Q4_1", 576), ("F16", "F16", "F16", 96),
        ("Q4_0", "Q6_K", "Q4_0", 512), ("BF16", "BF16", "F32", 64),
    )
    for *types, n_in in kinds:
        rows = layout(TARGETS["sm_90a"], types[0], (1, n_in))
        q, k, v = (random_weight(rng, dtype, (n_out, n_in), rows)
                   for dtype, n_out in zip(types, (100, 40, 24), strict=True))
        x = rng.standard_normal((1, n_in), np.float32)
        outs = tuple(np.empty((1, w.shape[0]), np.float32) for w in (q, k, v))
        yield (x, _norm_weight(rng, n_in), q, k, v), outs, qkv_constants(TARGETS["sm_90a"], q, k, v)


def _qkv_example(rng):
    for inputs, outs, how in _qkv_inputs(rng):
        yield (*inputs, *outs, 1e-5), how


def _qkv_bias_example(rng):
    for inputs, outs, how in _qkv_inputs(rng):
        biases = tuple(rng.standard_normal(out.shape[1], np.float32) for out in outs)
        yield (*inputs, *biases, *outs, 1e-5), {**how, "BIAS": 1}


@kernel("gemv.cu", geometry=_geometry, example=_example)
def gemv(weight: In, x: In, out: Out, *, TYPE: str, UNIT: int, RW: int, N_IN: int, N_OUT: int,
         TEAMS: int, SPLIT: int) -> None:
    """out = x @ weight.T. weight: (n_out, n_in); x: (1, n_in); out: (1, n_out)."""
    out[0] = weight @ _row(x, TYPE)


@kernel("gemv.cu", geometry=_geometry, example=_add_example)
def gemv_add(weight: In, x: In, hidden: InOut, *, TYPE: str, UNIT: int, RW: int, N_IN: int,
             N_OUT: int, TEAMS: int, SPLIT: int, ADD: int) -> None:
    """hidden += x @ weight.T, shapes as in `gemv`."""
    hidden[0] += weight @ _row(x, TYPE)


@kernel("gemv.cu", geometry=_geometry, example=_norm_example)
def gemv_norm(weight: In, hidden: In, norm: In, out: Out, eps: float, *, TYPE: str, UNIT: int,
              RW: int, N_IN: int, N_OUT: int, TEAMS: int, SPLIT: int, NORM: int) -> None:
    """out = norm(hidden) @ weight.T, an RMS norm with the weight `norm` (n_in,)."""
    out[0] = weight @ _row(hidden * norm, TYPE) * _rms_factor(hidden, eps)


@kernel("gemv.cu", geometry=_gated_geometry, example=_gated_example)
def gemv_norm_gated(hidden: In, ffn_norm: In, ffn_gate: In, ffn_up: In, out: Out, eps: float, *,
                    TYPE: str, UNIT: int, RW: int, N_IN: int, N_OUT: int, TEAMS: int, SPLIT: int,
                    ACT: str) -> None:
    """out = act(x @ ffn_gate.T) * (x @ ffn_up.T) with x = norm(hidden). out: (1, n_ff)."""
    row, factor = _row(hidden * ffn_norm, TYPE), _rms_factor(hidden, eps)
    out[0] = ACTIVATIONS[ACT](ffn_gate @ row * factor) * (ffn_up @ row * factor)


@kernel("gemv.cu", geometry=_qkv_geometry, example=_qkv_bias_example)
def gemv_norm_qkv_bias(hidden: In, attn_norm: In, attn_q: In, attn_k: In, attn_v: In, q_bias: In,
                       k_bias: In, v_bias: In, q: Out, k: Out, v: Out, eps: float, *, TYPE: str,
                       UNIT: int, RW: int, N_IN: int, TEAMS: int, SPLIT: int, OTHER_TYPE: str,
                       OTHER_UNIT: int, OTHER_RW: int, OTHER_BLOCKS: int, N_Q: int, N_K: int,
                       N_V: int, K_OTHER: int, V_OTHER: int, BIAS: int) -> None:
    """q, k, v = norm(hidden) @ their weights.T + their biases, each (1, its heads * head_dim)."""
    row, factor = _row(hidden * attn_norm, TYPE), _rms_factor(hidden, eps)
    for out, weight, bias in ((q, attn_q, q_bias), (k, attn_k, k_bias), (v, attn_v, v_bias)):
        out[0] = weight @ row * factor + bias


@kernel("gemv.cu", geometry=_qkv_geometry, example=_qkv_example)
def gemv_norm_qkv(hidden: In, attn_norm: In, attn_q: In, attn_k: In, attn_v: In, q: Out, k: Out,
                  v: Out, eps: float, *, TYPE: str, UNIT: int, RW: int, N_IN: int, TEAMS: int,
                  SPLIT: int, OTHER_TYPE: str, OTHER_UNIT: int, OTHER_RW: int, OTHER_BLOCKS: int,
                  N_Q: int, N_K: int, N_V: int, K_OTHER: int, V_OTHER: int) -> None:
    """As `gemv_norm_qkv_bias`, without biases."""
    row, factor = _row(hidden * attn_norm, TYPE), _rms_factor(hidden, eps)
    for out, weight in ((q, attn_q), (k, attn_k), (v, attn_v)):
        out[0] = weight @ row * factor
