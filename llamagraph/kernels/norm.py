"""Root mean square norms: over rows, over heads, and added to the residual stream.

y = x / sqrt(mean(x^2) + eps) * weight  (Zhang and Sennrich, arXiv:1910.07467)
"""

import numpy as np

from llamagraph.kernels.panels import COLUMNS, in_panels, panels
from llamagraph.program.launch import Buffer, Geometry, In, InOut, Out, kernel
from llamagraph.program.tape import Tape
from llamagraph.program.weights import Weights


def _normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    mean = np.add.reduce(x * x, axis=-1, keepdims=True) / np.float32(x.shape[-1])
    return x * (np.float32(1) / np.sqrt(mean + np.float32(eps))) * weight


def threads(rows: int) -> int:
    """Of a block that norms a row: more where few blocks leave the machine idle."""
    return 512 if rows <= 8 else 256


def _row_blocks(target, x: Buffer, *rest, WIDTH: int, THREADS: int = 256) -> Geometry:
    return Geometry((x.shape[0], 1, 1), THREADS)


def _one_block(target, *args, WIDTH: int) -> Geometry:
    return Geometry((1, 1, 1), 256)


def _head_blocks(target, weight: Buffer, n_rows, x: Buffer, eps, *, HEAD_DIM: int) -> Geometry:
    return Geometry((x.shape[0], x.shape[1] // HEAD_DIM, 1), 32)


def _example(rng):
    for rows, n_rows, width in ((1, 1, 64), (2, 2, 576), (8, 7, 1156), (8, 8, 4096), (64, 33, 96),
                                (512, 512, 64)):
        x = rng.standard_normal((rows, width), np.float32)
        weight = rng.standard_normal(width, np.float32)
        n = np.array([n_rows], np.int32)
        yield (x, weight, n, np.empty_like(x), 1e-5), {"WIDTH": width}


def _panels_example(rng):
    for (x, weight, n_rows, _, eps), constants in _example(rng):
        if x.shape[1] % COLUMNS == 0:
            out = np.empty((x.shape[1] // COLUMNS, len(x), COLUMNS), np.float16)
            yield (x, weight, n_rows, out, eps), {**constants, "THREADS": threads(len(x))}


def _last_example(rng):
    for (x, weight, n_rows, out, eps), constants in _example(rng):
        yield (x, weight, n_rows, np.empty_like(out[:1]), eps), constants


def _residual_example(rng):
    for (x, weight, n_rows, _, eps), constants in _example(rng):
        yield (x, weight, n_rows, rng.standard_normal(x.shape, np.float32), eps), constants


def _heads_example(rng):
    for rows, n_rows, head_dim in ((1, 1, 16), (2, 2, 64), (8, 7, 80), (8, 8, 96), (64, 33, 128),
                                   (512, 512, 256)):
        x = rng.standard_normal((rows, 3 * head_dim), np.float32)
        weight = rng.standard_normal(head_dim, np.float32)
        yield (weight, np.array([n_rows], np.int32), x, 1e-6), {"HEAD_DIM": head_dim}


@kernel("norm.cu", geometry=_row_blocks, example=_example)
def rms_norm(x: In, weight: In, n_rows: In, out: Out, eps: float, *, WIDTH: int) -> None:
    """x, out: (rows, n_embd); weight: (n_embd,)."""
    n = n_rows[0]
    out[:n] = _normed(x[:n], weight, eps)


@kernel("norm.cu", geometry=_row_blocks, example=_panels_example)
def rms_norm_panels(x: In, weight: In, n_rows: In, out: Out, eps: float, *, WIDTH: int,
                    THREADS: int) -> None:
    """As `rms_norm`, into panels: F16 (n_embd / 64, rows, 64)."""
    n = n_rows[0]
    out[:, :n] = in_panels(_normed(x[:n], weight, eps))


@kernel("norm.cu", geometry=_one_block, example=_last_example)
def rms_norm_last(x: In, weight: In, n_rows: In, out: Out, eps: float, *, WIDTH: int) -> None:
    """Of the last true row alone. x: (rows, n_embd); out: (1, n_embd)."""
    out[0] = _normed(x[n_rows[0] - 1], weight, eps)


@kernel("norm.cu", geometry=_row_blocks, example=_residual_example)
def rms_norm_add(x: In, weight: In, n_rows: In, hidden: InOut, eps: float, *, WIDTH: int) -> None:
    """hidden += norm(x), both (rows, n_embd)."""
    n = n_rows[0]
    hidden[:n] += _normed(x[:n], weight, eps)


@kernel("norm.cu", geometry=_head_blocks, example=_heads_example)
def rms_norm_heads(weight: In, n_rows: In, x: InOut, eps: float, *, HEAD_DIM: int) -> None:
    """Norms each head of x in place. x: (rows, heads * head_dim); weight: (head_dim,)."""
    n = n_rows[0]
    heads = x[:n].reshape(n, -1, HEAD_DIM)
    heads[:] = _normed(heads, weight, eps)


def norm(tape: Tape, x: Buffer, w: Weights, eps: float) -> Buffer:
    """RMS norm of every row."""
    out = tape.scratch(_label(w), *x.shape)
    tape.launch(rms_norm(WIDTH=x.shape[1]), x, w.weight, tape.io["n_rows"], out, eps,
                label=_label(w))
    return out


def norm_panels(tape: Tape, x: Buffer, w: Weights, eps: float) -> Buffer:
    """RMS norm of every row, in panels."""
    out = panels(tape, _label(w), *x.shape)
    chosen = rms_norm_panels(WIDTH=x.shape[1], THREADS=threads(x.shape[0]))
    tape.launch(chosen, x, w.weight, tape.io["n_rows"], out, eps,
                label=_label(w), variant="panels")
    return out


def norm_last(tape: Tape, x: Buffer, w: Weights, eps: float) -> Buffer:
    """RMS norm of the last true row: (1, n_embd)."""
    out = tape.scratch("last_norm", 1, x.shape[1])
    tape.launch(rms_norm_last(WIDTH=x.shape[1]), x, w.weight, tape.io["n_rows"], out, eps,
                label=_label(w))
    return out


def norm_add(tape: Tape, x: Buffer, w: Weights, hidden: Buffer, eps: float) -> None:
    """Adds the norm of x to the residual stream."""
    tape.launch(rms_norm_add(WIDTH=x.shape[1]), x, w.weight, tape.io["n_rows"], hidden, eps,
                label=_label(w))


def norm_heads(tape: Tape, x: Buffer, w: Weights, eps: float) -> None:
    """Norms each head in place (the q and k norms)."""
    tape.launch(rms_norm_heads(HEAD_DIM=w.weight.shape[-1]), w.weight, tape.io["n_rows"], x, eps,
                label=_label(w))


def _label(w: Weights) -> str:
    return w.name.rpartition(".")[2]
