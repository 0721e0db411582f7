"""A model with a real one's shapes and random weights, made in memory: nothing is on disk.

For measuring: speed does not depend on what the weights are. Shapes are those of SmolLM2 135M,
Llama 3.2 1B, Llama 3.1 8B and 70B; which tensors get more bits is llama.cpp's rule
(llama-quant.cpp). Knows no tokenizer, no device, and nothing of what a model computes.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from llamagraph.errors import LlamaGraphError
from llamagraph.gguf.parser import TensorInfo
from llamagraph.gguf.quants import QUANTS, Quant
from llamagraph.gguf.reader import GGUFFile, Metadata

DEVIATION = 0.02  # of the weights: about 1 / sqrt(n_in), so that activations keep their size
RANDOM_BYTES = 64 << 20  # of each type; tiled from there on, more than a GPU's caches hold
SHIFTS = 1 << 16  # a tensor begins at one of so many blocks of its type's pool


@dataclass(frozen=True)
class Shape:
    """A Llama-like model's sizes. `tied`: the embedding is the lm_head."""

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    tied: bool

    def metadata(self) -> dict[str, Any]:
        return {
            "general.architecture": "llama",
            "llama.block_count": self.n_layer,
            "llama.context_length": 131072,
            "llama.embedding_length": self.n_embd,
            "llama.feed_forward_length": self.n_ff,
            "llama.attention.head_count": self.n_head,
            "llama.attention.head_count_kv": self.n_head_kv,
            "llama.attention.key_length": self.head_dim,
            "llama.attention.value_length": self.head_dim,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.dimension_count": self.head_dim,
            "llama.rope.freq_base": 500000.0,
        }


class Mix(NamedTuple):
    """Types of a file: of most matrices, of attn_v and ffn_down in some layers, of the lm_head."""

    base: str
    better: str
    head: str


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "135m": Shape(30, 576, 1536, 9, 3, 64, 49152, tied=True),
        "1b": Shape(16, 2048, 8192, 32, 8, 64, 128256, tied=True),
        "8b": Shape(32, 4096, 14336, 32, 8, 128, 128256, tied=False),
        "70b": Shape(80, 8192, 28672, 64, 8, 128, 128256, tied=False),
    }
)
MIXES: Mapping[str, Mix] = MappingProxyType(
    {
        "q4_k_m": Mix("Q4_K", "Q6_K", "Q6_K"),
        "q5_k_m": Mix("Q5_K", "Q6_K", "Q6_K"),
        **{q.lower(): Mix(q, q, "Q6_K") for q in ("Q4_0", "Q4_1", "Q5_0", "Q5_1")},
        **{q.lower(): Mix(q, q, q) for q in ("Q6_K", "Q8_0", "F16", "BF16", "F32")},
    }
)
# Rows that are no multiple of 256 weights take these instead, as llama.cpp's do.
_FALLBACKS = MappingProxyType({"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"})
# Where a block has its scales, which are halves, and what each is in units of the first: a
# minimum is such that the weights are zero in the mean.
_SCALES: Mapping[str, Mapping[int, float]] = MappingProxyType(
    {
        "Q4_0": {0: 1}, "Q4_1": {0: 1, 2: -7.5}, "Q5_0": {0: 1}, "Q5_1": {0: 1, 2: -15.5},
        "Q8_0": {0: 1}, "Q4_K": {0: 1, 2: 7.5}, "Q5_K": {0: 1, 2: 15.5}, "Q6_K": {208: 1},
    }
)


def _more_bits(layer: int, n_layer: int) -> bool:
    """The first eighth, the last eighth, and every third layer between."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


def _tensors(s: Shape, mix: Mix) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type of every tensor."""
    q, kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    yield "token_embd.weight", (s.n_vocab, s.n_embd), mix.head if s.tied else mix.base
    if not s.tied:
        yield "output.weight", (s.n_vocab, s.n_embd), mix.head
    yield "output_norm.weight", (s.n_embd,), "F32"
    for i in range(s.n_layer):
        more = mix.better if _more_bits(i, s.n_layer) else mix.base
        for name, shape, dtype in (
            ("attn_norm", (s.n_embd,), "F32"),
            ("attn_q", (q, s.n_embd), mix.base),
            ("attn_k", (kv, s.n_embd), mix.base),
            ("attn_v", (kv, s.n_embd), more),
            ("attn_output", (s.n_embd, q), mix.base),
            ("ffn_norm", (s.n_embd,), "F32"),
            ("ffn_gate", (s.n_ff, s.n_embd), mix.base),
            ("ffn_up", (s.n_ff, s.n_embd), mix.base),
            ("ffn_down", (s.n_embd, s.n_ff), more),
        ):
            yield f"blk.{i}.{name}.weight", shape, dtype


def _random_blocks(rng: np.random.Generator, quant: Quant, n: int) -> np.ndarray:
    """n blocks of weights around zero, uint8 (n, n_bytes)."""
    if quant.name in ("F32", "F16", "BF16"):
        values = rng.standard_normal(n, np.float32) * np.float32(DEVIATION)
        raw = values.astype(np.float16 if quant.name == "F16" else np.float32).view(np.uint8)
        return raw.reshape(n, -1)[:, -quant.n_bytes :]  # BF16 is the upper half of an F32
    blocks = rng.integers(0, 256, (n, quant.n_bytes), np.uint8)
    sample = blocks[:4096].copy()
    _set_scales(sample, quant, 1.0)
    weights = quant.dequantise(sample.reshape(-1), (len(sample), quant.block))
    _set_scales(blocks, quant, DEVIATION / float(weights.std()))
    return blocks


def _set_scales(blocks: np.ndarray, quant: Quant, size: float) -> None:
    for at, factor in _SCALES[quant.name].items():
        blocks[:, at : at + 2] = np.frombuffer(np.float16(size * factor).tobytes(), np.uint8)


class SyntheticFile(GGUFFile):
    """What an open GGUF file of `SHAPE:QUANT` would be, as in `8b:q4_k_m`; the same every time.

    Tensors of a type are windows of one pool of random blocks, so host memory holds about the
    largest tensor of each type. Raises LlamaGraphError for a SHAPE or QUANT that there is not.
    """

    def __init__(self, spec: str, shapes: Mapping[str, Shape] = SHAPES) -> None:
        shape, mix = _read_spec(spec, shapes)
        self.path = Path(f"synthetic-{spec.lower()}")
        self.version = 3
        self.metadata = Metadata(self.path, shape.metadata())
        self.tensors = {
            name: self._info(i, name, size, dtype)
            for i, (name, size, dtype) in enumerate(_tensors(shape, mix))
        }
        self._pools: dict[str, np.ndarray] = {}

    def _info(self, i: int, name: str, shape: tuple[int, ...], dtype: str) -> TensorInfo:
        quant = QUANTS[dtype]
        if shape[-1] % quant.block:
            quant = QUANTS[_FALLBACKS[dtype]]
        n_bytes = math.prod(shape) // quant.block * quant.n_bytes
        start = i * 7919 % SHIFTS * quant.n_bytes
        return TensorInfo(name, shape, quant, n_bytes, start, self.path)

    def data(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 (n_bytes,): read-only, and some of other tensors' too."""
        info = self.tensors[name]
        if len(info.shape) == 1:  # a norm
            noise = np.random.default_rng(info.offset).standard_normal(info.shape, np.float32)
            return (1 + np.float32(0.1) * noise).view(np.uint8)
        return self._pool(info.quant)[info.offset : info.offset + info.n_bytes]

    def _pool(self, quant: Quant) -> np.ndarray:
        """Random blocks of a type, uint8 (n,), as many as its tensors reach; made once."""
        if quant.name not in self._pools:
            length = max(t.offset + t.n_bytes for t in self.tensors.values() if t.quant == quant)
            n = min(length, RANDOM_BYTES) // quant.n_bytes
            blocks = _random_blocks(np.random.default_rng(quant.id), quant, n).reshape(-1)
            pool = blocks if len(blocks) >= length else np.resize(blocks, length)
            pool.flags.writeable = False
            self._pools[quant.name] = pool
        return self._pools[quant.name]

    def close(self) -> None:
        self._pools.clear()


def _read_spec(spec: str, shapes: Mapping[str, Shape]) -> tuple[Shape, Mix]:
    name, _, quant = spec.lower().partition(":")
    if name not in shapes or quant not in MIXES:
        raise LlamaGraphError(
            f"no synthetic model {spec!r}: write SHAPE:QUANT, as in 8b:q4_k_m; shapes are "
            f"{', '.join(shapes)}, quants {', '.join(MIXES)}"
        )
    return shapes[name], MIXES[quant]
