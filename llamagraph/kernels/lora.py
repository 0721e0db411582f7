"""The second half of what a LoRA adapter adds to a product; the first is a product like others.

An adapter adds scale * alpha / rank * (x @ a.T) @ b.T (Hu et al., arXiv:2106.09685). Rows of
x @ a.T are short, so that the rest is one small launch for any number of rows, which reads the
scale on the device. Knows no layer.
"""

import numpy as np

from llamagraph.kernels.examples import random_weight
from llamagraph.kernels.layouts import conversion, tile_constants, type_of
from llamagraph.program.launch import (
    Buffer,
    Geometry,
    In,
    InOut,
    Traffic,
    Work,
    kernel,
    product_flops,
)
from llamagraph.program.tape import Tape
from llamagraph.program.weights import LowRank

THREADS = 128  # of a block: each has an output of ROWS rows
MOST_ROWS = 16

_EXAMPLES = (  # type, layout, outputs, rank, rows, true rows
    ("F32", "rows8", 200, 32, 1, 1), ("F16", "rows8", 576, 32, 1, 1),
    ("BF16", "rows8", 300, 64, 8, 7), ("Q8_0", "rows8", 130, 128, 32, 17),
    ("F16", "rows8", 1000, 96, 32, 32), ("F32", "rows16", 37, 1056, 128, 100),
    ("Q4_K", "rows8", 64, 256, 8, 8), ("F16", "rows8", 257, 64, 512, 301),
    ("MXFP4", "f16.rows8", 140, 32, 8, 3),
)


def _geometry(target, scales, b, product: Buffer, n_rows, out, factor, index, n_out: int, *,
              ROWS: int, **_) -> Geometry:
    return Geometry((-(-product.shape[0] // ROWS), -(-n_out // THREADS), 1), THREADS)


def _cost(work: Work, scales, b: Buffer, product: Buffer, n_rows, out, factor, index, n_out: int,
          **_) -> Traffic:
    n = min(work.n_rows, product.shape[0])
    return Traffic(b.n_bytes + 4 * n * (product.shape[1] + n_out), 4 * n * n_out)


def _flops(work: Work, scales, b: Buffer, product: Buffer, *rest, **_) -> int:
    return product_flops(min(work.n_rows, product.shape[0]), b)


def _example(rng):
    for i, (dtype, layout, n_out, rank, rows, n_rows) in enumerate(_EXAMPLES):
        b = random_weight(rng, dtype, (n_out, rank), layout)
        product = rng.standard_normal((rows, rank), np.float32)
        product[n_rows:] = np.nan
        out = rng.standard_normal((rows, n_out), np.float32)
        yield (rng.uniform(0.5, 2, 3).astype(np.float32), b, product, np.array([n_rows], np.int32),
               out, -0.75, i % 3, n_out), {
                   **tile_constants(b), "RANK": rank, "ROWS": min(rows, MOST_ROWS)}


@kernel("lora.cu", geometry=_geometry, cost=_cost, flops=_flops, example=_example)
def lora_add(scales: In, b: In, product: In, n_rows: In, out: InOut, factor: float, index: int,
             n_out: int, *, TYPE: str, UNIT: int, RW: int, RANK: int, ROWS: int) -> None:
    """out += scales[index] * factor * product @ b.T.

    scales: (n_adapters,); b: (n_out, rank); product: (rows, rank); out: (rows, n_out).
    """
    n = n_rows[0]
    out[:n] += scales[index] * np.float32(factor) * (product[:n] @ b.T)


def add_low_rank(tape: Tape, product: Buffer, change: LowRank, n_rows: Buffer, out: Buffer,
                 label: str) -> None:
    """out += scale * product @ b.T for every row, for the weight `label`."""
    rows, rank = product.shape
    how = {**tile_constants(change.b), "RANK": rank, "ROWS": min(rows, MOST_ROWS)}
    why = f"adapter {change.adapter}, alpha / rank = {change.factor:g}"
    tape.launch(lora_add(**how), change.scales, change.b, product, n_rows, out, change.factor,
                change.index, out.shape[1], label=f"{label}.{change.label}_b",
                variant=type_of(change.b),
                reason="; ".join(filter(None, (why, conversion(change.b)))))
