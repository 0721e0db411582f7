"""Brings a planned model onto a device: its memory, its weights, what its io begins with.

Knows the plan, files and a device's memory; no step and no token.
"""

from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from llamagraph.errors import MemoryLimitError
from llamagraph.gguf.reader import GGUFFile
from llamagraph.kernels.repack import Tiler
from llamagraph.planner import FACTORS, Planner
from llamagraph.program.device import Device, Memory

Progress = Callable[[str, int, int], None]


def load(file: GGUFFile, device: Device, planner: Planner, n_ctx: int | None,
         progress: Progress) -> None:
    """Reserves the arenas, uploads the weights and writes io's first values.

    `n_ctx` is the context that was asked for; MemoryLimitError where it does not fit.
    """
    memory, io, scratch = device.memory, planner.io, planner.scratch_bytes()
    _check_memory(file, memory, planner, n_ctx, scratch)
    for arena, n_bytes in (("weights", planner.weights_bytes), ("kv", planner.kv.n_bytes),
                           ("scratch", scratch), ("io", io["counters"].stop),
                           ("mapped", io["candidates"].stop)):
        memory.reserve(arena, n_bytes)
    memory.grow("io", 0, io["counters"].stop)
    tiler, tables = Tiler(device.target), _rope_tables(file, planner) | planner.adapters.tables()
    for name, buffer in planner.buffers.items():
        progress("load", buffer.start, planner.weights_bytes)
        memory.upload(buffer, tables[name] if name in tables else _raw(file, name), tiler)
    progress("load", planner.weights_bytes, planner.weights_bytes)
    memory.write(io["one"], [1])
    for name in ("sampler_ints", "counters"):
        memory.write(io[name], np.zeros(io[name].shape, np.uint32))
    planner.adapters.write(memory, io)


def _raw(file: GGUFFile, name: str) -> np.ndarray:
    """A tensor's bytes as they are stored: the file's, or for a vector those of F32."""
    t = file.tensors[name]
    if len(t.shape) > 1:
        return file.data(name)
    return t.quant.dequantise(file.data(name), t.shape).view(np.uint8)


def _rope_tables(file: GGUFFile, planner: Planner) -> dict[str, np.ndarray]:
    """Bytes of the weights that no file has: the frequencies of each kind of layer."""
    factors = _raw(file, FACTORS).view(np.float32) if FACTORS in file.tensors else None
    return {f"rope.{name}.weight": rope.inv_freq(factors).view(np.uint8)
            for name, rope in planner.config.ropes.items()}


def _check_memory(file: GGUFFile, memory: Memory, planner: Planner, n_ctx: int | None,
                 scratch: int) -> None:
    """MemoryLimitError before anything is allocated: a context that was asked for must fit."""
    base = sum(memory.weight_bytes(b) for b in planner.buffers.values()) + scratch
    base += planner.io["counters"].stop + planner.io["candidates"].stop
    free, bytes_at = memory.available(), planner.kv.bytes_at
    needed = base + bytes_at(n_ctx or 1)
    if needed <= free:
        return
    fits = bisect_right(range(planner.n_ctx + 1), free - base, key=bytes_at) - 1
    fix = f"use -c {fits} or less" if fits > 0 else "take a smaller model or another --device"
    raise MemoryLimitError(f"{file.path}: {needed / 1e9:.2f} GB of memory are needed, "
                           f"{free / 1e9:.2f} GB are free; {fix}")
