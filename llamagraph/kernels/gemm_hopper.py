"""Products of many rows with a weight on sm_90a: warp groups of 64 outputs, weights from registers.

A block has 128 outputs and up to 256 rows; it stays on its multiprocessor and does one tile after
the other, while a warp copies the next stored tiles of the weight and another the next rows.
Weights are unpacked to F16 on their way into registers, scales rounded to F16 too; rows come in
panels (`panels.py`). Sums are F32, in an order that depends on nothing. Knows no layer; `linear.py`
decides what comes here.
"""

from collections.abc import Sequence

import numpy as np

from llamagraph.kernels.activations import ACTIVATIONS
from llamagraph.kernels.examples import random_weight
from llamagraph.kernels.layouts import Weight, tile_constants, type_of
from llamagraph.kernels.panels import COLUMNS, from_panels, in_panels
from llamagraph.kernels.warp_groups import (
    ARCH,
    TILE_OUT,
    Plan,
    Stages,
    n_clusters,
    plan,
    shared_bytes,
    weight_bytes,
)
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
from llamagraph.program.tape import Tape
from llamagraph.program.target import Target


def _place(target: Target, weights: Sequence[Buffer], rows: int, outputs: int, *, TILE_ROWS: int,
           SPLIT: int, BLOCKS: int, ROW_STAGES: int, WEIGHT_STAGES: int, **_) -> Geometry:
    """Clusters for the tiles of `outputs` outputs of each weight, or as many as run at once."""
    tiles = -(-rows // TILE_ROWS) * sum(-(-w.shape[0] // outputs) for w in weights)
    shared = shared_bytes(weight_bytes(weights), TILE_ROWS, Stages(ROW_STAGES, WEIGHT_STAGES))
    clusters = min(tiles, n_clusters(target, BLOCKS, SPLIT))
    return Geometry((clusters * SPLIT, 1, 1), 384, shared)


def _geometry(target, weight: Buffer, x, n_rows, out, n_in, n_out, rows: int, **how) -> Geometry:
    return _place(target, [weight], rows, TILE_OUT, **how)


def _gated_geometry(target, gate: Buffer, up, x, n_rows, out, n_in, n_out, rows: int, **how
                    ) -> Geometry:
    return _place(target, [gate], rows, TILE_OUT // 2, **how)


def _qkv_geometry(target, q: Buffer, k: Buffer, v: Buffer, *rest, **how) -> Geometry:
    return _place(target, [q, k, v], rest[-1], TILE_OUT, **how)


def _cost(work: Work, weight: Buffer, x, n_rows, out, n_in: int, n_out: int, rows: int,
          **_) -> Traffic:
    n = min(work.n_rows, rows)
    return Traffic(weight.n_bytes + 2 * n * n_in, 4 * n * n_out)


def _gated_cost(work: Work, gate: Buffer, up: Buffer, x, n_rows, out, n_in: int, n_out: int,
                rows: int, **_) -> Traffic:
    n = min(work.n_rows, rows)
    return Traffic(gate.n_bytes + up.n_bytes + 2 * n * n_in, 2 * n * n_out)


def _qkv_cost(work: Work, q: Buffer, k: Buffer, v: Buffer, *rest, **_) -> Traffic:
    n_in, *outputs, rows = rest[-5:]
    n = min(work.n_rows, rows)
    return Traffic(q.n_bytes + k.n_bytes + v.n_bytes + 2 * n * n_in, 4 * n * sum(outputs))


def _flops(work: Work, weight: Buffer, *rest, **_) -> int:
    return product_flops(min(work.n_rows, rest[-1]), weight)


def _gated_flops(work: Work, gate: Buffer, up: Buffer, *rest, **_) -> int:
    return product_flops(min(work.n_rows, rest[-1]), gate, up)


def _qkv_flops(work: Work, q: Buffer, k: Buffer, v: Buffer, *rest, **_) -> int:
    return product_flops(min(work.n_rows, rest[-1]), q, k, v)


_EXAMPLES = (  # type, layout, outputs, columns, rows, true rows
    ("Q4_K", "rows16", 128, 512, 8, 8, Plan(8, 2, Stages(2, 2), 2)),
    ("Q4_K", "rows16", 300, 1280, 512, 300, Plan(256, 1, Stages(3, 2))),
    ("Q4_K", "rows8", 77, 1024, 128, 100, Plan(64, 1, Stages(4, 2))),
    ("Q4_K", "rows32", 256, 768, 256, 256, Plan(128, 1, Stages(5, 3))),
    ("Q4_K", "rows16", 4480, 1024, 512, 330, Plan(256, 2, Stages(3, 2))),  # two tiles a cluster
    ("Q5_K", "rows16", 130, 1536, 32, 21, Plan(32, 4, Stages(4, 2), 2)),
    ("Q6_K", "rows16", 257, 1280, 512, 511, Plan(256, 1, Stages(3, 2))),
    ("Q6_K", "rows8", 64, 512, 16, 9, Plan(16, 2, Stages(4, 2), 1)),
    ("Q8_0", "rows16", 160, 1664, 256, 129, Plan(128, 4, Stages(4, 2))),
    ("Q8_0", "rows16", 100, 1664, 520, 519, Plan(256, 1, Stages(3, 2))),
    ("Q8_0", "rows8", 200, 576, 128, 128, Plan(128, 1, Stages(4, 2))),
    ("Q4_0", "rows16", 96, 2816, 64, 33, Plan(64, 1, Stages(4, 2))),
    ("Q4_1", "rows16", 129, 1088, 64, 64, Plan(64, 8, Stages(4, 2))),
    ("Q5_0", "rows8", 140, 896, 128, 70, Plan(128, 1, Stages(4, 2))),
    ("Q5_0", "rows16", 140, 1344, 256, 250, Plan(256, 2, Stages(3, 2))),
    ("Q5_1", "rows16", 100, 2048, 32, 32, Plan(32, 1, Stages(3, 2), 2)),
    ("F16", "rows16", 333, 1216, 256, 127, Plan(128, 2, Stages(4, 2))),
    ("F16", "rows8", 128, 960, 512, 512, Plan(256, 1, Stages(2, 2))),
    ("BF16", "rows16", 128, 1152, 128, 33, Plan(128, 1, Stages(4, 2))),
    ("IQ2_XS", "f16.rows16", 190, 1280, 64, 50, Plan(64, 1, Stages(4, 2))),
)


def _rows_example(rng, n_in: int, rows: int, n_rows: int):
    x = in_panels(rng.standard_normal((rows, n_in), np.float32))
    x[:, n_rows:] = np.nan
    return x, np.array([n_rows], np.int32)


def _example(rng):
    for dtype, layout, n_out, n_in, rows, n_rows, how in _EXAMPLES:
        weight = random_weight(rng, dtype, (n_out, n_in), layout)
        out = np.zeros((rows, n_out), np.float32)
        yield ((weight, *_rows_example(rng, n_in, rows, n_rows), out, n_in, n_out, rows),
               tile_constants(weight) | how.constants)


def _add_example(rng):
    for (weight, x, n_rows, out, *sizes), constants in _example(rng):
        hidden = rng.standard_normal(out.shape, np.float32)
        yield (weight, x, n_rows, hidden, *sizes), {**constants, "ADD": 1}


def _gated_example(rng):
    for i, ((weight, x, n_rows, out, *sizes), constants) in enumerate(_example(rng)):
        n_out = len(out.T) // COLUMNS * COLUMNS + COLUMNS
        gate, up = (random_weight(rng, weight.dtype, (n_out, sizes[0]), weight.layout)
                    for _ in range(2))
        x[:] /= 16  # sums of the size that activations have
        panels = np.empty((n_out // COLUMNS, len(out), COLUMNS), np.float16)
        yield ((gate, up, x, n_rows, panels, sizes[0], n_out, sizes[2]),
               {**constants, "ACT": ("silu", "gelu")[i % 2]})


_QKV_EXAMPLES = (  # type of q and k, of v, layout, outputs, columns, rows, true rows
    ("Q4_K", "Q6_K", "rows16", (256, 64, 64), 1280, 256, 200, Plan(128, 1, Stages(3, 2))),
    ("Q4_K", "Q4_K", "rows16", (300, 130, 129), 2048, 512, 512, Plan(256, 1, Stages(3, 2))),
    ("Q5_0", "Q8_0", "rows8", (192, 64, 64), 896, 64, 33, Plan(32, 2, Stages(3, 2))),
    ("F16", "F16", "rows16", (128, 128, 256), 1216, 32, 32, Plan(16, 4, Stages(3, 2), 2)),
)


def _qkv_example(rng):
    for dtype, v_dtype, layout, outputs, n_in, rows, n_rows, how in _QKV_EXAMPLES:
        weights = [random_weight(rng, t, (n, n_in), layout)
                   for t, n in zip((dtype, dtype, v_dtype), outputs, strict=True)]
        outs = (np.zeros((rows, n), np.float32) for n in outputs)
        yield ((*weights, *_rows_example(rng, n_in, rows, n_rows), *outs, n_in, *outputs, rows),
               _qkv_constants(weights) | how.constants)


def _product(weight: np.ndarray, x: np.ndarray, n: int) -> np.ndarray:
    return from_panels(x[:, :n]) @ weight.astype(np.float16).astype(np.float32).T


@kernel("gemm_hopper.cu", geometry=_geometry, cost=_cost, flops=_flops, example=_example,
        arch=ARCH)
def hopper_rows(weight: In, x: In, n_rows: In, out: Out, n_in: int, n_out: int, rows: int, *,
                TYPE: str, UNIT: int, RW: int, TILE_ROWS: int, SPLIT: int,
                BLOCKS: int, ROW_STAGES: int, WEIGHT_STAGES: int) -> None:
    """out = x @ weight.T. weight: (n_out, n_in) in tiles; x: F16 (n_in / 64, rows, 64) in panels;
    out: (rows, n_out)."""
    n = n_rows[0]
    out[:n] = _product(weight, x, n)


@kernel("gemm_hopper.cu", geometry=_geometry, cost=_cost, flops=_flops, example=_add_example,
        arch=ARCH)
def hopper_add(weight: In, x: In, n_rows: In, hidden: InOut, n_in: int, n_out: int, rows: int, *,
               TYPE: str, UNIT: int, RW: int, TILE_ROWS: int, SPLIT: int, BLOCKS: int,
               ROW_STAGES: int, WEIGHT_STAGES: int, ADD: int) -> None:
    """hidden += x @ weight.T, shapes as in `hopper_rows`."""
    n = n_rows[0]
    hidden[:n] += _product(weight, x, n)


@kernel("gemm_hopper.cu", geometry=_gated_geometry, cost=_gated_cost, flops=_gated_flops,
        example=_gated_example, arch=ARCH)
def hopper_gated(ffn_gate: In, ffn_up: In, x: In, n_rows: In, out: Out, n_in: int, n_out: int,
                 rows: int, *, TYPE: str, UNIT: int, RW: int, TILE_ROWS: int, SPLIT: int,
                 BLOCKS: int, ROW_STAGES: int, WEIGHT_STAGES: int, ACT: str) -> None:
    """out = act(x @ ffn_gate.T) * (x @ ffn_up.T), in panels: F16 (n_out / 64, rows, 64)."""
    n = n_rows[0]
    out[:, :n] = in_panels(ACTIVATIONS[ACT](_product(ffn_gate, x, n)) * _product(ffn_up, x, n))


@kernel("gemm_hopper.cu", geometry=_qkv_geometry, cost=_qkv_cost, flops=_qkv_flops,
        example=_qkv_example, arch=ARCH)
def hopper_qkv(attn_q: In, attn_k: In, attn_v: In, x: In, n_rows: In, q: Out, k: Out, v: Out,
               n_in: int, n_q: int, n_k: int, n_v: int, rows: int, *, TYPE: str, UNIT: int,
               RW: int, V_TYPE: str, V_UNIT: int, V_RW: int, TILE_ROWS: int, SPLIT: int,
               BLOCKS: int, ROW_STAGES: int, WEIGHT_STAGES: int) -> None:
    """q, k, v = x @ their weights.T, each (rows, its heads * head_dim)."""
    n = n_rows[0]
    for out, weight in ((q, attn_q), (k, attn_k), (v, attn_v)):
        out[:n] = _product(weight, x, n)


# ---- Launches -----------------------------------------------------------------------------------


def _planned(tape: Tape, weights: Sequence[Buffer], rows: int) -> Plan:
    facts = tuple((w.dtype, w.shape, w.layout) for w in weights)
    return tape.once((plan, rows, facts), lambda: plan(tape.target, weights, rows))


def gemm_hopper(tape: Tape, weight: Buffer, x: Buffer, n_rows: Buffer, out: Buffer, label: str, *,
                add: bool = False) -> None:
    """out = x @ weight.T for rows in panels, or with `add` out += x @ weight.T."""
    rows, (n_out, n_in) = x.shape[1], weight.shape
    how = _planned(tape, [weight], rows)
    constants = tile_constants(weight) | how.constants
    chosen = hopper_add(**constants, ADD=1) if add else hopper_rows(**constants)
    tape.launch(chosen, weight, x, n_rows, out, n_in, n_out, rows, label=label,
                variant=f"{type_of(weight)} {how.variant}", reason=how.reason)


def gated(tape: Tape, gate: Buffer, up: Buffer, x: Buffer, out: Buffer, act: str) -> None:
    """out = act(x @ gate.T) * (x @ up.T), x and out in panels."""
    rows, (n_out, n_in) = x.shape[1], gate.shape
    how = _planned(tape, [gate, up], rows)
    constants = tile_constants(gate) | how.constants
    tape.launch(hopper_gated(**constants, ACT=act), gate, up, x, tape.io["n_rows"], out, n_in,
                n_out, rows, label="ffn_gate_up",
                variant=f"{type_of(gate)} {how.variant} {act}",
                reason=f"gate, up and act in a launch; {how.reason}")


def _qkv_constants(weights: Sequence[Weight]) -> dict[str, int | str]:
    q, _, v = weights
    return tile_constants(q) | {f"V_{name}": n for name, n in tile_constants(v).items()}


def three(tape: Tape, weights: Sequence[Buffer], x: Buffer, outs: Sequence[Buffer], label: str
          ) -> None:
    """The products of x in panels with q, k and v; q and k are stored alike."""
    rows, n_in = x.shape[1], weights[0].shape[1]
    how = _planned(tape, weights, rows)
    constants = _qkv_constants(weights) | how.constants
    types = dict.fromkeys(map(type_of, weights))
    tape.launch(hopper_qkv(**constants), *weights, x, tape.io["n_rows"], *outs, n_in,
                *(w.shape[0] for w in weights), rows, label=label,
                variant=f"{' '.join(types)} {how.variant}",
                reason=f"three products in a launch; {how.reason}")
