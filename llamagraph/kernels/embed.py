"""Token embedding: rows of the embedding matrix, chosen by the tokens of the step."""

import numpy as np

from llamagraph.kernels.examples import random_weight
from llamagraph.kernels.layouts import PACKINGS, conversion, tile_constants, type_of
from llamagraph.kernels.lora import add_low_rank
from llamagraph.program.launch import Buffer, Geometry, In, Out, Traffic, Work, kernel
from llamagraph.program.tape import Tape
from llamagraph.program.weights import Weights


def _geometry(target, tokens, pos, n_rows, token_embd, out: Buffer, scale, **_) -> Geometry:
    return Geometry((out.shape[0], -(-out.shape[1] // (64 * 32)), 1), 64)


def _cost(work: Work, tokens, pos, n_rows, token_embd: Buffer, out: Buffer, scale, **_) -> Traffic:
    row = token_embd.n_bytes // token_embd.shape[0]
    return Traffic(work.n_rows * (row + 4), work.n_rows * out.shape[1] * 4)


def _example(rng):
    types = [(dtype, 1280, f"rows{rows}") for dtype in PACKINGS for rows in (8, 16)]
    types += [("Q8_0", 96, "rows8"), ("Q5_0", 2592, "rows32"), ("IQ1_M", 512, "f16.rows16")]
    for i, (dtype, width, rows) in enumerate(types):
        n_rows, bucket = ((1, 1), (2, 2), (7, 8), (8, 8))[i % 4]
        tokens = rng.integers(0, 50, 12).astype(np.int32)
        weight = random_weight(rng, dtype, (50, width), rows)
        yield (tokens, np.array([i % 4], np.int32), np.array([n_rows], np.int32), weight,
               np.empty((bucket, width), np.float32), 1.5), {
                   **tile_constants(weight), "N_EMBD": width}
    tokens = rng.integers(0, 50, 512).astype(np.int32)
    weight = random_weight(rng, "Q6_K", (50, 256), "rows8")
    yield (tokens, np.array([0], np.int32), np.array([512], np.int32), weight,
           np.empty((512, 256), np.float32), 1.0), {**tile_constants(weight), "N_EMBD": 256}


@kernel("embed.cu", geometry=_geometry, cost=_cost, example=_example)
def embed_rows(tokens: In, pos: In, n_rows: In, token_embd: In, out: Out, scale: float, *,
               TYPE: str, UNIT: int, RW: int, N_EMBD: int) -> None:
    """out[r] = token_embd[tokens[pos + r]] * scale, shape (rows, n_embd)."""
    start, n = pos[0], n_rows[0]
    np.multiply(token_embd[tokens[start : start + n]], np.float32(scale), out=out[:n])


def embed(tape: Tape, token_embd: Weights, scale: float = 1.0) -> Buffer:
    """The residual stream of the step: (rows, n_embd)."""
    hidden = _look_up(tape, token_embd.weight, scale, "hidden", "token_embd")
    for change in token_embd.row_adapters:
        label = f"token_embd.{change.label}_a"
        rows = _look_up(tape, change.a, scale, label, label)
        add_low_rank(tape, rows, change, tape.io["n_rows"], hidden, "token_embd")
    return hidden


def _look_up(tape: Tape, weight: Buffer, scale: float, name: str, label: str) -> Buffer:
    """The weight's rows of the step's tokens, times `scale`."""
    io, out = tape.io, tape.scratch(name, tape.key.rows, weight.shape[1])
    stored = embed_rows(**tile_constants(weight), N_EMBD=weight.shape[1])
    tape.launch(
        stored, io["tokens"], io["pos"], io["n_rows"], weight, out, scale, label=label,
        variant=type_of(weight), reason=conversion(weight),
    )
    return out
