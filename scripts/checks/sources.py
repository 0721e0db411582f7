"""Kernels from altered copies of `csrc/`: what a check needs to break one, or to add one.

Knows the compiler and the device, no kernel.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from llamagraph.devices.cuda import find_gpus
from llamagraph.devices.cuda.compiler import Compiler, Unit, source_folder
from llamagraph.devices.cuda.device import CudaDevice
from llamagraph.gguf.hub import cache_folder


def copy_sources(folder: Path, changes: Mapping[str, tuple[str, str]]) -> Path:
    """A copy of `csrc/` in a new folder; `changes`: a file, what stands there once, what instead.

    A file that is not there becomes the new text.
    """
    shutil.copytree(source_folder(), folder)
    for name, (old, new) in changes.items():
        text = (folder / name).read_text() if old else old
        assert not old or text.count(old) == 1, f"{name} has not one {old!r}"
        (folder / name).write_text(text.replace(old, new) if old else new)
    return folder


class AlteredCompiler(Compiler):
    """Takes some units from other folders than `folder`."""

    def __init__(self, arch: str, others: Mapping[Unit, Path], folder: Path | None = None):
        super().__init__(arch, cache_folder() / "kernels", folder)
        self._others = {u: Compiler(arch, self.cache, where) for u, where in others.items()}

    def cubin(self, unit: Unit) -> bytes:
        other = self._others.get(unit)
        return super().cubin(unit) if other is None else other.cubin(unit)


def open_altered(others: Mapping[Unit, Path], folder: Path | None = None) -> CudaDevice:
    """The first GPU with such a compiler."""
    gpu = find_gpus()[0]
    return CudaDevice(gpu, AlteredCompiler(gpu.arch, others, folder), print)
