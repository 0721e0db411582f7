"""Products of few rows with a weight on tensor cores: warps of 16 outputs, weights from registers.

Weights are the cost here: each is read once, as early and as many at once as shared memory holds,
and unpacked once for all rows. Rows come in panels (`panels.py`). Weights become F16 and their
scales are rounded to F16 too; but with eight rows Q4_K and Q6_K stay integers, their scales meet
the sums in F32, and Q4_K's minima meet means that are rounded to F16. Sums are F32 in an order that
depends on nothing: of a warp's columns, then of a block's warps, then of a cluster's blocks. Knows
no layer; `linear.py` decides what comes here.
"""

from collections.abc import Sequence

import numpy as np

from llamagraph.kernels.activations import ACTIVATIONS
from llamagraph.kernels.examples import random_weight
from llamagraph.kernels.layouts import Weight, tile_constants
from llamagraph.kernels.panels import COLUMNS, from_panels, halves, in_panels
from llamagraph.kernels.warp_plans import EIGHT, Plan, shared_bytes
from llamagraph.program.launch import (
    Buffer,
    Geometry,
    In,
    InOut,
    Out,
    Traffic,
    Work,
    kernel,
    product_flops,
)
from llamagraph.program.target import Target


def _place(weights: Sequence[Buffer], parts: int, *, TILE_ROWS: int, TEAMS: int, SPLIT: int,
           BLOCKS: int, STAGES: int, GROUPS: int, **_) -> Geometry:
    how = Plan(TILE_ROWS, TEAMS, SPLIT, BLOCKS, STAGES, GROUPS)
    blocks = sum(-(-w.shape[0] // how.outputs) for w in weights)
    return Geometry((blocks * BLOCKS, 1, 1), 32 * how.warps, shared_bytes(weights, how, parts))


def _geometry(target: Target, weight: Buffer, *rest, **how) -> Geometry:
    return _place([weight], 1, **how)


def _gated_geometry(target: Target, gate: Buffer, *rest, **how) -> Geometry:
    return _place([gate], 2, **how)


def _qkv_geometry(target: Target, q: Buffer, k: Buffer, v: Buffer, *rest, **how) -> Geometry:
    return _place([q, k, v], 1, **how)


def _traffic(work: Work, weights: Sequence[Buffer], x: Buffer, outs: Sequence[Buffer],
             rows: int) -> Traffic:
    n = min(work.n_rows, rows)
    return Traffic(sum(w.n_bytes for w in weights) + n * x.n_bytes // rows,
                   n * sum(out.n_bytes for out in outs) // rows)


def _cost(work: Work, weight: Buffer, x: Buffer, n_rows, out: Buffer, *rest, TILE_ROWS: int, **_
          ) -> Traffic:
    return _traffic(work, [weight], x, [out], TILE_ROWS)


def _gated_cost(work: Work, gate: Buffer, up: Buffer, x: Buffer, n_rows, out: Buffer, *rest,
                TILE_ROWS: int, **_) -> Traffic:
    return _traffic(work, [gate, up], x, [out], TILE_ROWS)


def _qkv_cost(work: Work, attn_q: Buffer, attn_k: Buffer, attn_v: Buffer, x: Buffer, n_rows,
              q: Buffer, k: Buffer, v: Buffer, *rest, TILE_ROWS: int, **_) -> Traffic:
    return _traffic(work, [attn_q, attn_k, attn_v], x, [q, k, v], TILE_ROWS)


def _flops(work: Work, weight: Buffer, *rest, TILE_ROWS: int, **_) -> int:
    return product_flops(min(work.n_rows, TILE_ROWS), weight)


def _gated_flops(work: Work, gate: Buffer, up: Buffer, *rest, TILE_ROWS: int, **_) -> int:
    return product_flops(min(work.n_rows, TILE_ROWS), gate, up)


def _qkv_flops(work: Work, q: Buffer, k: Buffer, v: Buffer, *rest, TILE_ROWS: int, **_) -> int:
    return product_flops(min(work.n_rows, TILE_ROWS), q, k, v)


_EXAMPLES = (  # type, layout, outputs, columns, rows, true rows
    ("Q4_K", "rows16", 128, 512, 8, 8, Plan(8, 1, 2, 1, 1)),
    ("Q4_K", "rows16", 300, 1280, 8, 5, Plan(8, 2, 4, 1, 2, 3)),
    ("Q4_K", "rows8", 77, 1024, 32, 21, Plan(32, 3, 1, 1, 3)),
    ("Q5_K", "rows16", 130, 1536, 32, 32, Plan(32, 1, 2, 1, 3)),
    ("Q6_K", "rows16", 257, 2304, 8, 8, Plan(8, 4, 3, 1, 2)),
    ("Q6_K", "rows8", 64, 512, 32, 9, Plan(32, 2, 2, 1, 1)),
    ("Q8_0", "rows16", 160, 1664, 32, 29, Plan(32, 2, 5, 1, 2)),
    ("Q8_0", "rows8", 200, 576, 8, 2, Plan(8, 3, 4, 1, 2, 2)),
    ("Q4_0", "rows16", 96, 2816, 8, 3, Plan(8, 1, 4, 1, 3, 2)),
    ("Q4_1", "rows16", 129, 1088, 32, 32, Plan(32, 2, 6, 1, 3)),
    ("Q5_0", "rows8", 140, 896, 8, 7, Plan(8, 2, 3, 1, 3)),
    ("Q5_1", "rows16", 100, 2048, 32, 32, Plan(32, 2, 4, 1, 2)),
    ("Q5_K", "rows16", 192, 2048, 8, 6, Plan(8, 1, 5, 1, 2, 4)),
    ("Q6_K", "rows8", 192, 1536, 8, 4, Plan(8, 2, 2, 1, 4, 3)),
    ("F16", "rows16", 333, 1216, 32, 30, Plan(32, 4, 3, 1, 3)),
    ("F16", "rows16", 64, 1280, 8, 8, Plan(8, 1, 5, 1, 2, 2)),
    ("BF16", "rows16", 128, 1152, 16, 13, Plan(16, 2, 8, 1, 2)),
    ("IQ2_XS", "f16.rows16", 190, 1280, 8, 8, Plan(8, 3, 5, 1, 2)),
    ("Q4_K", "rows16", 144, 1536, 16, 9, Plan(16, 2, 3, 1, 2)),
)


def _rows_example(rng, n_in: int, rows: int, n_rows: int):
    x = rng.standard_normal((rows, n_in), np.float32)
    if rows == EIGHT:  # one sign in 16 columns: what is taken out of the weights does not cancel
        x = np.abs(x) * np.repeat(rng.choice([-1, 1], (rows, n_in // 16)), 16, axis=1)
    x = in_panels(x.astype(np.float32))
    x[:, n_rows:] = np.nan
    return x, np.array([n_rows], np.int32)


def constants_of(weight: Weight, how: Plan) -> dict[str, int | str]:
    return tile_constants(weight) | how.constants | {"N_IN": weight.shape[-1]}


def _example(rng):
    for dtype, layout, n_out, n_in, rows, n_rows, how in _EXAMPLES:
        weight = random_weight(rng, dtype, (n_out, n_in), layout)
        out = np.zeros((rows, n_out), np.float32)
        yield ((weight, *_rows_example(rng, n_in, rows, n_rows), out, n_out),
               constants_of(weight, how))


def _add_example(rng):
    for (*args, out, n_out), constants in _example(rng):
        yield (*args, rng.standard_normal(out.shape, np.float32), n_out), constants | {"ADD": 1}


def _gated_example(rng):
    for i, ((gate, x, n_rows, _, n_out), constants) in enumerate(_example(rng)):
        if n_out % COLUMNS == 0:
            up = random_weight(rng, gate.dtype, gate.shape, gate.layout)
            out = np.empty((n_out // COLUMNS, x.shape[1], COLUMNS), np.float16)
            yield ((gate, up, x / np.float16(16), n_rows, out, n_out),
                   constants | {"ACT": ("silu", "gelu")[i % 2]})


def qkv_constants(weights: Sequence[Weight], how: Plan) -> dict[str, int | str]:
    q, _, v = weights
    return constants_of(q, how) | {f"V_{name}": n for name, n in tile_constants(v).items()}


_QKV_EXAMPLES = (  # type of q and k, of v, layout, outputs, columns, rows, true rows
    ("Q4_K", "Q6_K", "rows16", (256, 64, 64), 1280, 8, 8, Plan(8, 3, 4, 1, 2)),
    ("Q4_K", "Q4_K", "rows16", (300, 130, 129), 2048, 32, 20, Plan(32, 2, 4, 1, 2)),
    ("Q4_K", "Q6_K", "rows16", (72, 30, 31), 4096, 8, 5, Plan(8, 1, 12, 1, 3, 3)),
    ("Q4_K", "Q6_K", "rows16", (256, 64, 64), 1280, 16, 14, Plan(16, 3, 4, 1, 2)),
    ("Q5_0", "Q8_0", "rows8", (192, 64, 64), 896, 32, 32, Plan(32, 1, 7, 1, 1)),
    ("Q8_0", "Q8_0", "rows8", (192, 64, 64), 576, 8, 3, Plan(8, 2, 2, 1, 2)),
    ("F16", "F16", "rows16", (128, 128, 256), 1216, 8, 7, Plan(8, 4, 2, 1, 2, 2)),
)


def _qkv_example(rng):
    for dtype, v_dtype, layout, outputs, n_in, rows, n_rows, how in _QKV_EXAMPLES:
        weights = [random_weight(rng, t, (n, n_in), layout)
                   for t, n in zip((dtype, dtype, v_dtype), outputs, strict=True)]
        outs = (np.zeros((rows, n), np.float32) for n in outputs)
        yield ((*weights, *_rows_example(rng, n_in, rows, n_rows), *outs, *outputs),
               qkv_constants(weights, how))


def _product(weight: np.ndarray, x: np.ndarray, n: int) -> np.ndarray:
    return from_panels(x[:, :n]) @ halves(weight).astype(np.float32).T


@kernel("gemm_warps.cu", geometry=_geometry, cost=_cost, flops=_flops, example=_example)
def warps_rows(weight: In, x: In, n_rows: In, out: Out, n_out: int, *, TYPE: str, UNIT: int,
               RW: int, N_IN: int, TILE_ROWS: int, TEAMS: int, SPLIT: int, BLOCKS: int,
               STAGES: int, GROUPS: int) -> None:
    """out = x @ weight.T. weight: (n_out, n_in) in tiles; x: F16 (n_in / 64, rows, 64) in panels;
    out: (rows, n_out)."""
    n = n_rows[0]
    out[:n] = _product(weight, x, n)


@kernel("gemm_warps.cu", geometry=_geometry, cost=_cost, flops=_flops, example=_add_example)
def warps_add(weight: In, x: In, n_rows: In, hidden: InOut, n_out: int, *, TYPE: str, UNIT: int,
              RW: int, N_IN: int, TILE_ROWS: int, TEAMS: int, SPLIT: int, BLOCKS: int,
              STAGES: int, GROUPS: int, ADD: int) -> None:
    """hidden += x @ weight.T, shapes as in `warps_rows`."""
    n = n_rows[0]
    hidden[:n] += _product(weight, x, n)


@kernel("gemm_warps.cu", geometry=_gated_geometry, cost=_gated_cost, flops=_gated_flops,
        example=_gated_example)
def warps_gated(ffn_gate: In, ffn_up: In, x: In, n_rows: In, out: Out, n_out: int, *, TYPE: str,
                UNIT: int, RW: int, N_IN: int, TILE_ROWS: int, TEAMS: int, SPLIT: int,
                BLOCKS: int, STAGES: int, GROUPS: int, ACT: str) -> None:
    """out = act(x @ ffn_gate.T) * (x @ ffn_up.T), in panels: F16 (n_out / 64, rows, 64)."""
    n = n_rows[0]
    out[:, :n] = in_panels(ACTIVATIONS[ACT](_product(ffn_gate, x, n)) * _product(ffn_up, x, n))


@kernel("gemm_warps.cu", geometry=_qkv_geometry, cost=_qkv_cost, flops=_qkv_flops,
        example=_qkv_example)
def warps_qkv(attn_q: In, attn_k: In, attn_v: In, x: In, n_rows: In, q: Out, k: Out, v: Out,
              n_q: int, n_k: int, n_v: int, *, TYPE: str, UNIT: int, RW: int, V_TYPE: str,
              V_UNIT: int, V_RW: int, N_IN: int, TILE_ROWS: int, TEAMS: int, SPLIT: int,
              BLOCKS: int, STAGES: int, GROUPS: int) -> None:
    """q, k, v = x @ their weights.T, each (rows, its heads * head_dim)."""
    n = n_rows[0]
    for out, weight in ((q, attn_q), (k, attn_k), (v, attn_v)):
        out[:n] = _product(weight, x, n)
