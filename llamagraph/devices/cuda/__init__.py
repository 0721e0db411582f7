"""The CUDA device: opened here, where it is found out why it cannot be.

Looking for the driver takes no more than `ctypes`, so a machine without a GPU pays no import of
`cuda.bindings`.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any

from llamagraph.errors import DeviceError
from llamagraph.program.target import Target, capability_of

OLDEST_DRIVER = (12, 0)
OLDEST_CAPABILITY = (7, 5)
DRIVER_LIBRARY = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"


def driver_version(library: str = DRIVER_LIBRARY) -> tuple[int, int] | None:
    """The newest CUDA version that the NVIDIA driver supports; None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def install_command(version: tuple[int, int]) -> str:
    """The command that brings what a driver of that CUDA version needs."""
    return f"pip install 'llamagraph[cu{min(version[0], 13)}]'"


def check_driver(version: tuple[int, int] | None) -> tuple[int, int]:
    """DeviceError where there is no driver, or an older one than any of our CUBINs loads on."""
    if version is None:
        raise DeviceError("no GPU: there is no NVIDIA driver (libcuda) on this machine")
    if version < OLDEST_DRIVER:
        raise DeviceError(
            f"the NVIDIA driver is too old: it supports CUDA {version[0]}.{version[1]}, "
            f"{OLDEST_DRIVER[0]}.{OLDEST_DRIVER[1]} is needed; install driver 525 or later"
        )
    return version


def check_package(name: str, package: tuple[int, int], version: tuple[int, int]) -> None:
    """DeviceError where a package is of a later CUDA major version than the driver."""
    if package[0] > version[0]:
        raise DeviceError(
            f"{name} {package[0]}.{package[1]} needs a later NVIDIA driver than this one for CUDA "
            f"{version[0]}.{version[1]}; update the driver, or {install_command(version)}"
        )


def find_gpus() -> list[Any]:
    """Facts about every GPU (`driver.Gpu`); DeviceError says why there is none."""
    version = check_driver(driver_version())
    try:
        from llamagraph.devices.cuda import driver
    except ImportError as error:
        raise DeviceError(
            f"cuda-bindings is not installed ({error}): {install_command(version)}"
        ) from error
    check_package("cuda-bindings", driver.bindings_version(), version)
    return driver.gpus()


def describe_gpus() -> list[str]:
    """A line a GPU; DeviceError says why there is none."""
    return [
        f"cuda:{gpu.ordinal}  {gpu.name}, {gpu.arch}, {gpu.n_sm} multiprocessors, "
        f"{gpu.n_bytes / 1e9:.1f} GB"
        for gpu in find_gpus()
    ]


def check_tuning(chosen: Target, arch: str) -> None:
    """DeviceError for a target whose kernels a GPU of architecture `arch` may not have."""
    foreign = chosen.name.endswith("a") and chosen.name != arch  # has instructions of its own
    if not chosen.is_cuda or foreign or chosen.capability > capability_of(arch):
        raise DeviceError(f"--arch-tuning {chosen.name}: {arch} may not have its kernels; name "
                          f"{arch} or an older architecture")


def open_cuda(ordinal: int, warn: Callable[[str], None], persist: bool = False,
              chosen: Target | None = None) -> Any:
    """The device of a GPU; DeviceError, in one line, says what it lacks.

    `persist`: see `CudaDevice`. Programs are planned with the choices of the target `chosen`, if
    one is given.
    """
    gpus = find_gpus()
    if ordinal >= len(gpus):
        raise DeviceError(f"--device cuda:{ordinal}: there are {len(gpus)} GPUs, counted from 0")
    gpu = gpus[ordinal]
    if gpu.capability < OLDEST_CAPABILITY:
        raise DeviceError(f"{gpu.name} is {gpu.arch}; sm_75 is the oldest that is supported")
    if chosen is not None:
        check_tuning(chosen, gpu.arch)
    from llamagraph.devices.cuda.compiler import Compiler
    from llamagraph.devices.cuda.device import CudaDevice
    from llamagraph.devices.cuda.tuning import read_tuning, tuning_file
    from llamagraph.gguf.hub import cache_folder

    version = check_driver(driver_version())
    compiler = Compiler(gpu.arch, cache_folder() / "kernels", install=install_command(version))
    if compiler.version:
        check_package("NVRTC", compiler.version, version)
    elif not compiler.usable():
        raise DeviceError(
            f"NVRTC, which compiles the GPU's kernels, is missing: {install_command(version)}"
        )
    tuning = () if chosen is not None else read_tuning(tuning_file(gpu.name), warn)
    return CudaDevice(gpu, compiler, warn, tuning, persist, chosen)
