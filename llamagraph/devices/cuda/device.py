"""The CUDA device: an ordered queue of packed launches, graphs made of them, and memory.

Knows launches, not what they compute. Nothing is allocated, loaded or waited for in a capture.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from llamagraph.devices.cuda import driver
from llamagraph.devices.cuda.compiler import Compiler, Unit
from llamagraph.devices.cuda.memory import CudaMemory
from llamagraph.devices.cuda.tuning import Tuning
from llamagraph.errors import LlamaGraphError
from llamagraph.program.launch import Call, Kernel, Param
from llamagraph.program.target import TARGETS, Target

FEW_UNITS = 2  # that compile in less than a second: nothing is said


def pack(params: Sequence[Param], args: Sequence[Any]) -> np.ndarray:
    """The arguments as the kernel takes them, uint64 (n,): pointers, int32 and float32 in place."""
    store = np.zeros(len(args), np.uint64)
    for i, (param, value) in enumerate(zip(params, args, strict=True)):
        if param.role:
            store[i] = value
        else:
            dtype = np.int32 if param.type is int else np.float32
            store[i : i + 1].view(dtype)[0] = value
    return store


def target_of(gpu: driver.Gpu) -> Target:
    """What programs are planned for on this GPU."""
    known = TARGETS.get(gpu.arch) or Target(gpu.arch, pdl=gpu.capability >= (9, 0))
    return known.with_sm(gpu.n_sm, gpu.shared_per_block)


class Kernels:
    """The loaded modules, a compile unit each, and the functions taken from them."""

    def __init__(self, compiler: Compiler, warn: Callable[[str], None]):
        self.compiler, self._warn = compiler, warn
        self._modules: dict[Unit, Any] = {}
        self._functions: dict[Kernel, driver.Function] = {}

    def load(self, kernels: Iterable[Kernel]) -> None:
        """Compiles and loads all that is not there yet, side by side."""
        wanted = dict.fromkeys(Unit(k.source, k.constants) for k in kernels)
        new = [unit for unit in wanted if unit not in self._modules]
        if len(missing := self.compiler.missing(new)) > FEW_UNITS:
            self._warn(f"compiling {len(missing)} kernel files for {self.compiler.arch}, once")
        for unit, cubin in self.compiler.cubins(new).items() if new else ():
            self._modules[unit] = driver.load_module(cubin, str(unit))

    def function(self, kernel: Kernel) -> driver.Function:
        if kernel not in self._functions:
            self.load([kernel])
            unit = Unit(kernel.source, kernel.constants)
            self._functions[kernel] = driver.Function(self._modules[unit], kernel.name, str(unit))
        return self._functions[kernel]

    def close(self) -> None:
        while self._modules:
            driver.unload_module(self._modules.popitem()[1])


class CudaQueue:
    """A stream of launches; within a capture a launch gives the node that it became."""

    ahead = True

    def __init__(self, kernels: Kernels, stream: driver.Stream):
        self._kernels, self._stream = kernels, stream
        self._start, self._stop = driver.Event(), driver.Event()
        self.capturing = False

    def load(self, kernels: Iterable[Kernel]) -> None:
        self._kernels.load(kernels)

    def bind(self, call: Call) -> driver.Prepared:
        function = self._kernels.function(call.kernel)
        return driver.Prepared(function, self._stream, call.grid, call.block, call.shared,
                               call.pdl, pack(call.kernel.params, call.args))

    def launch(self, bound: driver.Prepared) -> Any:
        # Every token comes through here several hundred times: the call and one test.
        code = driver.launch_kernel(bound.config, bound.function, bound.params, 0)[0]
        if code or self.capturing:
            return self._launched(bound, code)
        return None

    def _launched(self, bound: driver.Prepared, code: Any) -> Any:
        if code:
            raise driver.failure("cuLaunchKernelEx", code, f"launching {bound.name}")
        return self._stream.last_node()

    def wait(self) -> None:
        self._stream.wait()

    def time(self, work: Callable[[], Any]) -> float:
        """Seconds that the GPU takes for what `work` queues."""
        self._start.record(self._stream)
        work()
        self._stop.record(self._stream)
        return self._stop.seconds_since(self._start)

    def close(self) -> None:
        self._start.close()
        self._stop.close()


class CudaGraph:
    """A driver graph with its executable, and the memory that went when it was made."""

    def __init__(self, graph: driver.Graph, stream: driver.Stream):
        self.graph = graph
        before = driver.free_bytes()
        graph.instantiate(stream)
        stream.wait()
        self.n_bytes = max(0, before - driver.free_bytes())


class CudaGraphs:
    """Captured and built graphs of the device's stream."""

    def __init__(self, queue: CudaQueue, stream: driver.Stream):
        self._queue, self._stream = queue, stream
        self._open: set[CudaGraph] = set()

    def _executable(self, graph: driver.Graph) -> CudaGraph:
        try:
            made = CudaGraph(graph, self._stream)
        except LlamaGraphError:
            graph.close()
            raise
        self._open.add(made)
        return made

    def capture(self, record: Callable[[], Sequence[Any]]) -> tuple[CudaGraph, Sequence[Any]]:
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
        return self._executable(driver.Graph(handle)), nodes

    def build(self, bound: Sequence[driver.Prepared], before: Sequence[Sequence[int]]
              ) -> tuple[CudaGraph, Sequence[Any]]:
        """A node after a single other one may start early, as on the stream.

        With several before it a node waits for them whole: that their early starts add up is
        written nowhere.
        """
        graph = driver.Graph()
        try:
            nodes = [graph.add(b) for b in bound]
            graph.connect([
                (nodes[j], nodes[i], len(earlier) == 1 and bound[i].pdl and bound[j].pdl)
                for i, earlier in enumerate(before) for j in earlier
            ])
        except LlamaGraphError:
            graph.close()
            raise
        return self._executable(graph), nodes

    def update(self, graph: CudaGraph, node: Any, bound: driver.Prepared) -> None:
        graph.graph.set(node, bound)

    def replay(self, graph: CudaGraph) -> None:
        graph.graph.launch(self._stream)

    def size(self, graph: CudaGraph) -> int:
        return graph.n_bytes

    def read_back(self, graph: CudaGraph) -> list[driver.Node]:
        """The nodes and edges as the driver has them; updates of the executable do not show."""
        return graph.graph.read_back()

    def close(self, graph: CudaGraph) -> None:
        self._stream.wait()
        self._open.discard(graph)
        graph.graph.close()

    def close_all(self) -> None:
        for graph in list(self._open):
            self.close(graph)


class CudaDevice:
    """A GPU. Closing it frees all that it holds, also after a call has failed."""

    name = "cuda"

    def __init__(self, gpu: driver.Gpu, compiler: Compiler, warn: Callable[[str], None],
                 tuning: Tuning = ()):
        self.gpu, self.target = gpu, replace(target_of(gpu), tuning=tuning)
        with ExitStack() as opened:

            def keep(thing: Any, close: str = "close") -> Any:
                opened.callback(_quietly, getattr(thing, close))
                return thing

            self.context = keep(driver.Context(gpu))
            stream = keep(driver.Stream())
            self.kernels = keep(Kernels(compiler, warn))
            self.queue = keep(CudaQueue(self.kernels, stream))
            self.memory = keep(CudaMemory(gpu, stream, self._run, warn))
            self.graphs = keep(CudaGraphs(self.queue, stream), "close_all")
            opened.callback(_quietly, stream.wait)
            self._opened = opened.pop_all()

    def _run(self, call: Call) -> None:
        self.queue.launch(self.queue.bind(replace(call, pdl=False)))

    def close(self) -> None:
        self._opened.close()


def _quietly(close: Callable[[], None]) -> None:
    """After a fault of the GPU every call fails, and the rest must still be closed."""
    with suppress(LlamaGraphError):
        close()
