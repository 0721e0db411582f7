"""The end of a step: final norm, logits of the rows that are wanted, the next token."""

import numpy as np

from llamagraph.kernels.copy import copy_launch
from llamagraph.kernels.linear import linear, met, norm_linear, normed
from llamagraph.kernels.loop import repeat
from llamagraph.kernels.norm import norm_last
from llamagraph.kernels.sample import choose
from llamagraph.kernels.step import end_step
from llamagraph.program.launch import Buffer, Geometry, In, InOut, Traffic, Work, kernel
from llamagraph.program.tape import Tape
from llamagraph.program.weights import Weights


def _geometry(target, n_rows, logits: Buffer, cap, n_vocab: int) -> Geometry:
    return Geometry((-(-n_vocab // 1024), logits.shape[0], 1), 256)


def _cost(work: Work, n_rows, logits: Buffer, cap, n_vocab: int) -> Traffic:
    n_bytes = 4 * min(work.n_rows, logits.shape[0]) * n_vocab
    return Traffic(n_bytes, n_bytes)


def _example(rng):
    for n_vocab in (100, 3000):
        logits = 40 * rng.standard_normal((3, n_vocab), np.float32)
        yield (np.array([2], np.int32), logits, 30.0, n_vocab), {}


@kernel("head.cu", geometry=_geometry, cost=_cost, example=_example)
def cap_logits(n_rows: In, logits: InOut, cap: float, n_vocab: int) -> None:
    """logits = cap * tanh(logits / cap), (rows, n_vocab)."""
    rows = logits[: n_rows[0]]
    rows[:] = np.float32(cap) * np.tanh(rows / np.float32(cap))


def head(tape: Tape, hidden: Buffer, output_norm: Weights, output: Weights, eps: float,
         softcap: float = 0.0) -> None:
    """Logits as `tape.key` wants them, then the choice of a token after the last row."""
    want = tape.key.logits
    if want == "none":
        end_step(tape)
        return
    one_row = want == "last"
    n_rows = tape.io["one" if one_row else "n_rows"]
    if hidden.shape[0] == 1:
        logits = norm_linear(tape, hidden, output_norm, output, eps)
    else:
        x = (norm_last(tape, hidden, output_norm, eps) if one_row
             else normed(tape, hidden, output_norm, eps, *met(output)))
        logits = linear(tape, x, output, n_rows)
    if softcap:
        tape.launch(cap_logits, n_rows, logits, softcap, logits.shape[1], label="logit_softcap")
    tape.output("logits", logits)
    if one_row and tape.key.sampler != "host":
        choose(tape, logits)
        if tape.key.repeats:
            repeat(tape)
        return
    end_step(tape)
    if one_row:
        copy_launch(tape, logits, tape.io["candidates"], label="candidates",
                    reason="the host chooses the token")
