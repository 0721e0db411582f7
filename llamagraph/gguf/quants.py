"""The tensor types of GGUF files: one row a type, and how its bytes become float32.

Numbers and layouts are ggml's (ggml.h, ggml-common.h); the arithmetic is `gguf.quants`', called a
group of blocks at a time. Knows nothing of files, models or devices, and nothing of how a GPU
stores a weight.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from llamagraph.errors import FormatError

# Weights that one numpy call converts: its temporaries then stay in the second-level cache.
_GROUP = 1 << 17
_MOST_THREADS = 8

_PLAIN = MappingProxyType(
    {
        "F32": "<f4",
        "F16": "<f2",
        "F64": "<f8",
        "I8": "<i1",
        "I16": "<i2",
        "I32": "<i4",
        "I64": "<i8",
    }
)
# Q8_1 and Q8_K hold activations, never weights; NVFP4 needs a second tensor of scales.
_REFUSED = frozenset({"Q8_1", "Q8_K", "NVFP4", "Q1_0", "Q2_0"})


@dataclass(frozen=True)
class Quant:
    """A tensor type: `block` weights of a row are stored together in `n_bytes` bytes."""

    id: int
    name: str
    block: int
    n_bytes: int

    @property
    def supported(self) -> bool:
        """Whether weights of this type can be used; the others are only known by name."""
        return self.name not in _REFUSED

    def row_bytes(self, n_cols: int) -> int:
        """Bytes of a row of `n_cols` weights, a multiple of `block`."""
        assert n_cols % self.block == 0, f"{n_cols} weights are no whole {self.name} blocks"
        return n_cols // self.block * self.n_bytes

    def dequantise(self, raw: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """The weights as float32 (*shape), from their bytes: contiguous uint8, rows first.

        Uses up to eight threads where there is work for them. Raises FormatError for a type that
        cannot be converted.
        """
        blocks = raw.reshape(-1, self.n_bytes)
        out = np.empty(shape, np.float32)
        weights = out.reshape(-1, self.block)
        assert len(blocks) == len(weights), f"{raw.size} bytes are not {shape} in {self.name}"
        convert = self._block_converter()
        step = _GROUP // self.block

        def run(starts: Iterable[int]) -> None:
            with np.errstate(all="ignore"):  # damaged scales become inf and nan, in silence
                for start in starts:
                    weights[start : start + step] = convert(blocks[start : start + step])

        starts = range(0, len(blocks), step)
        n_threads = min(_MOST_THREADS, _usable_cores(), len(starts))
        if n_threads < 2:
            run(starts)
        else:  # numpy lets go of the interpreter lock while it converts
            with ThreadPoolExecutor(n_threads) as pool:
                list(pool.map(run, (starts[i::n_threads] for i in range(n_threads))))
        return out

    def _block_converter(self) -> Callable[[np.ndarray], np.ndarray]:
        """The function from bytes (n_blocks, n_bytes) to weights (n_blocks, block)."""
        if self.name in _PLAIN:
            return lambda blocks: blocks.view(_PLAIN[self.name])
        # Imported here: it takes 0.1 s, which a command that reads no weights need not wait.
        from gguf import quants

        rules = getattr(quants, self.name, None) if self.supported else None
        if rules is None:
            raise FormatError(f"tensor type {self.name} cannot be read; {supported_types()}")
        rules.init_grid()  # the code book of the IQ types, before threads could race for it
        return rules.dequantize_blocks


def supported_types() -> str:
    """The end of an error message: which types there are."""
    return "supported types: " + ", ".join(q.name for q in QUANTS.values() if q.supported)


def _usable_cores() -> int:
    """Cores that this process may use; a container often has fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


QUANTS: Mapping[str, Quant] = MappingProxyType(
    {
        quant.name: quant
        for quant in (
            Quant(0, "F32", 1, 4),
            Quant(1, "F16", 1, 2),
            Quant(2, "Q4_0", 32, 18),
            Quant(3, "Q4_1", 32, 20),
            Quant(6, "Q5_0", 32, 22),
            Quant(7, "Q5_1", 32, 24),
            Quant(8, "Q8_0", 32, 34),
            Quant(9, "Q8_1", 32, 36),
            Quant(10, "Q2_K", 256, 84),
            Quant(11, "Q3_K", 256, 110),
            Quant(12, "Q4_K", 256, 144),
            Quant(13, "Q5_K", 256, 176),
            Quant(14, "Q6_K", 256, 210),
            Quant(15, "Q8_K", 256, 292),
            Quant(16, "IQ2_XXS", 256, 66),
            Quant(17, "IQ2_XS", 256, 74),
            Quant(18, "IQ3_XXS", 256, 98),
            Quant(19, "IQ1_S", 256, 50),
            Quant(20, "IQ4_NL", 32, 18),
            Quant(21, "IQ3_S", 256, 110),
            Quant(22, "IQ2_S", 256, 82),
            Quant(23, "IQ4_XS", 256, 136),
            Quant(24, "I8", 1, 1),
            Quant(25, "I16", 1, 2),
            Quant(26, "I32", 1, 4),
            Quant(27, "I64", 1, 8),
            Quant(28, "F64", 1, 8),
            Quant(29, "IQ1_M", 256, 56),
            Quant(30, "BF16", 1, 2),
            Quant(34, "TQ1_0", 256, 54),
            Quant(35, "TQ2_0", 256, 66),
            Quant(39, "MXFP4", 32, 17),
            Quant(40, "NVFP4", 64, 36),
            Quant(41, "Q1_0", 128, 18),
            Quant(42, "Q2_0", 64, 18),
        )
    }
)
QUANTS_BY_ID: Mapping[int, Quant] = MappingProxyType({q.id: q for q in QUANTS.values()})
