"""Devices by name, and what they share. What a device is stands in `program/device.py`."""

from collections.abc import Callable
from types import MappingProxyType

from llamagraph.errors import DeviceError, MemoryLimitError
from llamagraph.program.device import Device
from llamagraph.program.target import Target, target_named

# A buffer's type as numpy has it.
DTYPES = MappingProxyType({"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "U32": "<u4",
                           "I8": "<i1", "U8": "<u1"})


def open_device(name: str = "auto", *, n_threads: int | None = None, persist: bool = False,
                arch_tuning: str | None = None, warn: Callable[[str], None]) -> Device:
    """The device that `--device` names: auto, cpu, cuda, or cuda:1 for the second GPU.

    `auto` takes a GPU that can be used, else says through `warn` in one line why the CPU runs.
    `n_threads` are the CPU's; with `persist` a GPU sets L2 cache aside for weights. `arch_tuning`
    names a target whose choices of kernels programs are planned with; the kernels are still
    compiled for the GPU that is there. Raises DeviceError.
    """
    chosen = target_named(arch_tuning) if arch_tuning else None
    kind, _, ordinal = name.partition(":")
    if kind == "cuda" and (ordinal.isdigit() or name == "cuda"):
        return _open_cuda(int(ordinal or 0), warn, persist, chosen)
    if name not in ("auto", "cpu"):
        raise DeviceError(f"--device {name}: there are auto, cpu, cuda and cuda:N")
    if name == "auto":
        try:
            return _open_cuda(0, warn, persist, chosen)
        except (DeviceError, MemoryLimitError) as error:
            warn(f"{error}; using the CPU")
    from llamagraph.devices.cpu import CpuDevice

    return CpuDevice(chosen, n_threads)


def _open_cuda(ordinal: int, warn: Callable[[str], None], persist: bool,
               chosen: Target | None) -> Device:
    from llamagraph.devices.cuda import open_cuda

    return open_cuda(ordinal, warn, persist, chosen)


def list_devices() -> list[str]:
    """A line a device that `open_device` can open; why there is no GPU stands in the last."""
    from llamagraph.devices.cuda import describe_gpus

    try:
        lines = describe_gpus()
    except DeviceError as error:
        return ["cpu", f"({error})"]
    return [*lines, "cpu"]
