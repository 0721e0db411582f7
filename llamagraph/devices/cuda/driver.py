"""The CUDA driver API: checked calls, and the objects that the driver hands out.

With compiler.py the only file that imports `cuda.bindings`; where the bindings 12.9 and 13 differ,
`_newest` picks the form that both have. Knows no launch list, no arena and no model. Longer than
300 lines because every driver call of the project stands here.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cuda.bindings
import numpy as np
from cuda.bindings import driver as cu

from llamagraph.errors import DeviceError, LlamaGraphError, MemoryLimitError

OUT_OF_MEMORY = cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
PDL = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
PROGRAMMATIC = int(cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
PROGRAMMATIC_PORT = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
launch_kernel = cu.cuLaunchKernelEx  # unchecked: (config, function, params, 0) -> (code,)


def bindings_version() -> tuple[int, int]:
    """Of the installed cuda-bindings: the CUDA version that they speak."""
    major, minor = cuda.bindings.__version__.split(".")[:2]
    return int(major), int(minor)


def failure(name: str, code: Any, doing: str) -> DeviceError | MemoryLimitError:
    """The error for a call that returned `code`; being out of memory is a kind of its own."""
    text = cu.cuGetErrorString(code)[1]
    message = f"{doing}: {name}: {text.decode() if text else code} ({code.name})"
    return MemoryLimitError(message) if code == OUT_OF_MEMORY else DeviceError(message)


def call(function: Callable[..., tuple], *args: Any, doing: str) -> Any:
    """What a driver call returns beside its code.

    DeviceError holds the call's name, CUDA's own text and what was being done.
    """
    name = function.__name__
    try:
        code, *values = function(*args)
    except RuntimeError as error:  # the bindings' way to say that the driver lacks it
        raise DeviceError(f"{doing}: this driver has no {name}; update it ({error})") from error
    if code:
        raise failure(name, code, doing)
    return values[0] if len(values) == 1 else tuple(values)


def _newest(name: str) -> Callable[..., tuple]:
    """The form of a call that knows edge data: 12.9 numbers it, 13 gave it the plain name."""
    return next(f for end in ("_v3", "_v2", "") if (f := getattr(cu, name + end, None)))


# --- the GPU -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """Facts about a GPU; sizes in bytes. `vmm`: ranges may be reserved and mapped by pages."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    n_sm: int
    shared_per_block: int
    n_bytes: int
    vmm: bool
    pools: bool

    @property
    def arch(self) -> str:
        """The architecture to compile for; Hopper's own instructions want the `a`."""
        major, minor = self.capability
        return "sm_90a" if self.capability == (9, 0) else f"sm_{major}{minor}"


def gpus() -> list[Gpu]:
    """Every GPU that the driver shows; DeviceError where it shows none."""
    call(cu.cuInit, 0, doing="looking for a GPU")
    return [_gpu(i) for i in range(call(cu.cuDeviceGetCount, doing="counting GPUs"))]


def _gpu(ordinal: int) -> Gpu:
    doing = f"asking about GPU {ordinal}"
    device = call(cu.cuDeviceGet, ordinal, doing=doing)

    def fact(name: str) -> int:
        attribute = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return call(cu.cuDeviceGetAttribute, attribute, device, doing=doing)

    return Gpu(
        ordinal,
        call(cu.cuDeviceGetName, 256, device, doing=doing).split(b"\0")[0].decode(),
        (fact("COMPUTE_CAPABILITY_MAJOR"), fact("COMPUTE_CAPABILITY_MINOR")),
        fact("MULTIPROCESSOR_COUNT"),
        fact("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        call(cu.cuDeviceTotalMem, device, doing=doing),
        bool(fact("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")),
        bool(fact("MEMORY_POOLS_SUPPORTED")),
    )


class Context:
    """A GPU's primary context, current in the thread that opened it until it is closed."""

    def __init__(self, gpu: Gpu):
        doing = f"opening {gpu.name}"
        self._device = call(cu.cuDeviceGet, gpu.ordinal, doing=doing)
        self._before = call(cu.cuCtxGetCurrent, doing=doing)
        self._handle = call(cu.cuDevicePrimaryCtxRetain, self._device, doing=doing)
        self.enter()

    def enter(self) -> None:
        """Makes it current in the calling thread."""
        call(cu.cuCtxSetCurrent, self._handle, doing="entering the GPU's context")

    def close(self) -> None:
        cu.cuCtxSetCurrent(self._before)
        call(cu.cuDevicePrimaryCtxRelease, self._device, doing="leaving the GPU")


# --- streams, events, kernels ------------------------------------------------------------------


class Stream:
    """An ordered queue of the GPU, or the recording of one."""

    def __init__(self) -> None:
        flags = int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.handle = call(cu.cuStreamCreate, flags, doing="making a stream")

    def wait(self) -> None:
        call(cu.cuStreamSynchronize, self.handle, doing="waiting for queued work")

    def begin_capture(self) -> None:
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call(cu.cuStreamBeginCapture, self.handle, mode, doing="beginning a capture")

    def end_capture(self) -> Any:
        """The graph that was recorded."""
        return call(cu.cuStreamEndCapture, self.handle, doing="ending a capture")

    def abandon_capture(self) -> None:
        """Ends a capture that has failed; its graph, if there is one, goes."""
        code, graph = cu.cuStreamEndCapture(self.handle)
        if not code and int(graph):
            cu.cuGraphDestroy(graph)

    def last_node(self) -> Any:
        """The node of what was captured last, on which the next one will depend."""
        info = call(_newest("cuStreamGetCaptureInfo"), self.handle, doing="mapping a capture")
        nodes = info[3]
        if not nodes:
            raise DeviceError("mapping a capture: the stream's launch made no graph node")
        return nodes[-1]

    def close(self) -> None:
        call(cu.cuStreamDestroy, self.handle, doing="closing a stream")


class Event:
    """A moment in a stream."""

    def __init__(self, timed: bool = True) -> None:
        flags = cu.CUevent_flags
        flag = flags.CU_EVENT_DEFAULT if timed else flags.CU_EVENT_DISABLE_TIMING
        self._handle = call(cu.cuEventCreate, int(flag), doing="making an event")

    def record(self, stream: Stream) -> None:
        call(cu.cuEventRecord, self._handle, stream.handle, doing="recording an event")

    def wait(self) -> None:
        call(cu.cuEventSynchronize, self._handle, doing="waiting for an event")

    def seconds_since(self, earlier: "Event") -> float:
        self.wait()
        return 1e-3 * call(
            cu.cuEventElapsedTime, earlier._handle, self._handle, doing="timing queued work"
        )

    def close(self) -> None:
        call(cu.cuEventDestroy, self._handle, doing="closing an event")


class Function:
    """A kernel of a loaded module. `shared` bytes are static, `registers` are a thread's."""

    def __init__(self, module: Any, name: str, where: str):
        self.name = name
        self._doing = f"loading {name} of {where}"
        self.handle = call(cu.cuModuleGetFunction, module, name.encode(), doing=self._doing)
        self.shared = self._fact("SHARED_SIZE_BYTES")  # asking loads it: a capture must not
        self.registers = self._fact("NUM_REGS")
        self._dynamic = 48 << 10  # what every kernel may have

    def _fact(self, name: str) -> int:
        attribute = getattr(cu.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return call(cu.cuFuncGetAttribute, attribute, self.handle, doing=self._doing)

    def allow_shared(self, n_bytes: int) -> None:
        """Lets launches have so much dynamic shared memory."""
        if n_bytes + self.shared > self._dynamic:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(cu.cuFuncSetAttribute, self.handle, attribute, n_bytes,
                 doing=f"{self.name} wants {n_bytes} bytes of shared memory")
            self._dynamic = n_bytes + self.shared


def load_module(cubin: bytes, where: str) -> Any:
    return call(cu.cuModuleLoadData, cubin, doing=f"loading the kernels of {where}")


def unload_module(module: Any) -> None:
    call(cu.cuModuleUnload, module, doing="unloading kernels")


class Prepared:
    """All that a launch needs, made once: what the driver reads at every launch is in place.

    `store` holds the arguments, 8 bytes each, `pointers` their addresses; both must stay alive.
    """

    __slots__ = ("_node", "config", "function", "name", "params", "pdl", "pointers", "store")

    def __init__(self, function: Function, stream: Stream, grid: tuple[int, int, int], block: int,
                 shared: int, pdl: bool, store: np.ndarray):
        function.allow_shared(shared)
        self.name, self.function, self.pdl = function.name, function.handle, pdl
        self.store = store
        self.pointers = store.ctypes.data + np.arange(len(store), dtype=np.uint64) * np.uint64(8)
        self.params = int(self.pointers.ctypes.data)
        self.config = _shape(cu.CUlaunchConfig(), grid, block, shared)
        self.config.hStream = stream.handle
        self._node: Any = None
        if pdl:
            attribute = cu.CUlaunchAttribute()
            attribute.id = PDL
            attribute.value.programmaticStreamSerializationAllowed = 1
            self.config.attrs, self.config.numAttrs = [attribute], 1

    @property
    def node(self) -> Any:
        """The same for a graph's node."""
        if self._node is None:
            c = self.config
            grid = (c.gridDimX, c.gridDimY, c.gridDimZ)
            self._node = _shape(
                cu.CUDA_KERNEL_NODE_PARAMS(), grid, c.blockDimX, c.sharedMemBytes
            )
            self._node.func, self._node.kernelParams = self.function, self.params
        return self._node


def _shape(where: Any, grid: tuple[int, int, int], block: int, shared: int) -> Any:
    where.gridDimX, where.gridDimY, where.gridDimZ = grid
    where.blockDimX, where.blockDimY, where.blockDimZ = block, 1, 1
    where.sharedMemBytes = shared
    return where


# --- graphs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A node as the driver tells it. `params`: each argument's bytes; `after`: nodes before it,
    by index, with True where the edge is programmatic."""

    function: str
    grid: tuple[int, int, int]
    block: int
    shared: int
    params: tuple[bytes, ...]
    after: tuple[tuple[int, bool], ...]


class Graph:
    """A graph and its executable; the nodes' handles live as long as the graph."""

    def __init__(self, handle: Any = None):
        if handle is None:
            handle = call(cu.cuGraphCreate, 0, doing="making a graph")
        self.handle = handle
        self._exec: Any = None

    def add(self, prepared: Prepared) -> Any:
        """A kernel node without edges."""
        return call(cu.cuGraphAddKernelNode, self.handle, None, 0, prepared.node,
                    doing=f"adding {prepared.name} to a graph")

    def connect(self, edges: Sequence[tuple[Any, Any, bool]]) -> None:
        """Adds edges (from, to, programmatic)."""
        if not edges:
            return
        starts, ends, early = (list(column) for column in zip(*edges, strict=True))
        call(_newest("cuGraphAddDependencies"), self.handle, starts, ends,
             [_edge(e) for e in early], len(edges), doing="connecting a graph")

    def instantiate(self, stream: Stream) -> None:
        """Makes the executable and brings it to the GPU."""
        self._exec = call(cu.cuGraphInstantiate, self.handle, 0, doing="instantiating a graph")
        call(cu.cuGraphUpload, self._exec, stream.handle, doing="uploading a graph")

    def launch(self, stream: Stream) -> None:
        code = cu.cuGraphLaunch(self._exec, stream.handle)[0]
        if code:
            raise failure("cuGraphLaunch", code, "launching a graph")

    def set(self, node: Any, prepared: Prepared) -> None:
        """From the next launch on the executable's node runs `prepared`; same kernel only."""
        code = cu.cuGraphExecKernelNodeSetParams(self._exec, node, prepared.node)[0]
        if code:
            name = "cuGraphExecKernelNodeSetParams"
            raise failure(name, code, f"updating {prepared.name} in a graph")

    def adopt(self, other: "Graph") -> bool:
        """Takes over another graph's parameters; False where the two differ in topology."""
        code = cu.cuGraphExecUpdate(self._exec, other.handle)[0]
        if code == cu.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE:
            return False
        if code:
            raise failure("cuGraphExecUpdate", code, "updating a graph from another")
        return True

    def read_back(self) -> list[Node]:
        """The kernel nodes, in the order in which they were added."""
        doing = "reading a graph"
        _, count = call(cu.cuGraphGetNodes, self.handle, doing=doing)
        nodes, _ = call(cu.cuGraphGetNodes, self.handle, count, doing=doing)
        *_, n_edges = call(_newest("cuGraphGetEdges"), self.handle, doing=doing)
        starts, ends, data, _ = call(
            _newest("cuGraphGetEdges"), self.handle, n_edges, doing=doing
        )
        index = {int(node): i for i, node in enumerate(nodes)}
        after: list[list[tuple[int, bool]]] = [[] for _ in nodes]
        for start, end, edge in zip(starts, ends, data, strict=True):
            after[index[int(end)]].append((index[int(start)], edge.type == PROGRAMMATIC))
        return [_read_node(n, tuple(sorted(a))) for n, a in zip(nodes, after, strict=True)]

    def close(self) -> None:
        """Frees both; the executable must be idle."""
        if self._exec is not None:
            call(cu.cuGraphExecDestroy, self._exec, doing="closing a graph's executable")
        call(cu.cuGraphDestroy, self.handle, doing="closing a graph")


def _edge(programmatic: bool) -> Any:
    edge = cu.CUgraphEdgeData()
    if programmatic:
        edge.from_port, edge.type = PROGRAMMATIC_PORT, PROGRAMMATIC
    return edge


def _read_node(node: Any, after: tuple[tuple[int, bool], ...]) -> Node:
    p = call(cu.cuGraphKernelNodeGetParams, node, doing="reading a graph's node")
    name = call(cu.cuFuncGetName, p.func, doing="reading a graph's node")
    return Node(
        name.decode(), (p.gridDimX, p.gridDimY, p.gridDimZ), p.blockDimX, p.sharedMemBytes,
        tuple(_read_params(p.func, int(p.kernelParams))), after,
    )


def _read_params(function: Any, pointers: int) -> list[bytes]:
    values: list[bytes] = []
    while True:
        code, _, size = cu.cuFuncGetParamInfo(function, len(values))
        if code:  # past the last one
            return values
        where = ctypes.c_uint64.from_address(pointers + 8 * len(values)).value
        values.append(ctypes.string_at(where, size))


# --- memory ------------------------------------------------------------------------------------


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
