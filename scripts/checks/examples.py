"""A kernel's examples as buffers: for planning them without a GPU, and for running them on one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamagraph.kernels.examples import RawWeight
from llamagraph.kernels.layouts import stored_bytes
from llamagraph.program.launch import Buffer, Kernel, Launch

NAMES = {"float32": "F32", "float16": "F16", "int32": "I32", "uint32": "U32", "int8": "I8",
         "uint8": "U8", "uint16": "BF16"}
GAP = 1024  # bytes between buffers that nobody may write


@dataclass(frozen=True)
class Example:
    """One set of arguments: `args` as the example gives them, `values` with buffers placed."""

    kernel: Kernel
    args: tuple[Any, ...]
    values: tuple[Any, ...]
    n_bytes: int

    def launch(self, target: Any, pdl: bool = False) -> Launch:
        geometry = self.kernel.geometry(target, *self.values, **dict(self.kernel.constants))
        return Launch(self.kernel, geometry, self.values, self.kernel.name, pdl=pdl)

    def buffers(self) -> Iterator[tuple[Any, Buffer, Any]]:
        """Role, buffer and the example's argument of each that is no number."""
        for param, value, arg in zip(self.kernel.params, self.values, self.args, strict=True):
            if param.role:
                yield param, value, arg


def examples(kernel: Kernel, seed: int = 0) -> Iterator[Example]:
    """All examples of a kernel, with its constants fixed."""
    if kernel.example is None:
        return
    for args, constants in kernel.example(np.random.default_rng(seed)):
        yield place(kernel(**constants), args)


def place(kernel: Kernel, args: tuple[Any, ...]) -> Example:
    """Puts the arguments behind each other, with gaps."""
    values, offset = [], GAP
    for param, arg in zip(kernel.params, args, strict=True):
        value = arg if param.role is None else buffer_of(param.name, arg).at(offset)
        if isinstance(value, Buffer):
            offset = -(-(value.stop + GAP) // 256) * 256
        values.append(value)
    return Example(kernel, args, tuple(values), offset)


def buffer_of(name: str, arg: Any) -> Buffer:
    """What stands for an array or a weight."""
    if isinstance(arg, RawWeight):
        n_bytes = stored_bytes(arg.dtype, arg.shape, arg.layout)
        return Buffer(name, "scratch", 0, n_bytes, arg.dtype, arg.shape, arg.layout)
    return Buffer(name, "scratch", 0, arg.nbytes, NAMES[str(arg.dtype)], arg.shape)


def raw_bytes(buffer: Buffer) -> Buffer:
    """The same range as bytes."""
    return replace(buffer, dtype="U8", shape=(buffer.n_bytes,), layout="")
