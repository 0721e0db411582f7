"""Matrix products with a weight, for one row or many, alone or fused with what surrounds them.

numpy has a product and a sum, which have no entry in `csrc/`. On a GPU one row goes through the
kernels of `gemv.py`, which take in the norm before and the addition behind, many rows through
those of `panel_products.py`, or `gemm.py` where that has none.
"""

import numpy as np

from llamagraph.kernels.gemm import gemm
from llamagraph.kernels.gemv import (
    constants,
    fuses,
    gemv,
    gemv_add,
    gemv_norm,
    gemv_norm_qkv,
    gemv_norm_qkv_bias,
    qkv_constants,
)
from llamagraph.kernels.layouts import conversion, shared_layout, type_of
from llamagraph.kernels.lora import add_low_rank
from llamagraph.kernels.norm import norm, norm_panels
from llamagraph.kernels.panel_products import multiply, takes, three
from llamagraph.kernels.panels import pack, rows_of
from llamagraph.kernels.shares import fits
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
from llamagraph.program.weights import Weights


def _product(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """x @ weight.T; a single row goes through the faster matrix-vector product."""
    return (weight @ x[0])[None] if len(x) == 1 else x @ weight.T


def _geometry(target, weight: Buffer, x: Buffer, n_rows, out: Buffer) -> Geometry:
    return Geometry((-(-weight.shape[0] // 8), x.shape[0], 1), 256)


def _cost(work: Work, weight: Buffer, x: Buffer, n_rows, out: Buffer) -> Traffic:
    n = min(work.n_rows, x.shape[0])
    return Traffic(weight.n_bytes + n * x.shape[1] * 4, n * weight.shape[0] * 4)


def _flops(work: Work, weight: Buffer, x: Buffer, *rest) -> int:
    return product_flops(min(work.n_rows, x.shape[0]), weight)


def _bias_geometry(target, bias: Buffer, n_rows, out: Buffer, *, WIDTH: int) -> Geometry:
    return Geometry((out.shape[0], 1, 1), 256)


def _bias_example(rng):
    for rows, n_rows, width in ((1, 1, 48), (2, 2, 33), (8, 7, 1028), (64, 33, 96), (512, 512, 5)):
        out = rng.standard_normal((rows, width), np.float32)
        bias = rng.standard_normal(width, np.float32)
        yield (bias, np.array([n_rows], np.int32), out), {"WIDTH": width}


@kernel("", geometry=_geometry, cost=_cost, flops=_flops)
def linear_rows(weight: In, x: In, n_rows: In, out: Out) -> None:
    """out = x @ weight.T. weight: (n_out, n_in); x: (rows, n_in); out: (rows, n_out)."""
    n = n_rows[0]
    out[:n] = _product(weight, x[:n])


@kernel("", geometry=_geometry, cost=_cost, flops=_flops)
def linear_add(weight: In, x: In, n_rows: In, hidden: InOut) -> None:
    """hidden += x @ weight.T, shapes as in `linear_rows`."""
    n = n_rows[0]
    hidden[:n] += _product(weight, x[:n])


@kernel("linear.cu", geometry=_bias_geometry, example=_bias_example)
def add_bias(bias: In, n_rows: In, out: InOut, *, WIDTH: int) -> None:
    """out += bias. bias: (n_out,); out: (rows, n_out)."""
    out[: n_rows[0]] += bias


def one_row(tape: Tape, x: Buffer, *weights: Buffer) -> bool:
    """Whether a GPU multiplies x (1, n_in) with the weights by the kernels for one row."""
    return tape.target.is_cuda and rows_of(x) == 1 and fits(tape.target, weights)


def met(*parts: Weights) -> list[Buffer]:
    """All matrices that a row meets in products with these weights: theirs and the adapters'."""
    return [p.weight for p in parts] + [change.a for p in parts for change in p.adapters]


def from_panels(tape: Tape, rows: int, *weights: Buffer) -> bool:
    """Whether so many rows meet the weights in panels."""
    return all(takes(tape.target, w, rows) for w in weights)


def normed(tape: Tape, hidden: Buffer, w: Weights, eps: float, *weights: Buffer) -> Buffer:
    """norm(hidden) for products with the weights: in panels if all of them take those."""
    in_panels = from_panels(tape, hidden.shape[0], *weights)
    return (norm_panels if in_panels else norm)(tape, hidden, w, eps)


def _multiply(tape: Tape, weight: Buffer, x: Buffer, n_rows: Buffer, out: Buffer, label: str,
              add: bool) -> None:
    """out = x @ weight.T, or out += it. x: rows of floats, or panels if the weight takes them."""
    if not tape.target.is_cuda:
        tape.launch(linear_add if add else linear_rows, weight, x, n_rows, out, label=label,
                    variant=weight.dtype, reason="one kernel for every type")
    elif one_row(tape, x, weight):
        how = constants(tape.target, [weight])
        chosen = gemv_add(**how, ADD=1) if add else gemv(**how)
        tape.launch(chosen, weight, x, out, label=label, variant=type_of(weight),
                    reason=reason("one row", weight))
    elif from_panels(tape, rows_of(x), weight):
        x = x if x.dtype == "F16" else pack(tape, x, n_rows, label)
        multiply(tape, weight, x, n_rows, out, label, add=add)
    else:
        gemm(tape, weight, x, n_rows, out, label, add=add)


def reason(why: str, *weights: Buffer) -> str:
    """A launch's reason, with what was converted for it."""
    return "; ".join([why, *dict.fromkeys(filter(None, map(conversion, weights)))])


def _bias(tape: Tape, w: Weights, n_rows: Buffer, out: Buffer) -> None:
    if w.bias is not None:
        tape.launch(add_bias(WIDTH=out.shape[1]), w.bias, n_rows, out, label=f"{_label(w)}.bias")


def _label(w: Weights) -> str:
    return w.name.rpartition(".")[2]


def _adapt(tape: Tape, x: Buffer, w: Weights, n_rows: Buffer, out: Buffer,
           norm_w: Weights | None = None, eps: float = 0.0) -> None:
    """Adds to out = x @ w.T what adapters make of x, or of norm(x) where it is one row."""
    for change in w.adapters:
        label = f"{_label(w)}.{change.label}_a"
        product = tape.scratch(label, rows_of(x), change.a.shape[0])
        if norm_w is None:
            _multiply(tape, change.a, x, n_rows, product, label, add=False)
        else:
            _multiply_normed(tape, change.a, x, norm_w, product, eps, label)
        add_low_rank(tape, product, change, n_rows, out, _label(w))


def linear(tape: Tape, x: Buffer, w: Weights, n_rows: Buffer | None = None) -> Buffer:
    """x @ w.T (+ bias) for every row: (rows, n_out)."""
    n_rows = n_rows or tape.io["n_rows"]
    out = tape.scratch(_label(w), rows_of(x), w.weight.shape[0])
    _multiply(tape, w.weight, x, n_rows, out, _label(w), add=False)
    _adapt(tape, x, w, n_rows, out)
    _bias(tape, w, n_rows, out)
    return out


def linear_residual(tape: Tape, x: Buffer, w: Weights, hidden: Buffer) -> None:
    """hidden += x @ w.T (+ bias)."""
    _multiply(tape, w.weight, x, tape.io["n_rows"], hidden, _label(w), add=True)
    _adapt(tape, x, w, tape.io["n_rows"], hidden)
    _bias(tape, w, tape.io["n_rows"], hidden)


def norm_linear(tape: Tape, hidden: Buffer, norm_w: Weights, w: Weights, eps: float) -> Buffer:
    """norm(hidden) @ w.T (+ bias) for every row: (rows, n_out)."""
    if not one_row(tape, hidden, *met(w)):
        return linear(tape, normed(tape, hidden, norm_w, eps, *met(w)), w)
    out = tape.scratch(_label(w), 1, w.weight.shape[0])
    _multiply_normed(tape, w.weight, hidden, norm_w, out, eps, _label(w))
    _adapt(tape, hidden, w, tape.io["n_rows"], out, norm_w, eps)
    _bias(tape, w, tape.io["n_rows"], out)
    return out


def _multiply_normed(tape: Tape, weight: Buffer, hidden: Buffer, norm_w: Weights, out: Buffer,
                     eps: float, label: str) -> None:
    """out = norm(hidden) @ weight.T, one row on a GPU."""
    how = constants(tape.target, [weight])
    tape.launch(gemv_norm(**how, NORM=1), weight, hidden, norm_w.weight, out, eps, label=label,
                variant=type_of(weight), reason=reason(f"one row, with {_label(norm_w)}", weight))


def _qkv_of_rows(tape: Tape, x: Buffer, *parts: Weights) -> tuple[Buffer, Buffer, Buffer]:
    """q, k and v of several normed rows."""
    weights = [p.weight for p in parts]
    if x.dtype != "F16" or not shared_layout(weights[:2]):
        q, k, v = (linear(tape, x, p) for p in parts)
        return q, k, v
    q, k, v = outs = tuple(tape.scratch(_label(p), rows_of(x), p.weight.shape[0]) for p in parts)
    three(tape, weights, x, outs, "attn_qkv")
    for p, out in zip(parts, outs, strict=True):
        _adapt(tape, x, p, tape.io["n_rows"], out)
        _bias(tape, p, tape.io["n_rows"], out)
    return q, k, v


def qkv(tape: Tape, hidden: Buffer, w: Weights, eps: float) -> tuple[Buffer, Buffer, Buffer]:
    """q, k and v of norm(hidden), with their biases: each (rows, its heads * head_dim)."""
    parts = (w.attn_q, w.attn_k, w.attn_v)
    weights = tuple(p.weight for p in parts)
    if not one_row(tape, hidden, *met(*parts)):
        return _qkv_of_rows(tape, normed(tape, hidden, w.attn_norm, eps, *met(*parts)), *parts)
    biases = tuple(p.bias for p in parts)
    if not fuses(tape.target, *weights) or len({b is None for b in biases}) > 1:
        q, k, v = (norm_linear(tape, hidden, w.attn_norm, p, eps) for p in parts)
        return q, k, v
    q, k, v = outs = tuple(tape.scratch(_label(p), 1, p.weight.shape[0]) for p in parts)
    chosen, how = gemv_norm_qkv, qkv_constants(tape.target, *weights)
    if biases[0] is not None:
        chosen, how = gemv_norm_qkv_bias, {**how, "BIAS": 1}
    inputs = (hidden, w.attn_norm.weight, *weights, *(b for b in biases if b is not None))
    tape.launch(chosen(**how), *inputs, *outs, eps, label="attn_qkv",
                variant=" ".join(dict.fromkeys(map(type_of, weights))),
                reason=reason("one row: norm and three products in a launch", *weights))
    for part, out in zip(parts, outs, strict=True):
        _adapt(tape, hidden, part, tape.io["n_rows"], out, w.attn_norm, eps)
    return q, k, v
