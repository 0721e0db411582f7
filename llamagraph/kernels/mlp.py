"""The gated feed-forward block: act(x @ gate.T) * (x @ up.T), then down (arXiv:2002.05202)."""

import numpy as np

from llamagraph.kernels.activations import ACTIVATIONS
from llamagraph.kernels.gemv import constants, gemv_norm_gated
from llamagraph.kernels.layouts import shared_layout, type_of
from llamagraph.kernels.linear import (
    from_panels,
    linear,
    linear_residual,
    met,
    normed,
    one_row,
    reason,
)
from llamagraph.kernels.norm import norm_add
from llamagraph.kernels.panel_products import gated, gates
from llamagraph.kernels.panels import COLUMNS, in_panels, panels
from llamagraph.program.launch import Buffer, Geometry, In, Out, kernel
from llamagraph.program.tape import Tape
from llamagraph.program.weights import Weights


def _geometry(target, gate: Buffer, up, n_rows, out, *, ACT: str, WIDTH: int) -> Geometry:
    return Geometry((-(-gate.shape[1] // 1024), gate.shape[0], 1), 256)


def _example(rng):
    for i, (rows, n_rows) in enumerate(((1, 1), (2, 2), (8, 7), (8, 8), (64, 33), (512, 512))):
        shape = (rows, (96, 1536, 4100)[i % 3] if rows < 512 else 32)
        gate, up = (3 * rng.standard_normal(shape, np.float32) for _ in range(2))
        n = np.array([n_rows], np.int32)
        constants = {"ACT": ("silu", "gelu")[i % 2], "WIDTH": shape[1]}
        yield (gate, up, n, np.empty_like(gate)), constants


@kernel("mlp.cu", geometry=_geometry, example=_example)
def gate_act(gate: In, up: In, n_rows: In, out: Out, *, ACT: str, WIDTH: int) -> None:
    """out = act(gate) * up, all (rows, n_ff)."""
    n = n_rows[0]
    np.multiply(ACTIVATIONS[ACT](gate[:n]), up[:n], out=out[:n])


def _panels_example(rng):
    for (gate, up, n_rows, _), how in _example(rng):
        if gate.shape[1] % COLUMNS == 0:
            out = np.empty((gate.shape[1] // COLUMNS, len(gate), COLUMNS), np.float16)
            yield (gate, up, n_rows, out), how


@kernel("mlp.cu", geometry=_geometry, example=_panels_example)
def gate_act_panels(gate: In, up: In, n_rows: In, out: Out, *, ACT: str, WIDTH: int) -> None:
    """As `gate_act`, into panels: F16 (n_ff / 64, rows, 64)."""
    n = n_rows[0]
    out[:, :n] = in_panels(ACTIVATIONS[ACT](gate[:n]) * up[:n])


def _gated(tape: Tape, hidden: Buffer, w: Weights, eps: float, act: str) -> Buffer:
    """act(gate(norm(hidden))) * up(norm(hidden)): (rows, n_ff), or panels if ffn_down has them."""
    gate, up = w.ffn_gate, w.ffn_up
    if from_panels(tape, hidden.shape[0], *met(w.ffn_down)):
        return _gated_panels(tape, hidden, w, eps, act)
    out = tape.scratch("ffn_act", hidden.shape[0], gate.weight.shape[0])
    if (one_row(tape, hidden, gate.weight) and shared_layout((gate.weight, up.weight))
            and gate.bias is None and up.bias is None and not (gate.adapters or up.adapters)):
        how = constants(tape.target, [gate.weight, up.weight], parts=2)
        tape.launch(gemv_norm_gated(**how, ACT=act), hidden, w.ffn_norm.weight, gate.weight,
                    up.weight, out, eps, label="ffn_gate_up",
                    variant=f"{type_of(gate.weight)} {act}",
                    reason=reason("one row: norm, gate, up and act in a launch", gate.weight))
        return out
    x = normed(tape, hidden, w.ffn_norm, eps, *met(gate, up))
    tape.launch(gate_act(ACT=act, WIDTH=out.shape[1]), linear(tape, x, gate),
                linear(tape, x, up), tape.io["n_rows"], out, label="ffn_act", variant=act)
    return out


def _gated_panels(tape: Tape, hidden: Buffer, w: Weights, eps: float, act: str) -> Buffer:
    gate, up = w.ffn_gate, w.ffn_up
    x = normed(tape, hidden, w.ffn_norm, eps, *met(gate, up))
    out = panels(tape, "ffn_act", hidden.shape[0], gate.weight.shape[0])
    if (x.dtype == "F16" and gates(gate.weight, up.weight) and gate.bias is up.bias is None
            and not (gate.adapters or up.adapters)):
        gated(tape, gate.weight, up.weight, x, out, act)
        return out
    tape.launch(gate_act_panels(ACT=act, WIDTH=gate.weight.shape[0]), linear(tape, x, gate),
                linear(tape, x, up), tape.io["n_rows"], out, label="ffn_act", variant=act)
    return out


def mlp(tape: Tape, hidden: Buffer, w: Weights, eps: float, act: str = "silu") -> None:
    """hidden += down(act(gate(norm(hidden))) * up(norm(hidden))), with a post norm if there is."""
    out = _gated(tape, hidden, w, eps, act)
    if "post_ffw_norm" in w:
        norm_add(tape, linear(tape, out, w.ffn_down), w.post_ffw_norm, hidden, eps)
    else:
        linear_residual(tape, out, w.ffn_down, hidden)
