"""Memory of the CUDA driver: allocated, mapped by pages, pinned, copied. Knows no arena."""

import ctypes
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from llamagraph.devices.cuda.driver import Gpu, Stream, call
from llamagraph.errors import LlamaGraphError


def free_bytes() -> int:
    """Of the current GPU's memory."""
    return call(cu.cuMemGetInfo, doing="asking for free memory")[0]


def allocate(n_bytes: int, doing: str) -> int:
    return int(call(cu.cuMemAlloc, n_bytes, doing=doing))


def release(address: int) -> None:
    call(cu.cuMemFree, address, doing="freeing memory")


def allocate_queued(n_bytes: int, stream: Stream, doing: str) -> int:
    """Memory that is there for what is queued from now on."""
    return int(call(cu.cuMemAllocAsync, n_bytes, stream.handle, doing=doing))


def release_queued(address: int, stream: Stream) -> None:
    """Gives it back behind what is queued so far."""
    call(cu.cuMemFreeAsync, address, stream.handle, doing="freeing queued memory")


def _page_kind(gpu: Gpu) -> Any:
    kind = cu.CUmemAllocationProp()
    kind.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    kind.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    kind.location.id = gpu.ordinal
    return kind


def page_bytes(gpu: Gpu) -> int:
    """The smallest range that can be mapped."""
    flags = cu.CUmemAllocationGranularity_flags
    return call(cu.cuMemGetAllocationGranularity, _page_kind(gpu),
                flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM, doing="asking for the page size")


def reserve(n_bytes: int) -> int:
    """A range of addresses without memory; n_bytes in whole pages."""
    return int(call(cu.cuMemAddressReserve, n_bytes, 0, 0, 0,
                    doing=f"reserving {n_bytes} bytes of addresses"))


def unreserve(address: int, n_bytes: int) -> None:
    call(cu.cuMemAddressFree, address, n_bytes, doing="freeing a range of addresses")


def map_pages(gpu: Gpu, address: int, n_bytes: int, doing: str) -> Any:
    """Puts memory behind a part of a reserved range; the handle for `unmap_pages`."""
    pages = call(cu.cuMemCreate, n_bytes, _page_kind(gpu), 0, doing=doing)
    access = cu.CUmemAccessDesc()
    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = gpu.ordinal
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    try:
        call(cu.cuMemMap, address, n_bytes, 0, pages, 0, doing=doing)
        call(cu.cuMemSetAccess, address, n_bytes, [access], 1, doing=doing)
    except LlamaGraphError:
        cu.cuMemRelease(pages)  # goes once it is unmapped as well
        raise
    return pages


def unmap_pages(address: int, n_bytes: int, pages: Any) -> None:
    call(cu.cuMemUnmap, address, n_bytes, doing="unmapping memory")
    call(cu.cuMemRelease, pages, doing="freeing mapped memory")


class Pinned:
    """Host memory that the GPU copies from and to by itself. `bytes`: uint8 (n_bytes,)."""

    def __init__(self, n_bytes: int):
        self.address = int(call(cu.cuMemHostAlloc, n_bytes, 0, doing="pinning host memory"))
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(self.address))

    def close(self) -> None:
        call(cu.cuMemFreeHost, self.address, doing="freeing pinned memory")


def copy_in(target: int, source: int, n_bytes: int, stream: Stream) -> None:
    """Queues a copy from pinned host memory."""
    call(cu.cuMemcpyHtoDAsync, target, source, n_bytes, stream.handle, doing="writing to the GPU")


def copy_out(target: int, source: int, n_bytes: int, stream: Stream) -> None:
    """Queues a copy to host memory."""
    call(cu.cuMemcpyDtoHAsync, target, source, n_bytes, stream.handle,
         doing="reading from the GPU")


def fill(target: int, byte: int, n_bytes: int, stream: Stream) -> None:
    """Queues the filling of GPU memory with one byte."""
    call(cu.cuMemsetD8Async, target, byte, n_bytes, stream.handle, doing="filling GPU memory")
