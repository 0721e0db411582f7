"""Compiles `csrc/` with NVRTC, to CUBIN for one architecture, behind a cache on disk.

A compile unit is a source file with its constants; every entry point of the file whose constants
are given comes out of it. Knows no kernel's parameters and needs no GPU. A machine without NVRTC
runs from a cache that has all it needs, and a cache that cannot be written is only read.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cuda import pathfinder
from cuda.bindings import nvrtc

import llamagraph
from llamagraph.errors import DeviceError

DIGEST_BYTES = 32  # of the checksum that follows a cubin in its cache file
OPTIONS = ("--std=c++17", "-default-device")


@dataclass(frozen=True)
class Unit:
    """A file of `csrc/` and its constants, sorted by name."""

    source: str
    constants: tuple[tuple[str, int | str], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.source, *(f"{name}={value}" for name, value in self.constants)])


@dataclass(frozen=True)
class Resources:
    """What one entry point takes: registers a thread, static shared memory and spills in bytes."""

    registers: int = 0
    shared: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0


def source_folder() -> Path:
    """The kernels' sources: inside the package where it was installed, else beside it."""
    package = Path(llamagraph.__file__).parent
    inside = package / "csrc"
    return inside if inside.is_dir() else package.parent / "csrc"


def header_folder() -> Path:
    """CUDA's own headers, all from one place; DeviceError where there are none."""
    folder = pathfinder.find_nvidia_header_directory("cudart")
    if folder is None:
        raise DeviceError("the CUDA headers (nvidia-cuda-runtime) are not installed")
    return Path(folder)


def nvrtc_version() -> tuple[int, int] | None:
    """Of the NVRTC that would compile; None without one."""
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError:  # pathfinder found no library
        return None
    return major, minor


def resources(log: str) -> dict[str, Resources]:
    """What ptxas' `-v` says of each entry point."""
    found: dict[str, dict[str, int]] = {}
    facts: dict[str, int] = {}
    for line in log.splitlines():
        if m := re.search(r"Compiling entry function '([^']+)'", line):
            facts = found.setdefault(m[1], {})
        elif m := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            facts["stack"], facts["spill_stores"], facts["spill_loads"] = map(int, m.groups())
        elif m := re.search(r"Used (\d+) registers", line):
            facts["registers"] = int(m[1])
            shared = re.search(r"(\d+) bytes smem", line)
            facts["shared"] = int(shared[1]) if shared else 0
    return {name: Resources(**facts) for name, facts in found.items()}


def compile_unit(unit: Unit, arch: str, folder: Path, verbose: bool = False) -> tuple[bytes, str]:
    """The unit's CUBIN and the compiler's log; with `verbose` ptxas tells the resources there.

    DeviceError holds the log of a source that does not compile.
    """
    source = (folder / unit.source).read_bytes()
    options = [*OPTIONS, f"--gpu-architecture={arch}", f"-I{folder}", f"-I{header_folder()}",
               *(f"-D{name}={value}" for name, value in unit.constants),
               *(["--ptxas-options=-v"] if verbose else [])]
    program = _ask(nvrtc.nvrtcCreateProgram, source, unit.source.encode(), 0, [], [])
    try:
        code = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
        log = bytearray(_ask(nvrtc.nvrtcGetProgramLogSize, program))
        _ask(nvrtc.nvrtcGetProgramLog, program, log)
        text = log.rstrip(b"\0").decode(errors="replace").strip()
        if code:
            raise DeviceError(f"{unit} does not compile for {arch}:\n{text or code.name}")
        cubin = bytearray(_ask(nvrtc.nvrtcGetCUBINSize, program))
        _ask(nvrtc.nvrtcGetCUBIN, program, cubin)
        return bytes(cubin), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _ask(function: Any, *args: Any) -> Any:
    """What an NVRTC call returns beside its code."""
    code, *values = function(*args)
    if code:
        raise DeviceError(f"{function.__name__}: {code.name}")
    return values[0] if values else None


class Compiler:
    """CUBINs of units for one architecture, from the cache where it has them.

    `install` is the command that brings a missing NVRTC.
    """

    def __init__(self, arch: str, cache: Path, folder: Path | None = None, install: str = ""):
        self.arch, self.cache, self.folder = arch, cache, folder or source_folder()
        self._install = install
        self.n_compiled = 0

    @cached_property
    def version(self) -> tuple[int, int] | None:
        return nvrtc_version()

    @cached_property
    def _headers(self) -> bytes:
        """Of our own headers: any of them may be part of any source."""
        paths = sorted(p for p in self.folder.iterdir() if p.suffix in (".cuh", ".h"))
        return b"".join(b"%s\0%s\0" % (p.name.encode(), p.read_bytes()) for p in paths)

    def key(self, unit: Unit) -> str:
        """Names all that a CUBIN is made from, but for NVRTC's version."""
        parts = (self.arch, *OPTIONS, str(unit))
        digest = hashlib.sha256("\0".join(parts).encode())
        digest.update((self.folder / unit.source).read_bytes())
        digest.update(self._headers)
        return f"{Path(unit.source).stem}-{self.arch}-{digest.hexdigest()[:32]}"

    def path(self, unit: Unit) -> Path:
        """Where the unit's CUBIN of this NVRTC lies in the cache."""
        assert self.version
        return self.cache / "{}-nvrtc{}.{}.cubin".format(self.key(unit), *self.version)

    def _cached(self, unit: Unit) -> bytes | None:
        """From the cache; without an NVRTC that of any version will do."""
        if self.version:
            paths = [self.path(unit)]
        else:
            paths = sorted(self.cache.glob(f"{self.key(unit)}-nvrtc*.cubin"), reverse=True)
        return next((cubin for p in paths if (cubin := read_cubin(p)) is not None), None)

    def cubin(self, unit: Unit) -> bytes:
        """The unit's CUBIN; DeviceError where it is not cached and cannot be compiled."""
        if (cubin := self._cached(unit)) is not None:
            return cubin
        if self.version is None:
            raise DeviceError(f"{unit} must be compiled, but NVRTC is missing: {self._install}")
        cubin, _ = compile_unit(unit, self.arch, self.folder)
        self.n_compiled += 1
        write_cubin(self.path(unit), cubin)
        return cubin

    def cubins(self, units: Iterable[Unit]) -> dict[Unit, bytes]:
        """Those of many units, compiled side by side: NVRTC lets go of the interpreter's lock."""
        units = list(units)
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            return dict(zip(units, pool.map(self.cubin, units), strict=True))

    def missing(self, units: Iterable[Unit]) -> list[Unit]:
        """Those that will have to be compiled, because they are not in the cache."""
        return [u for u in units if self.version and not self.path(u).exists()]

    def usable(self) -> bool:
        """Whether there is an NVRTC, or a cache that may have all that is needed."""
        return self.version is not None or any(self.cache.glob(f"*-{self.arch}-*.cubin"))


def read_cubin(path: Path) -> bytes | None:
    """A CUBIN from its cache file; None where that is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    cubin, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def write_cubin(path: Path, cubin: bytes) -> None:
    """Puts a CUBIN and its checksum in place in one step; a cache that is read-only stays so."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(cubin + hashlib.sha256(cubin).digest())
        os.replace(new, path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
