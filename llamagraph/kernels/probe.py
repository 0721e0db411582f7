"""How fast memory can be read, the floor that decoding is measured against; and a clock.

Part of no step. Knows a device's memory and queue, no model.
"""

import statistics
import time
from typing import Any

import numpy as np

from llamagraph.program.device import Device
from llamagraph.program.launch import (
    ITEM_BYTES,
    Buffer,
    Geometry,
    In,
    InOut,
    Kernel,
    Launch,
    Out,
    Traffic,
    Value,
    Work,
    dense,
    kernel,
)

TILE_WORDS = 8192  # that a block reads in a round: 256 threads, 8 loads of 16 bytes each
BLOCKS_PER_SM = 4
GPU_BYTES, CPU_BYTES = 4 << 30, 256 << 20  # far more than any cache holds
SAMPLES, LAUNCHES = 5, 4  # launches a sample: one wait costs little beside them


def _fill_geometry(target, words: Buffer, n_words) -> Geometry:
    return Geometry((BLOCKS_PER_SM * target.n_sm, 1, 1), 256)


def _read_geometry(target, data: Buffer, out: Buffer, n_rounds) -> Geometry:
    return Geometry((out.shape[0], 1, 1), 256)


def _read_cost(work: Work, data: Buffer, out: Buffer, n_rounds: int) -> Traffic:
    return Traffic(4 * n_rounds * out.shape[0] * TILE_WORDS, out.n_bytes)


def _fill_example(rng):
    yield (np.zeros(5000, np.uint32), 4999), {}


def _read_example(rng):
    for n_rounds, n_blocks in ((1, 1), (3, 5)):
        data = rng.integers(0, 1 << 32, n_rounds * n_blocks * TILE_WORDS, np.uint32)
        yield (data, np.empty(n_blocks, np.uint32), n_rounds), {}


@kernel("probe.cu", geometry=_fill_geometry, example=_fill_example)
def fill_words(words: Out, n_words: int) -> None:
    """words[i] = i * 2654435761 modulo 2^32 (Knuth's multiplicative hash), (n_words,) of U32."""
    np.multiply(np.arange(n_words, dtype=np.uint32), np.uint32(2654435761), out=words[:n_words])


@kernel("probe.cu", geometry=_read_geometry, cost=_read_cost, example=_read_example)
def read_all(data: In, out: Out, n_rounds: int) -> None:
    """out[b] = the sum modulo 2^32 of block b's tiles: in each round the blocks take one in turn.

    data: (n_rounds * n_blocks * TILE_WORDS,) of U32; out: (n_blocks,) of U32.
    """
    tiles = data.reshape(n_rounds, len(out), TILE_WORDS)
    np.sum(tiles, axis=(0, 2), dtype=np.uint32, out=out)


def _single(target, *args: Value) -> Geometry:
    return Geometry((1, 1, 1), 32)


@kernel("probe.cu", geometry=_single)
def stamp(times: InOut, count: InOut) -> None:
    """times[count] = now, as two U32 the nanoseconds of the device's clock; count += 1."""
    times.view(np.uint64)[count[0]] = time.perf_counter_ns()
    count += 1


def read_bandwidth(device: Device, n_bytes: int | None = None) -> float:
    """Bytes a second at which the device reads `n_bytes` from end to end; a median.

    By default 4 GiB on a GPU and 256 MiB on a CPU, there with one thread. Takes at most half of
    the free memory, and gives it back.
    """
    memory, target = device.memory, device.target
    wanted = n_bytes or (GPU_BYTES if target.is_cuda else CPU_BYTES)
    n_blocks = BLOCKS_PER_SM * target.n_sm
    round_bytes = 4 * n_blocks * TILE_WORDS
    n_rounds = max(1, min(wanted, memory.available() // 2) // round_bytes)
    data = dense("data", "probe", 0, (n_rounds * n_blocks * TILE_WORDS,), "U32")
    out = dense("out", "probe", data.stop, (n_blocks,), "U32")
    assert data.shape[0] < 1 << 31, "fill_words counts in 32 bits"
    memory.reserve("probe", out.stop)
    try:
        memory.grow("probe", 0, out.stop)
        _launch(device, fill_words, data, data.shape[0])  # untouched pages would be one of zeros
        return data.n_bytes / _seconds(device, data, out, n_rounds)
    finally:
        memory.reserve("probe", 0)  # an arena that is made anew lets go of the old one


def nothing(device: Device) -> Any:
    """A bound launch that does nothing, a block a multiprocessor, as steps are launched here."""
    device.memory.reserve("probe", ITEM_BYTES["U32"])
    words = dense("words", "probe", 0, (1,), "U32")
    return _as_in_steps(device, fill_words, Geometry((device.target.n_sm, 1, 1), 256), words, 0)


class Clock:
    """Room for `n` stamps of the device's clock; `stamp` is the bound launch that leaves one."""

    def __init__(self, device: Device, n: int):
        self._memory = device.memory
        self._times = dense("times", "probe", 0, (n, 2), "U32")
        self._count = dense("count", "probe", self._times.stop, (1,), "U32")
        device.memory.reserve("probe", self._count.stop)
        device.memory.grow("probe", 0, self._count.stop)
        self.stamp = _as_in_steps(device, stamp, _single(None), self._times, self._count)
        self.reset()

    def reset(self) -> None:
        self._memory.write(self._count, np.zeros(1, np.uint32))

    def read(self) -> np.ndarray:
        """int64 (n_stamps,): nanoseconds, what was queued being done."""
        n = int(self._memory.read(self._count)[0])
        return self._memory.read(self._times).view(np.uint64)[:n, 0].astype(np.int64)


def _as_in_steps(device: Device, kernel: Kernel, geometry: Geometry, *args: Value) -> Any:
    launch = Launch(kernel, geometry, args, kernel.name, pdl=device.target.pdl)
    return device.queue.bind(launch.resolve({}, device.memory.address))


def _bound(device: Device, kernel: Kernel, *args: Value):
    launch = Launch(kernel, kernel.geometry(device.target, *args), args, "probe")
    return device.queue.bind(launch.resolve({}, device.memory.address))


def _launch(device: Device, kernel: Kernel, *args: Value) -> None:
    device.queue.launch(_bound(device, kernel, *args))
    device.queue.wait()


def _seconds(device: Device, data: Buffer, out: Buffer, n_rounds: int) -> float:
    """A launch's time by the host's clock, launches following each other."""
    bound = _bound(device, read_all, data, out, n_rounds)
    device.queue.launch(bound)
    samples = []
    for _ in range(SAMPLES):
        device.queue.wait()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            device.queue.launch(bound)
        device.queue.wait()
        samples.append((time.perf_counter() - start) / LAUNCHES)
    return statistics.median(samples)
