"""Takes the bytes of one GGUF file apart: version, key-value pairs and tensor infos.

Knows the container (ggml's gguf.h, versions 2 and 3) and checks every rule that ggml's own reader
checks. Does not know what any key or tensor means, nor that a model may span files. The bytes are
never trusted: each count and length is held against what is left of the file before anything is
allocated, and what is wrong is a FormatError of one line that names file and place.

Texts are UTF-8 by custom, not by rule: bytes that are not come back as lone surrogates
(`surrogateescape`), so `text.encode("utf-8", "surrogateescape")` is always the file's bytes.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from llamagraph.errors import FormatError
from llamagraph.gguf.quants import QUANTS_BY_ID, Quant, supported_types

_VERSIONS = (2, 3)
_MAX_STRING = 1 << 30  # bytes
_MAX_ARRAY = 1 << 30  # elements
_MAX_NAME = 64  # bytes of a tensor's name, with the zero that ends it in C
_MAX_DIMS = 4
_MAX_ELEMENTS = (1 << 63) - 1
_DEFAULT_ALIGNMENT = 32
# The fewest bytes of a key with its value, and of a tensor info with no dimensions.
_LEAST_PAIR = 8 + 1 + 4 + 1
_LEAST_INFO = 8 + 4 + 4 + 8

_U32, _U64 = np.dtype("<u4"), np.dtype("<u8")
_BOOL, _STRING, _ARRAY = 7, 8, 9
# gguf_metadata_value_type of the numbers; a bool is stored as int8.
_NUMBERS: Mapping[int, np.dtype] = MappingProxyType(
    {
        0: np.dtype("<u1"),
        1: np.dtype("<i1"),
        2: np.dtype("<u2"),
        3: np.dtype("<i2"),
        4: _U32,
        5: np.dtype("<i4"),
        6: np.dtype("<f4"),
        _BOOL: np.dtype("<i1"),
        10: _U64,
        11: np.dtype("<i8"),
        12: np.dtype("<f8"),
    }
)
_LOOKS_LIKE = (
    (b"PK\x03\x04", "a zip archive, perhaps a PyTorch model"),
    (b"\x80", "a pickled PyTorch model"),
    (b"version https://git-lfs", "a git-lfs pointer: fetch the model with `git lfs pull`"),
    (b"<", "a web page: the download went wrong"),
    (b"lmgg", "a GGML file from before GGUF"),
    (b"tjgg", "a GGML file from before GGUF"),
    (b"\0\0\0\0", "zeros: the download was not finished"),
)


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is and what it holds; `shape` has rows first, as in numpy."""

    name: str
    shape: tuple[int, ...]
    quant: Quant
    n_bytes: int
    offset: int  # bytes from the start of `path`
    path: Path


@dataclass(frozen=True)
class Parsed:
    """What one file says of itself; `tensors` in the file's order."""

    version: int
    values: dict[str, Any]
    tensors: dict[str, TensorInfo]


def parse(path: Path, data: mmap.mmap) -> Parsed:
    """Take `data`, the whole of the file `path`, apart. Raises FormatError."""
    return _Parser(path, data).parse()


def brief(value: Any) -> str:
    """A value out of a file, short and on one line, for an error message."""
    if isinstance(value, (list, np.ndarray)):
        return f"an array of {len(value)}"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 70 else text[:70] + "..."


class _Parser:
    """A position in a file that only moves forward, and what is being read there."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.pos = 0
        self.place = "the header"

    def parse(self) -> Parsed:
        version = self.header()
        n_tensors = self.count("tensors", _LEAST_INFO)
        n_pairs = self.count("keys", _LEAST_PAIR)
        values = self.pairs(n_pairs)
        alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
        if alignment < 1 or alignment & (alignment - 1):
            raise self.error(f"general.alignment is {alignment}, not a power of two")
        return Parsed(version, values, self.tensors(n_tensors, alignment))

    def error(self, problem: str) -> FormatError:
        return FormatError(f"{self.path}: {problem}")

    def skip(self, n_bytes: int) -> int:
        """Pass over the next bytes, which must be there; their position."""
        start = self.pos
        if n_bytes > self.size - start:
            raise self.error(
                f"ends inside {self.place}: cut off or damaged "
                f"({n_bytes} bytes wanted at {start}, the file has {self.size}); download it again"
            )
        self.pos = start + n_bytes
        return start

    def numbers(self, dtype: np.dtype, count: int) -> np.ndarray:
        """A view of the map (count,); copy what shall outlive it."""
        start = self.skip(count * dtype.itemsize)
        return np.frombuffer(self.data, dtype, count, start)

    def number(self, dtype: np.dtype) -> Any:
        return self.numbers(dtype, 1)[0].item()

    def string(self) -> str:
        n_bytes = self.number(_U64)
        if n_bytes > _MAX_STRING:
            raise self.error(f"a length of {n_bytes} bytes in {self.place} is over 1 GiB: damaged")
        start = self.skip(n_bytes)
        return self.data[start : self.pos].decode("utf-8", "surrogateescape")

    def strings(self, count: int) -> list[str]:
        """`string` many times; one tight loop, for a vocabulary has hundreds of thousands."""
        data, size, pos = self.data, self.size, self.pos
        length_at = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        for _ in range(count):
            length = length_at(data, pos)[0] if pos + 8 <= size else size
            start = pos + 8
            end = start + length
            if end > size or length > _MAX_STRING:
                self.pos = pos
                self.string()  # says what is wrong
            texts.append(data[start:end].decode("utf-8", "surrogateescape"))
            pos = end
        self.pos = pos
        return texts

    def header(self) -> int:
        if self.data[:4] != b"GGUF":
            raise self.error(f"is not a GGUF file; it looks like {self.looks_like()}")
        self.skip(4)
        version = self.number(_U32)
        if version and version & 0xFFFF == 0:
            raise self.error("is a big-endian GGUF file; get or convert to the little-endian one")
        if version not in _VERSIONS:
            raise self.error(f"is GGUF version {version}; versions 2 and 3 can be read")
        return version

    def looks_like(self) -> str:
        start = self.data[:64]
        for magic, what in _LOOKS_LIKE:
            if start.lstrip().startswith(magic):
                return what
        if start[8:9] == b"{":  # after the eight bytes of its length
            return "a safetensors file: convert it to GGUF"
        return f"something else (it starts with {start[:8]!r})"

    def count(self, what: str, least: int) -> int:
        """The number of things that follow, of which the rest of the file can hold that many."""
        count = self.number(_U64)
        if count * least > self.size - self.pos:
            raise self.error(
                f"counts {count} {what}, more than its {self.size} bytes can hold: "
                "cut off or damaged; download it again"
            )
        return count

    def pairs(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for i in range(count):
            self.place = f"key {i + 1} of {count}"
            key = self.string()
            if not key:
                raise self.error(f"{self.place} is empty")
            if key in values:
                raise self.error(f"key {brief(key)} is there twice")
            self.place = f"the value of {brief(key)}"
            kind = self.number(_U32)
            if key == "general.alignment" and _NUMBERS.get(kind) != _U32:
                raise self.error(f"general.alignment is of value type {kind}, not uint32")
            values[key] = self.array() if kind == _ARRAY else self.value(kind)
        return values

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind not in _NUMBERS:
            raise self.error(f"{self.place} is of unknown type {kind}")
        value = self.number(_NUMBERS[kind])
        return value != 0 if kind == _BOOL else value

    def array(self) -> Any:
        kind, count = self.number(_U32), self.number(_U64)
        if kind not in _NUMBERS and kind != _STRING:
            what = "arrays" if kind == _ARRAY else f"unknown type {kind}"
            raise self.error(f"{self.place} is an array of {what}, which GGUF does not have")
        least = 8 if kind == _STRING else _NUMBERS[kind].itemsize
        if count > _MAX_ARRAY or count * least > self.size - self.pos:
            raise self.error(
                f"{self.place} counts {count} elements, more than the rest of the file can hold: "
                "cut off or damaged; download it again"
            )
        if kind == _STRING:
            return self.strings(count)
        values = self.numbers(_NUMBERS[kind], count)
        return values != 0 if kind == _BOOL else values.copy()

    def tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        """All tensor infos; each tensor must start where the one before it ends, padded."""
        rows = []
        for i in range(count):
            self.place = f"the info of tensor {i + 1} of {count}"
            rows.append(self.tensor())
        infos: dict[str, TensorInfo] = {}
        data_start = _padded(self.pos, alignment)
        expected = 0
        for name, shape, quant, offset in rows:
            if name in infos:
                raise self.error(f"tensor {brief(name)} is there twice")
            if offset != expected:
                raise self.error(f"tensor {brief(name)} has offset {offset}, not {expected}")
            n_bytes = prod(shape) // quant.block * quant.n_bytes
            start = data_start + offset
            if start + n_bytes > self.size:
                raise self.error(
                    f"ends inside tensor {brief(name)}: cut off or damaged (it needs "
                    f"{start + n_bytes} bytes, the file has {self.size}); download it again"
                )
            infos[name] = TensorInfo(name, shape, quant, n_bytes, start, self.path)
            expected += _padded(n_bytes, alignment)
        return infos

    def tensor(self) -> tuple[str, tuple[int, ...], Quant, int]:
        """Name, shape, type, and offset in the data section, of the next tensor."""
        name = self.string()
        label = f"tensor {brief(name)}"
        if len(name.encode("utf-8", "surrogateescape")) >= _MAX_NAME:
            raise self.error(f"{label}: its name has {_MAX_NAME} bytes or more")
        if (n_dims := self.number(_U32)) > _MAX_DIMS:
            raise self.error(f"{label} has {n_dims} dimensions, at most {_MAX_DIMS} are possible")
        shape = tuple(self.numbers(_U64, n_dims)[::-1].tolist())
        if max(shape, default=0) > _MAX_ELEMENTS or prod(shape) > _MAX_ELEMENTS:
            raise self.error(f"{label} cannot have the shape {shape}")
        quant = self.quant(label)
        if (n_cols := shape[-1] if shape else 1) % quant.block:
            raise self.error(
                f"{label} has rows of {n_cols}, not a multiple of {quant.block} ({quant.name})"
            )
        return name, shape, quant, self.number(_U64)

    def quant(self, label: str) -> Quant:
        number = self.number(_U32)
        quant = QUANTS_BY_ID.get(number)
        if quant is None:
            raise self.error(f"{label} is of unknown type {number}; {supported_types()}")
        if not quant.supported:
            raise self.error(f"{label} is of type {quant.name}; {supported_types()}")
        return quant


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment
