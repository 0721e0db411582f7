"""The types of the KV cache: the bytes of a slot, and what they are as numbers (`csrc/kv.cuh`).

A slot is the keys or the values of one position. Quantised types are ggml's, 32 numbers of a head
to a scale (ggml-quants.c, quantize_row_q8_0_ref and quantize_row_q4_0_ref), in an order of our own:
the numbers of all heads, then all scales, filled up to 16 bytes. They are read as halves. Knows no
position and no attention.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from llamagraph.program.launch import Buffer

BLOCK = 32  # numbers of a scale
SLOT_ALIGNMENT = 16  # bytes, of quantised slots
TYPES: Mapping[str, str] = MappingProxyType(
    {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
)  # by the names of llama.cpp
BITS: Mapping[str, int] = MappingProxyType({"F32": 32, "F16": 16, "BF16": 16, "Q8_0": 8, "Q4_0": 4})
QUANTISED = frozenset({"Q8_0", "Q4_0"})


def slot_bytes(dtype: str, n_head_kv: int, head_dim: int) -> int:
    """Bytes of a position's keys, or values."""
    n_bytes = n_head_kv * head_dim * BITS[dtype] // 8
    if dtype not in QUANTISED:
        return n_bytes
    return -(-(n_bytes + n_head_kv * head_dim // BLOCK * 2) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def fits(dtype: str, head_dim: int) -> bool:
    """Whether a head is whole blocks."""
    return dtype not in QUANTISED or head_dim % BLOCK == 0


def cache_buffer(name: str, start: int, shape: tuple[int, int, int], dtype: str) -> Buffer:
    """A layer's keys or values. shape: (n_slots, n_head_kv, head_dim)."""
    return Buffer(name, "kv", start, start + shape[0] * slot_bytes(dtype, *shape[1:]), dtype, shape)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 as the bits of bfloat16, to the nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale, and 0 for 0."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def to_q8_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks (.., 32) as bytes (.., 32) and scales (..)."""
    scale = np.abs(x).max(axis=-1) / np.float32(127)
    q = np.rint(x * _inverse(scale)[..., None]).astype(np.int8)
    return q.view(np.uint8), scale.astype(np.float16)


def to_q4_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks (.., 32) as bytes (.., 16) and scales (..)."""
    top = np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)
    scale = top[..., 0] / np.float32(-8)
    q = np.minimum(x * _inverse(scale)[..., None] + np.float32(8.5), 15).astype(np.uint32)
    eights = q.reshape(*q.shape[:-1], 4, 8)  # of a word: two nibbles of a number's pair
    shifts = np.array([4 * (i // 2) + 16 * (i % 2) for i in range(8)], np.uint32)
    words = (eights << shifts).sum(axis=-1, dtype=np.uint32)
    return words.view(np.uint8), scale.astype(np.float16)


def from_q8_0(raw: np.ndarray) -> np.ndarray:
    """The whole numbers of bytes (.., n)."""
    return raw.view(np.int8)


def from_q4_0(raw: np.ndarray) -> np.ndarray:
    """The whole numbers (.., 2n) of bytes (.., n)."""
    shifts = np.array([4 * (i // 2) + 16 * (i % 2) for i in range(8)], np.uint32)
    nibbles = np.ascontiguousarray(raw).view(np.uint32)[..., None] >> shifts & 15
    return nibbles.astype(np.int8).reshape(*raw.shape[:-1], -1) - np.int8(8)


PACK: Mapping[str, tuple[Callable, Callable]] = MappingProxyType(
    {"Q8_0": (to_q8_0, from_q8_0), "Q4_0": (to_q4_0, from_q4_0)}
)


@dataclass(frozen=True, eq=False)
class Cache:
    """A layer's keys or values as numpy has them.

    `array` is (n_slots, n_head_kv, head_dim), of bfloat16 the bits; of a quantised type the bytes,
    (n_slots, slot_bytes).
    """

    array: np.ndarray
    dtype: str
    n_head_kv: int
    head_dim: int

    @property
    def n_slots(self) -> int:
        return len(self.array)

    def read(self, slots: slice | np.ndarray) -> np.ndarray:
        """float32 (n, n_head_kv, head_dim)."""
        found = self.array[slots]
        if self.dtype == "BF16":
            return from_bf16(found)
        if self.dtype not in QUANTISED:
            return found.astype(np.float32, copy=False)
        numbers, scales = self._parts(found)
        whole = PACK[self.dtype][1](numbers).reshape(*scales.shape, BLOCK)
        # Products of a half and a whole number below 128 are exact before they are rounded.
        values = (whole * scales.astype(np.float32)[..., None]).astype(np.float16)
        return values.astype(np.float32).reshape(len(found), self.n_head_kv, self.head_dim)

    def write(self, slots: np.ndarray, x: np.ndarray) -> None:
        """Stores float32 (n, n_head_kv, head_dim)."""
        if self.dtype == "BF16":
            self.array[slots] = to_bf16(x)
        elif self.dtype not in QUANTISED:
            self.array[slots] = x
        else:
            found = self.array[slots]
            for part, new in zip(self._parts(found), PACK[self.dtype][0](
                    x.reshape(len(x), -1, BLOCK)), strict=True):
                part[:] = new.reshape(part.shape)
            self.array[slots] = found

    def _parts(self, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Views of slots' numbers and scales, a half for each block."""
        n = self.n_head_kv * self.head_dim
        end = n * BITS[self.dtype] // 8
        return raw[:, :end], raw[:, end : end + n // BLOCK * 2].view(np.float16)


def empty(n_slots: int, n_head_kv: int, head_dim: int, dtype: str) -> Cache:
    """A cache of zeros."""
    size = slot_bytes(dtype, n_head_kv, head_dim)
    raw: np.ndarray = np.zeros((n_slots, size), np.uint8)
    if dtype not in QUANTISED:
        kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[dtype]
        raw = raw.view(kind).reshape(n_slots, n_head_kv, head_dim)
    return Cache(raw, dtype, n_head_kv, head_dim)


def random_cache(rng: np.random.Generator, n_slots: int, n_head_kv: int, head_dim: int, dtype: str
                 ) -> np.ndarray:
    """The array of a cache of normal numbers."""
    made = empty(n_slots, n_head_kv, head_dim, dtype)
    made.write(np.arange(n_slots), rng.standard_normal((n_slots, n_head_kv, head_dim), np.float32))
    return made.array


def pair(cache_k: np.ndarray, cache_v: np.ndarray, types: tuple[str, str], n_head_kv: int,
         head_dim: int) -> tuple[Cache, Cache]:
    """A layer's keys and values, of their types."""
    return (Cache(cache_k, types[0], n_head_kv, head_dim),
            Cache(cache_v, types[1], n_head_kv, head_dim))
