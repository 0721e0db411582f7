"""Graphs of packed launches: captured, built, updated, repeated. Knows launches, no kernel of them.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llamagraph.devices.cuda import driver
from llamagraph.devices.cuda.driver_graphs import Bound, Graph
from llamagraph.devices.cuda.driver_memory import free_bytes
from llamagraph.devices.cuda.memory import CudaMemory
from llamagraph.errors import LlamaGraphError
from llamagraph.program.device import GraphNode
from llamagraph.program.launch import Buffer

if TYPE_CHECKING:
    from llamagraph.devices.cuda.device import CudaQueue

LOOP_DRIVER = (12, 4)  # the first with WHILE nodes


def no_loop(gpu: driver.Gpu, version: tuple[int, int] | None) -> str:
    """Why a loop cannot run on this GPU with a driver for that CUDA version; empty if it can."""
    if version is None or version < LOOP_DRIVER:
        found = ".".join(map(str, version or ("none",)))
        return (f"loops need a driver for CUDA {LOOP_DRIVER[0]}.{LOOP_DRIVER[1]} or later, this "
                f"one is for {found}")
    if gpu.watchdog:
        return f"{gpu.name} drives a display, whose watchdog would end a long launch"
    return ""


class CudaGraph:
    """A driver graph with its nodes and its executable, and what making that took.

    `times` are seconds by step, `n_bytes` the memory that went. Of a loop, `condition` is where its
    kernel finds the graph's handle.
    """

    def __init__(self, graph: Graph, nodes: Sequence[Any], recorded: float,
                 stream: driver.Stream, condition: Buffer | None = None):
        self.graph, self.nodes, self.condition = graph, nodes, condition
        before, start = free_bytes(), time.perf_counter()
        graph.instantiate()
        instantiated = time.perf_counter()
        graph.upload(stream)
        stream.wait()
        uploaded = time.perf_counter()
        self.n_bytes = max(0, before - free_bytes())
        self.times = {"record": recorded, "instantiate": instantiated - start,
                      "upload": uploaded - instantiated}


class CudaGraphs:
    """Captured and built graphs of the device's stream."""

    def __init__(self, queue: "CudaQueue", stream: driver.Stream, memory: CudaMemory, no_loop: str):
        self._queue, self._stream, self._memory, self.no_loop = queue, stream, memory, no_loop
        self._open: set[CudaGraph] = set()

    def _executable(self, graph: Graph, nodes: Sequence[Any], start: float,
                    old: CudaGraph | None, condition: Buffer | None = None
                    ) -> tuple[CudaGraph, Sequence[Any]]:
        """One that has nothing of `old` where the driver refuses: no second update is tried."""
        recorded = time.perf_counter() - start
        try:
            if old and self._become(old, graph, recorded):
                graph.close()
                return old, old.nodes
            made = CudaGraph(graph, nodes, recorded, self._stream, condition)
        except LlamaGraphError:
            graph.close()
            raise
        self._open.add(made)
        return made, nodes

    def _become(self, old: CudaGraph, graph: Graph, recorded: float) -> bool:
        """Whether the old executable is now that of the graph; else, as any loop, it is closed."""
        start, done = time.perf_counter(), False
        try:
            if done := not (old.condition or graph.condition) and old.graph.adopt(graph):
                old.times = {"record": recorded, "update": time.perf_counter() - start}
        finally:
            if not done:
                self.close(old)
        return done

    def capture(self, record: Callable[[], Sequence[Any]], old: CudaGraph | None = None
                ) -> tuple[CudaGraph, Sequence[Any]]:
        start = time.perf_counter()
        self._stream.begin_capture()
        self._queue.capturing = True
        try:
            nodes = record()
            handle = self._stream.end_capture()
        except BaseException:
            self._stream.abandon_capture()
            raise
        finally:
            self._queue.capturing = False
        return self._executable(Graph(handle), nodes, start, old)

    def build(self, bound: Sequence[Bound], before: Sequence[Sequence[int]],
              priority: Sequence[int], old: CudaGraph | None = None,
              condition: Buffer | None = None) -> tuple[CudaGraph, Sequence[Any]]:
        """A node after a single other one may start early, as on the stream; not beside a copy.

        With several before it a node waits for them whole: that their early starts add up is
        written nowhere.
        """
        start, graph = time.perf_counter(), Graph()
        try:
            if condition:
                graph.add_loop()
            nodes = [graph.add(b, p) for b, p in zip(bound, priority, strict=True)]
            graph.connect([
                (nodes[j], nodes[i], len(earlier) == 1 and bound[i].pdl and bound[j].pdl)
                for i, earlier in enumerate(before) for j in earlier
            ])
        except LlamaGraphError:
            graph.close()
            raise
        return self._executable(graph, nodes, start, old, condition)

    def update(self, graph: CudaGraph, node: Any, bound: Bound) -> None:
        graph.graph.set(node, bound)

    def replay(self, graph: CudaGraph) -> None:
        if graph.condition:
            handle = np.array([self.handle(graph)], np.uint64).view(np.uint32)
            self._memory.write(graph.condition, handle)
        graph.graph.launch(self._stream)

    def handle(self, graph: CudaGraph) -> int:
        return graph.graph.condition

    def size(self, graph: CudaGraph) -> int:
        return graph.n_bytes

    def times(self, graph: CudaGraph) -> dict[str, float]:
        return graph.times

    def read_back(self, graph: CudaGraph) -> list[GraphNode]:
        """The nodes and edges as the driver has them; updates of the executable do not show."""
        return graph.graph.read_back()

    def close(self, graph: CudaGraph) -> None:
        if graph in self._open:
            self._stream.wait()
            self._open.remove(graph)
            graph.graph.close()

    def close_all(self) -> None:
        for graph in list(self._open):
            self.close(graph)
