"""GPU memory: arenas that grow by pages, uploads through pinned memory, small reads and writes.

An arena is a reserved range of addresses; pages are mapped behind it when they are asked for, so no
buffer ever moves. Knows buffers and a stream, no kernel: how a weight is rearranged is a launch
that the caller gives.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from llamagraph.devices import DTYPES
from llamagraph.devices.cuda import driver, driver_memory
from llamagraph.errors import MemoryLimitError
from llamagraph.program.device import Repack
from llamagraph.program.launch import Buffer, Call

PLAIN_ARENAS = ("weights",)  # used whole from the start
STAGING_BYTES = 32 << 20  # pinned; one half is filled while the other is copied
READ_BYTES = 64 << 10  # pinned; what is longer is read through pageable memory
PARALLEL_BYTES = 1 << 20  # from here on several threads fill the staging memory
Warn = Callable[[str], None]


def unmapped(mapped: bytearray, first: int, last: int) -> list[tuple[int, int]]:
    """The runs of zeros between two pages, the later one excluded."""
    runs, page = [], first
    while (start := mapped.find(0, page, last)) >= 0:
        end = mapped.find(1, start, last)
        page = last if end < 0 else end
        runs.append((start, page))
    return runs


class PagedArena:
    """A reserved range, mapped page by page; `used` counts the bytes that have memory."""

    def __init__(self, gpu: driver.Gpu, n_bytes: int):
        self._gpu = gpu
        self._page = driver_memory.page_bytes(gpu)
        self.n_bytes = -(-max(n_bytes, 1) // self._page) * self._page
        self.base = driver_memory.reserve(self.n_bytes)
        self.used = 0
        self._mapped = bytearray(self.n_bytes // self._page)  # 1 for a page that has memory
        self._parts: list[tuple[int, int, Any]] = []

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of a range, in bytes, that have no memory yet."""
        runs = unmapped(self._mapped, start // self._page, -(-stop // self._page))
        return [(first * self._page, last * self._page) for first, last in runs]

    def grow(self, start: int, stop: int, doing: str) -> None:
        """Gives such a part its memory."""
        handle = driver_memory.map_pages(self._gpu, self.base + start, stop - start, doing)
        self._parts.append((self.base + start, stop - start, handle))
        first, last = start // self._page, stop // self._page
        self._mapped[first:last] = b"\1" * (last - first)
        self.used += stop - start

    def close(self) -> None:
        while self._parts:
            driver_memory.unmap_pages(*self._parts.pop())
        driver_memory.unreserve(self.base, self.n_bytes)


class PlainArena:
    """A range that has all its memory from the start."""

    def __init__(self, n_bytes: int, doing: str):
        self.n_bytes = self.used = max(n_bytes, 1)
        self.base = driver_memory.allocate(self.n_bytes, doing)

    def close(self) -> None:
        driver_memory.release(self.base)


class MappedArena:
    """Pinned host memory that the GPU reads and writes at the host's own address."""

    def __init__(self, n_bytes: int):
        self.n_bytes = self.used = max(n_bytes, 1)
        self.pinned = driver_memory.Pinned(self.n_bytes)
        self.pinned.bytes[:] = 0
        self.base = self.pinned.address

    def close(self) -> None:
        self.pinned.close()


class Staging:
    """Pinned memory on the way to the GPU: small writes follow each other, big ones are cut.

    A half is filled again only when the copies out of it are done.
    """

    def __init__(self, stream: driver.Stream, n_bytes: int = STAGING_BYTES):
        self._stream, self._half = stream, n_bytes // 2
        self._pinned = driver_memory.Pinned(n_bytes)
        self._copied = [driver.Event(timed=False) for _ in range(2)]
        self._current, self._filled = 0, 0
        self._n_threads = min(8, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._n_threads)

    def send(self, target: int, data: np.ndarray) -> None:
        """Queues a copy of uint8 (n,) to an address; `data` may change afterwards."""
        done = 0
        while done < len(data):
            if self._filled == self._half:
                self._turn()
            n = min(len(data) - done, self._half - self._filled)
            start = self._current * self._half + self._filled
            self._fill(self._pinned.bytes[start : start + n], data[done : done + n])
            driver_memory.copy_in(target + done, self._pinned.address + start, n, self._stream)
            self._filled += n
            done += n

    def _turn(self) -> None:
        self._copied[self._current].record(self._stream)
        self._current, self._filled = 1 - self._current, 0
        self._copied[self._current].wait()

    def _fill(self, pinned: np.ndarray, data: np.ndarray) -> None:
        """Copies; the page faults of a mapped file are what takes time, so threads share them."""
        if len(data) < PARALLEL_BYTES:
            pinned[:] = data
            return
        cuts = np.linspace(0, len(data), self._n_threads + 1).astype(int)
        parts = [slice(a, b) for a, b in pairwise(cuts)]
        list(self._threads.map(lambda part: np.copyto(pinned[part], data[part]), parts))

    def close(self) -> None:
        self._threads.shutdown()
        for event in self._copied:
            event.close()
        self._pinned.close()


class CudaMemory:
    """The arenas of a GPU. `run` launches a call, for what is rearranged on the GPU."""

    def __init__(self, gpu: driver.Gpu, stream: driver.Stream, run: Callable[[Call], None],
                 warn: Warn):
        self._gpu, self._stream, self._run, self._warn = gpu, stream, run, warn
        self._arenas: dict[str, PagedArena | PlainArena | MappedArena] = {}
        self._warned = False
        self._staging = Staging(stream)
        self._answer = driver_memory.Pinned(READ_BYTES)

    def available(self) -> int:
        return driver_memory.free_bytes()

    def reserve(self, arena: str, n_bytes: int) -> None:
        if arena in self._arenas:
            self._stream.wait()
            self._arenas.pop(arena).close()
        if arena == "mapped":
            self._arenas[arena] = MappedArena(n_bytes)
            return
        if self._gpu.vmm and arena not in PLAIN_ARENAS:
            self._arenas[arena] = PagedArena(self._gpu, n_bytes)
            return
        if arena not in PLAIN_ARENAS and not self._warned:
            self._warned = True
            self._warn(f"{self._gpu.name} cannot map memory by pages: "
                       "everything is allocated at its full size")
        self._check(arena, n_bytes)
        self._arenas[arena] = PlainArena(n_bytes, f"allocating {arena}")

    def grow(self, arena: str, start: int, stop: int) -> None:
        space = self._arenas[arena]
        assert 0 <= start <= stop <= space.n_bytes, f"{arena} ends before {stop}"
        if isinstance(space, PagedArena) and (runs := space.missing(start, stop)):
            self._check(arena, sum(b - a for a, b in runs))
            for a, b in runs:
                space.grow(a, b, f"growing {arena}")

    def _check(self, arena: str, n_bytes: int) -> None:
        if n_bytes > (free := driver_memory.free_bytes()):
            raise MemoryLimitError(
                f"{arena}: {n_bytes / 1e9:.2f} GB more are needed on {self._gpu.name}, "
                f"{free / 1e9:.2f} GB are free; use a smaller "
                f"{'model' if arena == 'weights' else '-c'}"
            )

    def host_view(self, buffer: Buffer) -> np.ndarray:
        arena = self._arenas[buffer.arena]
        assert isinstance(arena, MappedArena), f"{buffer.name} is not mapped"
        part = arena.pinned.bytes[buffer.start : buffer.stop]
        return part.view(DTYPES[buffer.dtype]).reshape(buffer.shape)

    def address(self, buffer: Buffer) -> int:
        return self._arenas[buffer.arena].base + buffer.start

    def weight_bytes(self, weight: Buffer) -> int:
        return weight.n_bytes

    def upload(self, weight: Buffer, raw: np.ndarray, repack: Repack) -> None:
        """Queues it; `raw` may be freed at once. What is rearranged passes through other memory."""
        data = np.ascontiguousarray(repack.convert(weight, raw)).reshape(-1).view(np.uint8)
        launch = repack.launch(weight, Buffer("raw", "raw", 0, len(data), "U8", (len(data),)))
        if launch is None:
            assert len(data) == weight.n_bytes, f"{weight.name}: {len(data)} bytes are no copy"
            self._staging.send(self.address(weight), data)
            return
        with _Room(self, len(data)) as room:
            self._staging.send(room.base, data)
            self._run(launch.resolve(
                {}, lambda b: room.base + b.start if b.arena == "raw" else self.address(b)
            ))

    def write(self, buffer: Buffer, values: Any, first: int = 0) -> None:
        data = np.ascontiguousarray(values, DTYPES[buffer.dtype]).reshape(-1)
        start = first * data.itemsize
        assert start + data.nbytes <= buffer.n_bytes, f"{buffer.name} is too short"
        self._staging.send(self.address(buffer) + start, data.view(np.uint8))

    def fill(self, buffer: Buffer, byte: int) -> None:
        """Every byte of a buffer, behind the work queued so far."""
        driver_memory.fill(self.address(buffer), byte, buffer.n_bytes, self._stream)

    def read(self, buffer: Buffer) -> np.ndarray:
        out = np.empty(buffer.shape, DTYPES[buffer.dtype])
        assert out.nbytes <= buffer.n_bytes, f"{buffer.name} is not plain numbers"
        small = out.nbytes <= READ_BYTES
        target = self._answer.address if small else out.ctypes.data
        driver_memory.copy_out(target, self.address(buffer), out.nbytes, self._stream)
        self._stream.wait()
        if small:
            out.reshape(-1).view(np.uint8)[:] = self._answer.bytes[: out.nbytes]
        return out

    def account(self) -> dict[str, int]:
        return {name: arena.used for name, arena in self._arenas.items()}

    def close(self) -> None:
        self._staging.close()
        self._answer.close()
        while self._arenas:
            self._arenas.popitem()[1].close()


class _Room:
    """Passing GPU memory for a weight's bytes as they are in the file."""

    def __init__(self, memory: CudaMemory, n_bytes: int):
        self._stream, self._queued = memory._stream, memory._gpu.pools
        doing = "making room for a weight"
        self.base = (
            driver_memory.allocate_queued(n_bytes, self._stream, doing) if self._queued
            else driver_memory.allocate(n_bytes, doing)
        )

    def __enter__(self) -> "_Room":
        return self

    def __exit__(self, *_: object) -> None:
        if self._queued:
            driver_memory.release_queued(self.base, self._stream)
        else:
            self._stream.wait()
            driver_memory.release(self.base)
