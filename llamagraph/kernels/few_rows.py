"""Products of few rows with weights, as launches of `gemm_warps.py`. Knows no layer."""

from collections.abc import Sequence

from llamagraph.kernels.gemm_warps import (
    constants_of,
    qkv_constants,
    warps_add,
    warps_gated,
    warps_qkv,
    warps_rows,
)
from llamagraph.kernels.layouts import type_of
from llamagraph.kernels.warp_plans import plan
from llamagraph.program.launch import Buffer
from llamagraph.program.tape import Tape


def multiply(tape: Tape, weight: Buffer, x: Buffer, n_rows: Buffer, out: Buffer, label: str, *,
               add: bool = False) -> None:
    """out = x @ weight.T for rows in panels, or with `add` out += x @ weight.T."""
    how = plan(tape.target, [weight], x.shape[1])
    constants = constants_of(weight, how)
    chosen = warps_add(**constants, ADD=1) if add else warps_rows(**constants)
    tape.launch(chosen, weight, x, n_rows, out, weight.shape[0], label=label,
                variant=f"{type_of(weight)} {how.variant}", reason=how.reason)


def gated(tape: Tape, gate: Buffer, up: Buffer, x: Buffer, out: Buffer, act: str) -> None:
    """out = act(x @ gate.T) * (x @ up.T), x and out in panels."""
    how = plan(tape.target, [gate], x.shape[1], parts=2)
    tape.launch(warps_gated(**constants_of(gate, how), ACT=act), gate, up, x, tape.io["n_rows"],
                out, gate.shape[0], label="ffn_gate_up",
                variant=f"{type_of(gate)} {how.variant} {act}",
                reason=f"gate, up and act in a launch; {how.reason}")


def three(tape: Tape, weights: Sequence[Buffer], x: Buffer, outs: Sequence[Buffer], label: str
          ) -> None:
    """The products of x in panels with q, k and v; q and k are stored alike."""
    how = plan(tape.target, weights, x.shape[1])
    tape.launch(warps_qkv(**qkv_constants(weights, how)), *weights, x, tape.io["n_rows"], *outs,
                *(w.shape[0] for w in weights), label=label,
                variant=f"{' '.join(dict.fromkeys(map(type_of, weights)))} {how.variant}",
                reason=f"three products in a launch; {how.reason}")
