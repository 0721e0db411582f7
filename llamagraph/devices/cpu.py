"""The numpy device: runs every kernel's reference. Knows launches and quantised types, no model.

It implements all that a GPU does. A capture is a list of calls; a built graph is replayed in a
random order that respects its edges, over poisoned scratch, so that a missing edge shows.
Weights are dequantised once to float32.
"""

import mmap
import os
import random
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from llamagraph.devices import DTYPES
from llamagraph.devices.host import available_memory, idle_cores
from llamagraph.errors import MemoryLimitError
from llamagraph.gguf.quants import QUANTS
from llamagraph.program.device import GraphNode, Repack
from llamagraph.program.launch import Buffer, Call, Kernel
from llamagraph.program.target import Target, target_named

POISON = 0xFF  # a NaN in every float type


class CpuMemory:
    """Arenas as anonymous maps, whose pages the system provides when they are first touched."""

    def __init__(self, available: Callable[[], int] = available_memory):
        self.available = available
        self.finish: Callable[[], None] = lambda: None  # what is queued
        self._arenas: dict[str, np.ndarray] = {}
        self._used: dict[str, int] = {}
        self._weights: dict[Buffer, np.ndarray] = {}

    def reserve(self, arena: str, n_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            pages = mmap.mmap(-1, max(n_bytes, mmap.PAGESIZE), flags=flags)
        except (OSError, OverflowError) as error:
            raise MemoryLimitError(f"{arena}: {n_bytes / 1e9:.2f} GB of addresses are refused "
                                   f"({error}); use a smaller -c") from None
        self._weights = {} if arena == "weights" else self._weights
        self._arenas[arena] = np.frombuffer(pages, np.uint8)
        self._used[arena] = n_bytes if arena == "mapped" else 0

    def grow(self, arena: str, start: int, stop: int) -> None:
        assert stop <= len(self._arenas[arena]), f"{arena} ends before {stop}"
        if stop - start > (free := self.available()):
            raise MemoryLimitError(
                f"{arena}: {(stop - start) / 1e9:.2f} GB more are needed, "
                f"{free / 1e9:.2f} GB are free; use a smaller -c"
            )
        self._used[arena] += stop - start

    def weight_bytes(self, weight: Buffer) -> int:
        return 4 * int(np.prod(weight.shape))

    def upload(self, weight: Buffer, raw: np.ndarray, repack: Repack) -> None:
        self._weights[weight] = QUANTS[weight.dtype].dequantise(raw, weight.shape)

    def view(self, buffer: Buffer) -> np.ndarray:
        if buffer.arena == "weights":
            return self._weights[buffer]
        arena = self._arenas[buffer.arena]
        if buffer.dtype not in DTYPES:  # a quantised KV cache: the bytes of each slot
            shape = buffer.shape[0], buffer.n_bytes // buffer.shape[0]
            return np.ndarray(shape, np.uint8, arena.data, buffer.start)
        return np.ndarray(buffer.shape, DTYPES[buffer.dtype], arena.data, buffer.start)

    host_view = view

    def write(self, buffer: Buffer, values: Any, first: int = 0) -> None:
        self.finish()
        target = self.view(buffer).reshape(-1)
        values = np.asarray(values).reshape(-1)
        target[first : first + len(values)] = values

    def read(self, buffer: Buffer) -> np.ndarray:
        self.finish()
        return self.view(buffer).copy()

    def address(self, buffer: Buffer) -> Buffer:
        return buffer

    def poison(self, arena: str) -> None:
        self._arenas[arena][: self._used[arena]] = POISON

    def account(self) -> dict[str, int]:
        return {**self._used, "weights": sum(w.nbytes for w in self._weights.values())}


class Bound(partial[None]):
    """A call's reference with its arguments: calling it runs it."""

    call: Call


def _bytes(value: Any) -> bytes:
    """An argument in 8 bytes: an array's address, an int32 or a float32."""
    if isinstance(value, np.ndarray):
        return struct.pack("<q", value.ctypes.data)
    return struct.pack("<ixxxx" if isinstance(value, int | np.integer) else "<fxxxx", value)


class CpuQueue:
    """Runs a call at once, or adds it to the open capture. A loop runs while the host waits."""

    ahead = False

    def __init__(self, memory: CpuMemory):
        self._memory = memory
        self.loop: Iterator[None] = iter(())
        self.captured: list[Bound] | None = None

    def bind(self, call: Call) -> Bound:
        args = [self._memory.view(a) if isinstance(a, Buffer) else a for a in call.args]
        bound = Bound(call.kernel.reference, *args, **dict(call.kernel.constants))
        bound.call = call
        return bound

    def pack(self, call: Call) -> list[bytes]:
        return [_bytes(value) for value in self.bind(call).args]

    def launch(self, bound: Bound) -> int | None:
        if self.captured is None:
            self.wait()
            bound()
            return None
        self.captured.append(bound)
        return len(self.captured) - 1

    def load(self, kernels: Iterable[Kernel]) -> None:
        pass

    def wait(self) -> None:
        for _ in self.loop:
            pass

    def rest(self, seconds: float) -> None:
        next(self.loop, None)

    def time(self, work: Callable[[], Any]) -> float:
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started


@dataclass(eq=False)
class CpuGraph:
    """Bound calls, in any order that respects `before`; repeated until `goes_on` is 0."""

    bound: list[Bound]
    before: Sequence[Sequence[int]] | None = None
    priority: Sequence[int] | None = None
    goes_on: np.ndarray | None = None

    def same_as(self, other: "CpuGraph") -> bool:
        """Whether one could become the other: as many nodes, with the same edges, no loops."""
        loops = self.goes_on is not None or other.goes_on is not None
        return not loops and len(self.bound) == len(other.bound) and self.before == other.before


def random_order(before: Sequence[Sequence[int]], rng: random.Random) -> list[int]:
    """A topological order of the launches, drawn at random."""
    missing = [len(b) for b in before]
    after: list[list[int]] = [[] for _ in before]
    for i, earlier in enumerate(before):
        for j in earlier:
            after[j].append(i)
    ready = [i for i, n in enumerate(missing) if n == 0]
    order = []
    while ready:
        i = rng.randrange(len(ready))
        ready[i], ready[-1] = ready[-1], ready[i]
        order.append(ready.pop())
        for k in after[order[-1]]:
            missing[k] -= 1
            if missing[k] == 0:
                ready.append(k)
    assert len(order) == len(before), "the graph has a cycle"
    return order


class CpuGraphs:
    """Captured and built graphs, as lists of bound calls."""

    no_loop = ""

    def __init__(self, memory: CpuMemory, queue: CpuQueue, seed: int):
        self._memory, self._queue, self._rng = memory, queue, random.Random(seed)

    def capture(self, record: Callable[[], Sequence[int]], old: CpuGraph | None = None
                ) -> tuple[CpuGraph, Sequence[int]]:
        self._queue.captured = []
        try:
            nodes = record()
            return self._become(old, CpuGraph(self._queue.captured)), nodes
        finally:
            self._queue.captured = None

    def build(self, bound: Sequence[Bound], before: Sequence[Sequence[int]],
              priority: Sequence[int], old: CpuGraph | None = None,
              condition: Buffer | None = None) -> tuple[CpuGraph, Sequence[int]]:
        goes_on = None if condition is None else self._memory.view(condition)[2:]
        graph = CpuGraph(list(bound), before, priority, goes_on)
        return self._become(old, graph), range(len(bound))

    def _become(self, old: CpuGraph | None, new: CpuGraph) -> CpuGraph:
        """The old graph with all that the new one has, or the new one."""
        if old is None:
            return new
        if not old.same_as(new):
            self.close(old)
            return new
        old.bound, old.priority = new.bound, new.priority
        return old

    def update(self, graph: CpuGraph, node: int, bound: Bound) -> None:
        graph.bound[node] = bound

    def replay(self, graph: CpuGraph) -> None:
        self._queue.wait()
        if graph.goes_on is None:
            self._run(graph)
        else:
            graph.goes_on[0] = 1
            self._queue.loop = self._repeat(graph, graph.goes_on)

    def _repeat(self, graph: CpuGraph, goes_on: np.ndarray) -> Iterator[None]:
        while goes_on[0]:
            self._run(graph)
            yield

    def _run(self, graph: CpuGraph) -> None:
        if graph.before is None:
            order: Sequence[int] = range(len(graph.bound))
        else:
            self._memory.poison("scratch")
            order = random_order(graph.before, self._rng)
        for i in order:
            graph.bound[i]()

    def read_back(self, graph: CpuGraph) -> list[GraphNode]:
        """What is there now; a copy has no early start behind it, as on a GPU."""
        before = graph.before or [[i - 1] if i else [] for i in range(len(graph.bound))]
        priority = graph.priority or [0] * len(graph.bound)
        return [self._node(graph, i, b, p)
                for i, (b, p) in enumerate(zip(before, priority, strict=True))]

    def _node(self, graph: CpuGraph, i: int, before: Sequence[int], priority: int) -> GraphNode:
        bound, call = graph.bound[i], graph.bound[i].call
        early = len(before) == 1 and call.pdl and graph.bound[before[0]].call.pdl
        return GraphNode(call.kernel.name, call.grid, call.block, call.shared,
                         tuple(map(_bytes, bound.args)), tuple((j, early) for j in before),
                         call.window, priority)

    def handle(self, graph: CpuGraph) -> int:
        return 0

    def size(self, graph: CpuGraph) -> int:
        return 0

    def times(self, graph: CpuGraph) -> dict[str, float]:
        return {}

    def close(self, graph: CpuGraph) -> None:
        graph.bound.clear()


class CpuDevice:
    """Any target's launches on numpy.

    `n_threads` are BLAS's; None is what OPENBLAS_NUM_THREADS says, else the idle cores.
    """

    name = "cpu"

    def __init__(self, target: Target | None = None, n_threads: int | None = None, seed: int = 0,
                 available: Callable[[], int] = available_memory):
        self.target = target or target_named("numpy")
        if n_threads is None and "OPENBLAS_NUM_THREADS" not in os.environ:
            n_threads = idle_cores(len(os.sched_getaffinity(0)) if hasattr(
                os, "sched_getaffinity") else os.cpu_count() or 1)
        self.n_threads = n_threads
        self._threads = threadpool_limits(n_threads)
        self.memory = CpuMemory(available)
        self.queue = CpuQueue(self.memory)
        self.memory.finish = self.queue.wait
        self.graphs = CpuGraphs(self.memory, self.queue, seed)

    def close(self) -> None:
        self._threads.restore_original_limits()
