"""Random weights of any type for the kernels' examples, with sane scales."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from llamagraph.gguf.quants import QUANTS

# Where a block has its scales, which are halves: random bits there would be inf and nan.
_HALVES = MappingProxyType(
    {
        "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,),
        "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
        "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
        "IQ1_S": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
    }
)


@dataclass(frozen=True, eq=False)
class RawWeight:
    """A weight as a file has it. numpy takes `.matrix`, a GPU `.raw` in the order `layout`."""

    raw: np.ndarray  # uint8, (n_bytes,)
    dtype: str
    shape: tuple[int, ...]
    layout: str = ""

    @property
    def matrix(self) -> np.ndarray:
        """The weights as float32, rounded as the layout rounds them."""
        values = QUANTS[self.dtype].dequantise(self.raw, self.shape)
        if self.layout.startswith("f16"):
            values = values.astype(np.float16).astype(np.float32)
        return values


def random_weight(rng: np.random.Generator, dtype: str, shape: tuple[int, ...],
                  layout: str = "") -> RawWeight:
    """A weight whose values are about one in size."""
    quant = QUANTS[dtype]
    n_blocks = int(np.prod(shape)) // quant.block
    if dtype in ("F32", "F16", "BF16"):
        return RawWeight(_floats(rng, dtype, n_blocks), dtype, shape, layout)
    raw = rng.integers(0, 256, (n_blocks, quant.n_bytes), np.uint8)
    size = 1 / np.abs(quant.dequantise(_scaled(raw.copy(), dtype, rng, 1.0), shape)).mean()
    return RawWeight(_scaled(raw, dtype, rng, size).reshape(-1), dtype, shape, layout)


def _floats(rng: np.random.Generator, dtype: str, n: int) -> np.ndarray:
    values = rng.standard_normal(n, np.float32)
    if dtype == "BF16":
        return values.view(np.uint16)[1::2].copy().view(np.uint8)
    return values.astype({"F32": "<f4", "F16": "<f2"}[dtype]).view(np.uint8)


def _scaled(raw: np.ndarray, dtype: str, rng: np.random.Generator, size: float) -> np.ndarray:
    """The blocks with scales of about `size`."""
    for at in _HALVES.get(dtype, ()):
        scale = (size * rng.uniform(0.5, 1.5, len(raw))).astype("<f2")
        raw[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    if dtype == "MXFP4":  # an exponent alone
        raw[:, 0] = rng.integers(125, 129, len(raw)) + round(float(np.log2(size)))
    if dtype == "IQ1_M":  # the four upper quarters of the scales are the bits of a half
        bits = int(np.float16(size).view(np.uint16))
        for i in range(4):
            raw[:, 49 + 2 * i] = raw[:, 49 + 2 * i] & 15 | (bits >> 4 * i & 15) << 4
    return raw


def numpy_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """An example's arguments as numpy takes them."""
    return tuple(a.matrix if isinstance(a, RawWeight) else a for a in args)
