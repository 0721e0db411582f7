"""The activation functions of feed-forward blocks, by the kernels' constant ACT."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np


def silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x / (np.float32(1) + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    """The tanh form (Hendrycks and Gimpel, arXiv:1606.08415)."""
    inner = np.float32(0.7978845608) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1) + np.tanh(inner))


ACTIVATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = MappingProxyType(
    {"silu": silu, "gelu": gelu}
)
