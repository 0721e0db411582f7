"""An open GGUF model: its metadata, its tensor infos and, through a memory map, its bytes.

Knows that a model may be split over files, and how to look a key up so that a wrong or missing one
names the file. Does not know what a key or tensor means, nor how bytes become numbers (quants.py).
"""

import mmap
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from types import EllipsisType, MappingProxyType
from typing import Any, TypeVar

import numpy as np

from llamagraph.errors import FormatError
from llamagraph.gguf.parser import Parsed, TensorInfo, brief, parse

__all__ = ["GGUFFile", "Metadata", "TensorInfo"]

T = TypeVar("T")
D = TypeVar("D")

_KINDS: Mapping[type, str] = MappingProxyType(
    {
        int: "a whole number",
        float: "a finite number",
        bool: "true or false",
        str: "a text",
        list: "a list of texts",
        np.ndarray: "an array of numbers",
    }
)


class Metadata(Mapping[str, Any]):
    """A file's key-value pairs: numbers, bools, texts, lists of texts, numpy arrays of numbers."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def require(self, key: str, kind: type[T]) -> T:
        """The value of `key`, which must be of `kind`: int, float, bool, str, list or np.ndarray.

        A whole number is a float too, a bool is no number, and a float must be finite.
        """
        if key not in self._values:
            raise FormatError(f"{self.path}: {key} is missing ({_KINDS[kind]} is needed)")
        value = self._values[key]
        if kind is float and type(value) in (int, float) and isfinite(value):
            value = float(value)
        elif type(value) is not kind or kind is float:
            raise FormatError(f"{self.path}: {key} is {brief(value)}, not {_KINDS[kind]}")
        return value

    def scalar(self, key: str, kind: type[T], default: D | EllipsisType = ...) -> T | D:
        """As `require`; a key that is missing gives `default`, where there is one."""
        if key not in self._values and not isinstance(default, EllipsisType):
            return default
        return self.require(key, kind)


class GGUFFile:
    """An open GGUF file, or every part of a split one, given the first.

    `tensors` are in the file's order. Arrays from `data` stay valid after `close`, which only lets
    go of the maps. `overrides` are keys in place of the file's; "{arch}" in one stands for the
    architecture. Raises FormatError for whatever is wrong with the file.
    """

    def __init__(self, path: str | Path, overrides: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self._maps: dict[Path, mmap.mmap] = {}
        try:
            first = self._open(self.path)
            self.version = first.version
            self.tensors = first.tensors
            given = overrides or {}
            values = first.values | {k: v for k, v in given.items() if k in first.values}
            self.architecture = str(values.get("general.architecture", ""))
            values |= {k.replace("{arch}", self.architecture): v for k, v in given.items()}
            self.metadata = Metadata(self.path, values)
            self._open_other_parts()
        except BaseException:
            self.close()
            raise

    def data(self, name: str) -> np.ndarray:
        """The tensor's bytes in the file, uint8 (n_bytes,): a read-only view of the map."""
        info = self.tensors[name]
        return np.frombuffer(self._maps[info.path], np.uint8, info.n_bytes, info.offset)

    def close(self) -> None:
        """Let go of the maps; a map ends with the last array that looks into it."""
        self._maps.clear()

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, path: Path) -> Parsed:
        self._maps[path] = data = _map(path)
        return parse(path, data)

    def _open_other_parts(self) -> None:
        """Add the tensors of the parts 2, 3, ..., where split.count says that there are any."""
        count = self.metadata.scalar("split.count", int, 1)
        if count <= 1:
            return
        if (number := self.metadata.scalar("split.no", int, 0)) != 0:
            raise FormatError(f"{self.path}: is part {number + 1} of {count}; open the first part")
        ending = f"-00001-of-{count:05d}.gguf"
        prefix = self.path.name.removesuffix(ending)
        if prefix == self.path.name:
            raise FormatError(f"{self.path}: is part 1 of {count}, its name must end in {ending}")
        for number in range(1, count):
            name = f"{prefix}-{number + 1:05d}-of-{count:05d}.gguf"
            self._add_part(self.path.with_name(name), number, count)
        expected = self.metadata.require("split.tensors.count", int)
        if len(self.tensors) != expected:
            raise FormatError(
                f"{self.path}: split.tensors.count is {expected}, "
                f"the {count} parts hold {len(self.tensors)} tensors"
            )

    def _add_part(self, path: Path, number: int, count: int) -> None:
        if not path.exists():
            raise FormatError(f"{path}: is missing, part {number + 1} of {count} of this model")
        part = self._open(path)
        metadata = Metadata(path, part.values)
        for key, expected in (("split.no", number), ("split.count", count)):
            if (found := metadata.require(key, int)) != expected:
                raise FormatError(f"{path}: {key} is {found}, not {expected}")
        for name, info in part.tensors.items():
            if self.tensors.setdefault(name, info) is not info:
                raise FormatError(f"{path}: tensor {brief(name)} is in an earlier part too")


def _map(path: Path) -> mmap.mmap:
    """The whole file as a read-only memory map."""
    try:
        if path.is_dir():
            raise FormatError(f"{path}: is a folder; give the .gguf file in it")
        if path.exists() and not path.is_file():  # a pipe would block, and has no size
            raise FormatError(f"{path}: is not a regular file")
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise FormatError(f"{path}: is empty; download it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: a path that holds a zero byte
        reason = getattr(error, "strerror", None) or error
        raise FormatError(f"{path}: cannot be read: {reason}") from error
