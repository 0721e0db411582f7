"""LoRA adapters: GGUF files that change some of a model's matrices by products of low rank.

W x becomes W x + scale * alpha / rank * B (A x) (Hu et al., arXiv:2106.09685). Here a file is held
against the model that it shall adapt, and its tensors are named as weights; what is launched for
them is up to the kernels. Which tensors there may be, and that an alpha of 0 stands for the rank,
are llama.cpp's rules (llama-adapter.cpp). Knows no device.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llamagraph.errors import FormatError, LlamaGraphError
from llamagraph.gguf.parser import TensorInfo
from llamagraph.gguf.reader import GGUFFile
from llamagraph.program.launch import Buffer, StepKey
from llamagraph.program.weights import ROWS, LowRank

EMBEDDING = "token_embd.weight"
WHOLE = 32  # numbers of a row come in blocks of so many: ranks are filled up with zeros
HALVES = (".lora_a", ".lora_b")
Source = str | Path | tuple[str | Path, float]


class Stored(NamedTuple):
    """One of an adapter's matrices as a weight: bytes of the file, and zeros up to `shape`.

    `multiplies_rows`: it meets what a model's own matrix meets, many rows of F16 in a prompt.
    """

    dtype: str
    shape: tuple[int, ...]
    file: GGUFFile
    tensor: str
    multiplies_rows: bool

    def raw(self) -> np.ndarray:
        """uint8 (n_bytes,). A block of zero bytes is one of zeros, in every type."""
        rows = _matrix(self.file.tensors[self.tensor])[0]
        bytes_of = self.file.data(self.tensor).reshape(rows, -1)
        info = self.file.tensors[self.tensor]
        width = info.quant.row_bytes(self.shape[1])
        more = (0, self.shape[0] - rows), (0, width - bytes_of.shape[1])
        return np.pad(bytes_of, more).reshape(-1)


def _matrix(info: TensorInfo) -> tuple[int, ...]:
    """The shape; of rank 1 some writers leave the 1 away."""
    return info.shape if len(info.shape) > 1 else (1, *info.shape)


def _whole(rank: int) -> int:
    return -(-rank // WHOLE) * WHOLE


class Adapter:
    """An adapter's file, open, which fits `base`. `ranks` are those of the tensors it changes.

    Raises FormatError with the file, the key or tensor, and what to do.
    """

    def __init__(self, path: str | Path, base: GGUFFile, name: str = "lora",
                 warn: Callable[[str], None] = lambda _: None):
        self.file, self.name = GGUFFile(path), name
        try:
            self._check_keys(base)
            self.alpha = self.file.metadata.scalar("adapter.lora.alpha", float, 0.0)
            self.ranks = {target: self._rank(target, base) for target in self._targets(warn)}
        except BaseException:
            self.file.close()
            raise

    def error(self, problem: str) -> FormatError:
        return FormatError(f"{self.file.path}: {problem}")

    def _check_keys(self, base: GGUFFile) -> None:
        keys, key = self.file.metadata, "adapter.alora.invocation_tokens"
        if (kind := keys.scalar("general.type", str, "model")) != "adapter":
            raise self.error(f"general.type is {kind!r}, not 'adapter'; a model is given with -m")
        if (kind := keys.require("adapter.type", str)) != "lora":
            raise self.error(f"adapter.type is {kind!r}; LoRA adapters alone can be applied")
        arch, wanted = (x.require("general.architecture", str) for x in (keys, base.metadata))
        if arch != wanted:
            raise self.error(f"general.architecture is {arch!r}, that of {base.path} is "
                             f"{wanted!r}; take an adapter of this model")
        if key in keys:
            raise self.error(f"{key} is there: an activated LoRA, which works from these tokens "
                             "on alone, is not supported; take a plain one")

    def _targets(self, warn: Callable[[str], None]) -> list[str]:
        """The names of the base's tensors that pairs are for, in the file's order."""
        found: dict[str, None] = {}
        for tensor in self.file.tensors:
            target, half = tensor[:-7], tensor[-7:]
            if half in HALVES:
                found[target] = None
            elif tensor.endswith("_norm.weight"):
                warn(f"{self.file.path}: {tensor} is left out: norms are not adapted")
            else:
                raise self.error(f"tensor {tensor} ends in neither .lora_a nor .lora_b; "
                                 "convert the adapter again")
        if not found:
            raise self.error("there is no tensor that ends in .lora_a; convert the adapter again")
        return list(found)

    def _rank(self, target: str, base: GGUFFile) -> int:
        """The rank of the pair, whose shapes must be those that the base's tensor asks for."""
        for half in HALVES:
            if target + half not in self.file.tensors:
                raise self.error(f"tensor {target}{half} is missing, half of a pair; "
                                 "convert the adapter again")
        if target not in base.tensors:
            raise self.error(f"tensor {target}{HALVES[0]} changes {target}, which {base.path} does "
                             "not have; take an adapter of this model")
        shape = tuple(base.tensors[target].shape)
        a, b = (self._shape_of(target + half) for half in HALVES)
        rank = b[1]
        wanted = (rank, shape[-1]), (shape[0], rank)
        if target == EMBEDDING:  # a row of A for each token
            wanted = (shape[0], rank), (shape[-1], rank)
        if len(shape) != 2 or (a, b) != wanted:
            raise self.error(f"tensors {target}.lora_a and .lora_b are {_times(a)} and {_times(b)},"
                             f" which does not fit {_times(shape)} in {base.path}; take an adapter "
                             "of this model")
        return rank

    def _shape_of(self, tensor: str) -> tuple[int, int]:
        shape = _matrix(self.file.tensors[tensor])
        if len(shape) != 2 or 0 in shape:
            raise self.error(f"tensor {tensor} is {_times(shape)}, not a matrix")
        return shape[0], shape[1]

    def factor(self, target: str) -> float:
        """alpha / rank."""
        return self.alpha / self.ranks[target] if self.alpha else 1.0

    def weight_name(self, target: str, half: str) -> str:
        return f"{self.name}:{target}{half}"

    def stored(self) -> Iterator[tuple[str, Stored]]:
        """Its matrices by the names of their weights, ranks filled up."""
        for target, rank in self.ranks.items():
            for half in HALVES:
                info = self.file.tensors[target + half]
                rows, columns = _matrix(info)
                first = half == HALVES[0] and target != EMBEDDING
                shape = (_whole(rank), columns) if first else (rows, _whole(rank))
                yield self.weight_name(target, half), Stored(
                    info.quant.name, shape, self.file, info.name, first)


class Adapters:
    """The adapters of a model, in their order, each with a scale that may change.

    `sources` are files, alone or each with its scale. An adapter is known by its file's name
    without the ending, a second one of that name by a number behind it.
    """

    def __init__(self, sources: Iterable[Source], base: GGUFFile,
                 warn: Callable[[str], None] = lambda _: None):
        self.scales: dict[str, float] = {}
        self._adapters: list[Adapter] = []
        try:
            for source in sources:
                path, scale = source if isinstance(source, tuple) else (source, 1.0)
                name = self._free_name(Path(path).stem)
                self._adapters.append(Adapter(path, base, name, warn))
                self.scales[name] = _finite(f"{path}", scale)
        except BaseException:
            self.close()
            raise
        self.stored = {name: s for x in self._adapters for name, s in x.stored()}

    def _free_name(self, stem: str) -> str:
        names = [stem, *(f"{stem}#{i + 2}" for i in range(len(self.scales)))]
        return next(name for name in names if name not in self.scales)

    def __len__(self) -> int:
        return len(self._adapters)

    def tables(self) -> dict[str, np.ndarray]:
        """The bytes of all matrices, by the names of their weights."""
        return {name: stored.raw() for name, stored in self.stored.items()}

    def write(self, memory: Any, io: Mapping[str, Buffer]) -> None:
        """Writes the scales into a device's `io`."""
        if self.scales:
            memory.write(io["lora_scales"], list(self.scales.values()))

    def set(self, name: str, scale: float) -> None:
        """Gives an adapter another scale; LlamaGraphError where there is none of that name."""
        if name not in self.scales:
            raise LlamaGraphError(f"there is no adapter {name!r}; there are "
                                  f"{', '.join(self.scales) or 'none'}")
        self.scales[name] = _finite(name, scale)

    def key(self, key: StepKey) -> StepKey:
        """The program of a step with the adapters whose scale is not 0; others cost nothing."""
        on = tuple(name for name, scale in self.scales.items() if scale != 0)
        return replace(key, adapters=on)

    def applied(self) -> list[tuple[GGUFFile, float]]:
        """Files and scales of those that steps apply; the files may be closed."""
        return [(x.file, self.scales[x.name]) for x in self._adapters if self.scales[x.name]]

    def changes(self, key: StepKey, weights: Mapping[str, Buffer], scales: Buffer
                ) -> dict[str, list[LowRank]]:
        """What the key's adapters add, by the tensor that it is added to; see `Weights`."""
        found: dict[str, list[LowRank]] = {}
        for i, adapter in enumerate(self._adapters):
            if adapter.name not in key.adapters:
                continue
            for target in adapter.ranks:
                where = target.removesuffix("weight") + ROWS if target == EMBEDDING else target
                a, b = (weights[adapter.weight_name(target, half)] for half in HALVES)
                found.setdefault(where, []).append(LowRank(
                    adapter.name, f"lora{i or ''}", a, b, scales, i, adapter.factor(target)))
        return found

    def close(self) -> None:
        """Lets go of the files; the scales stay."""
        for adapter in self._adapters:
            adapter.file.close()

    def __enter__(self) -> "Adapters":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _finite(name: str, scale: Any) -> float:
    if not isinstance(scale, Real) or not isfinite(scale):
        raise LlamaGraphError(f"{name}: the scale of an adapter is a number, not {scale!r}")
    return float(scale)


def _times(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))
