"""The CUDA device: an ordered queue of packed launches, graphs made of them, and memory.

Knows launches, not what they compute. Nothing is allocated, loaded or waited for in a capture.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from llamagraph.devices.cuda import driver, driver_version
from llamagraph.devices.cuda.compiler import Compiler, Unit
from llamagraph.devices.cuda.driver_graphs import Bound, Prepared, PreparedCopy
from llamagraph.devices.cuda.graphs import CudaGraphs, no_loop
from llamagraph.devices.cuda.launch_cost import launch_cost
from llamagraph.devices.cuda.memory import CudaMemory
from llamagraph.devices.cuda.tuning import Tuning
from llamagraph.errors import LlamaGraphError
from llamagraph.program.launch import COPY, Call, Kernel, Param
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


def target_of(gpu: driver.Gpu, chosen: Target | None = None) -> Target:
    """What programs are planned for on this GPU: with the choices of another target, if asked."""
    known = chosen or TARGETS.get(gpu.arch) or Target(gpu.arch, pdl=gpu.capability >= (9, 0))
    return known.with_sm(gpu.n_sm, gpu.shared_per_block)


class Kernels:
    """The loaded modules, a compile unit each, and the functions taken from them."""

    def __init__(self, compiler: Compiler, warn: Callable[[str], None]):
        self.compiler, self._warn = compiler, warn
        self._modules: dict[Unit, Any] = {}
        self._functions: dict[Kernel, driver.Function] = {}

    def load(self, kernels: Iterable[Kernel]) -> None:
        """Compiles and loads all that is not there yet, side by side."""
        wanted = dict.fromkeys(Unit(k.source, k.constants) for k in kernels if k.source)
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

    def __init__(self, kernels: Kernels, stream: driver.Stream, set_aside: driver.SetAside):
        self._kernels, self._stream, self._set_aside = kernels, stream, set_aside
        self._start, self._stop = driver.Event(), driver.Event()
        self.capturing = False

    def load(self, kernels: Iterable[Kernel]) -> None:
        self._kernels.load(kernels)

    def bind(self, call: Call) -> Bound:
        if call.kernel.name == COPY:
            source, target, n_bytes = call.args
            return PreparedCopy(source, target, n_bytes, self._stream)
        function = self._kernels.function(call.kernel)
        if call.window:
            self._set_aside.open()
        return Prepared(function, self._stream, call.grid, call.block, call.shared, call.pdl,
                        pack(call.kernel.params, call.args), call.window)

    def pack(self, call: Call) -> list[bytes]:
        return [value.tobytes() for value in pack(call.kernel.params, call.args)]

    def launch(self, bound: Bound) -> Any:
        # Every token comes through here several hundred times: the call and one test.
        code = bound.call(*bound.args)[0]
        if code or self.capturing:
            return self._launched(bound, code)
        return None

    def _launched(self, bound: Bound, code: Any) -> Any:
        if code:
            raise driver.failure(bound.call.__name__, code, f"launching {bound.name}")
        return self._stream.last_node()

    def wait(self) -> None:
        self._stream.wait()

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def time(self, work: Callable[[], Any]) -> float:
        """Seconds that the GPU takes for what `work` queues."""
        self._start.record(self._stream)
        work()
        self._stop.record(self._stream)
        return self._stop.seconds_since(self._start)

    def launch_cost(self, bound: Prepared) -> tuple[float, float]:
        """Host seconds of a launch: the driver's own, and the bindings'."""
        return launch_cost(bound, self._stream)

    def close(self) -> None:
        self._start.close()
        self._stop.close()


class CudaDevice:
    """A GPU. Closing it frees all that it holds, also after a call has failed.

    With `persist` as much L2 cache as can be is set aside once launches ask it to keep something.
    """

    name = "cuda"

    def __init__(self, gpu: driver.Gpu, compiler: Compiler, warn: Callable[[str], None],
                 tuning: Tuning = (), persist: bool = False, chosen: Target | None = None):
        self.gpu, self.target = gpu, replace(target_of(gpu, chosen), tuning=tuning)
        if persist:
            self.target = self.target.persisting(gpu.l2_persist, gpu.l2_window)
        with ExitStack() as opened:

            def keep(thing: Any, close: str = "close") -> Any:
                opened.callback(_quietly, getattr(thing, close))
                return thing

            self.context = keep(driver.Context(gpu))
            set_aside = keep(driver.SetAside(self.target.l2_persist))
            stream = keep(driver.Stream())
            self.kernels = keep(Kernels(compiler, warn))
            self.queue = keep(CudaQueue(self.kernels, stream, set_aside))
            self.memory = keep(CudaMemory(gpu, stream, self._run, warn))
            self.graphs = keep(CudaGraphs(self.queue, stream, self.memory,
                                          no_loop(gpu, driver_version())), "close_all")
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
