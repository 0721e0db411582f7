"""Products of rows in panels with weights: the table of which kernels do them.

| rows | architecture | kernels |
|---|---|---|
| up to 32 | sm_80 and later | `gemm_warps.py`: reading the weight is all that counts |
| 32, gate and up together | sm_90a | `gemm_hopper.py`: a warp has no registers for both sums |
| more | sm_90a | `gemm_hopper.py`: warp groups multiply twice as fast |

What has no row here is done by `gemm.py`, from rows of floats. Knows no layer.
"""

from collections.abc import Sequence

from llamagraph.kernels import few_rows, gemm_hopper, warp_groups, warp_plans
from llamagraph.kernels.layouts import Weight, shared_layout
from llamagraph.kernels.panels import COLUMNS
from llamagraph.program.launch import Buffer
from llamagraph.program.tape import Tape
from llamagraph.program.target import Target


def takes(target: Target, weight: Weight, rows: int) -> bool:
    """Whether so many rows can be multiplied with the weight here."""
    return warp_plans.takes(target, weight, rows) or warp_groups.takes(target, weight, rows)


def _few(target: Target, weights: Sequence[Weight], rows: int) -> bool:
    return all(warp_plans.takes(target, w, rows) for w in weights)


def multiply(tape: Tape, weight: Buffer, x: Buffer, n_rows: Buffer, out: Buffer, label: str, *,
             add: bool = False) -> None:
    """out = x @ weight.T for rows in panels, or with `add` out += x @ weight.T."""
    few = _few(tape.target, [weight], x.shape[1])
    one = few_rows.multiply if few else gemm_hopper.gemm_hopper
    one(tape, weight, x, n_rows, out, label, add=add)


def gates(gate: Weight, up: Weight) -> bool:
    """Whether `gated` can have both."""
    return shared_layout([gate, up]) and gate.shape[0] % COLUMNS == 0


def gated(tape: Tape, gate: Buffer, up: Buffer, x: Buffer, out: Buffer, act: str) -> None:
    """out = act(x @ gate.T) * (x @ up.T), x and out in panels."""
    rows, hopper = x.shape[1], tape.target.name == warp_groups.ARCH
    few = _few(tape.target, [gate, up], rows) and not (hopper and rows == 32)
    (few_rows.gated if few else gemm_hopper.gated)(tape, gate, up, x, out, act)


def three(tape: Tape, weights: Sequence[Buffer], x: Buffer, outs: Sequence[Buffer], label: str
          ) -> None:
    """The products of x in panels with q, k and v; q and k are stored alike."""
    few = _few(tape.target, weights, x.shape[1])
    (few_rows.three if few else gemm_hopper.three)(tape, weights, x, outs, label)
