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
from llamagraph.program.device import GraphNode
from llamagraph.program.launch import COPY

OUT_OF_MEMORY = cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
PDL = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
PROGRAMMATIC = int(cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
PROGRAMMATIC_PORT = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
WINDOW = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
PRIORITY = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PRIORITY


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
    """Facts about a GPU; sizes in bytes. `vmm`: ranges may be reserved and mapped by pages.

    `l2_persist` is what of the L2 cache may be set aside, `l2_window` the longest range that a
    launch may ask it to keep. `watchdog`: a display depends on it, and kernels that run for seconds
    are ended.
    """

    ordinal: int
    name: str
    capability: tuple[int, int]
    n_sm: int
    shared_per_block: int
    n_bytes: int
    vmm: bool
    pools: bool
    l2_persist: int = 0
    l2_window: int = 0
    watchdog: bool = False

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
        fact("MAX_PERSISTING_L2_CACHE_SIZE"),
        fact("MAX_ACCESS_POLICY_WINDOW_SIZE"),
        bool(fact("KERNEL_EXEC_TIMEOUT")),
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


class SetAside:
    """L2 cache for what launches ask it to keep, of the current context until it is closed.

    It is taken from all others, so only once `open` has been called.
    """

    def __init__(self, n_bytes: int):
        self.n_bytes, self._before = n_bytes, None
        self._limit = cu.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE

    def open(self) -> None:
        if self._before is None:
            doing = f"setting aside {self.n_bytes} bytes of L2"
            self._before = call(cu.cuCtxGetLimit, self._limit, doing=doing)
            call(cu.cuCtxSetLimit, self._limit, self.n_bytes, doing=doing)

    def close(self) -> None:
        if self._before is not None:
            call(cu.cuCtxResetPersistingL2Cache, doing="freeing set aside L2")
            call(cu.cuCtxSetLimit, self._limit, self._before, doing="giving back set aside L2")


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

    `call(*args)`, unchecked, launches it. `store` holds the kernel's arguments, 8 bytes each,
    `pointers` their addresses; both must stay alive. `window`: address, bytes and the share of
    them that the L2 cache is asked to keep.
    """

    __slots__ = ("_node", "args", "call", "config", "function", "name", "params", "pdl",
                 "pointers", "store", "window")

    def __init__(self, function: Function, stream: Stream, grid: tuple[int, int, int], block: int,
                 shared: int, pdl: bool, store: np.ndarray,
                 window: tuple[int, int, float] | None = None):
        function.allow_shared(shared)
        self.name, self.function, self.pdl = function.name, function.handle, pdl
        self.store, self.window = store, window
        self.pointers = store.ctypes.data + np.arange(len(store), dtype=np.uint64) * np.uint64(8)
        self.params = int(self.pointers.ctypes.data)
        self.config = _shape(cu.CUlaunchConfig(), grid, block, shared)
        self.config.hStream = stream.handle
        self._node: Any = None
        attributes = self._attributes()
        self.config.attrs, self.config.numAttrs = attributes, len(attributes)
        self.call, self.args = cu.cuLaunchKernelEx, (self.config, self.function, self.params, 0)

    def _attributes(self) -> list[Any]:
        found = []
        if self.pdl:
            found.append(cu.CUlaunchAttribute())
            found[-1].id, found[-1].value.programmaticStreamSerializationAllowed = PDL, 1
        if self.window:
            found.append(cu.CUlaunchAttribute())
            found[-1].id, found[-1].value = WINDOW, _window(self.window)
        return found

    def add(self, graph: Any, priority: int) -> Any:
        """A node of it in a graph. Of two that could run, that of the higher priority is first."""
        doing = f"adding {self.name} to a graph"
        node = call(cu.cuGraphAddKernelNode, graph, None, 0, self.node, doing=doing)
        if self.window:
            call(cu.cuGraphKernelNodeSetAttribute, node, WINDOW, _window(self.window), doing=doing)
        if priority:
            value = cu.CUkernelNodeAttrValue()
            value.priority = -priority  # lower numbers go first
            call(cu.cuGraphKernelNodeSetAttribute, node, PRIORITY, value, doing=doing)
        return node

    def set(self, executable: Any, node: Any) -> None:
        """From the next launch on an executable's node runs this; of the same kernel only."""
        call(cu.cuGraphExecKernelNodeSetParams, executable, node, self.node,
             doing=f"updating {self.name} in a graph")

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


def _window(window: tuple[int, int, float]) -> Any:
    """The value of a launch's or a node's attribute; what is not to be kept goes first."""
    value, asked = cu.CUkernelNodeAttrValue(), cu.CUaccessPolicyWindow()
    asked.base_ptr, asked.num_bytes, asked.hitRatio = window
    asked.hitProp = cu.CUaccessProperty.CU_ACCESS_PROPERTY_PERSISTING
    asked.missProp = cu.CUaccessProperty.CU_ACCESS_PROPERTY_STREAMING
    value.accessPolicyWindow = asked
    return value


class PreparedCopy:
    """A copy of bytes, from and to memory of the GPU or pinned memory of the host."""

    __slots__ = ("_node", "args", "call", "name", "pdl")

    def __init__(self, source: int, target: int, n_bytes: int, stream: Stream):
        self.name, self.pdl = f"a copy of {n_bytes} bytes", False
        self.call, self.args = cu.cuMemcpyAsync, (target, source, n_bytes, stream.handle)
        self._node = copied = cu.CUDA_MEMCPY3D()
        copied.srcMemoryType = copied.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        copied.srcDevice, copied.dstDevice = source, target
        copied.WidthInBytes, copied.Height, copied.Depth = n_bytes, 1, 1

    def add(self, graph: Any, priority: int) -> Any:
        """A node of it in a graph."""
        doing = f"adding {self.name} to a graph"
        context = call(cu.cuCtxGetCurrent, doing=doing)
        return call(cu.cuGraphAddMemcpyNode, graph, None, 0, self._node, context, doing=doing)

    def set(self, executable: Any, node: Any) -> None:
        """From the next launch on an executable's node copies this."""
        doing = f"updating {self.name} in a graph"
        context = call(cu.cuCtxGetCurrent, doing=doing)
        call(cu.cuGraphExecMemcpyNodeSetParams, executable, node, self._node, context, doing=doing)


Bound = Prepared | PreparedCopy


def _shape(where: Any, grid: tuple[int, int, int], block: int, shared: int) -> Any:
    where.gridDimX, where.gridDimY, where.gridDimZ = grid
    where.blockDimX, where.blockDimY, where.blockDimZ = block, 1, 1
    where.sharedMemBytes = shared
    return where


# --- graphs ------------------------------------------------------------------------------------


class Graph:
    """A graph and its executable; the nodes' handles live as long as the graph.

    Nodes are in its `body`: in a loop that is the graph which the only other node repeats, and
    `condition` the handle by which a kernel of the body says whether it does.
    """

    def __init__(self, handle: Any = None):
        if handle is None:
            handle = call(cu.cuGraphCreate, 0, doing="making a graph")
        self.handle = self.body = handle
        self.condition = 0
        self._exec: Any = None

    def add_loop(self) -> None:
        """Adds a WHILE node with an empty body; its condition holds when the graph is launched."""
        doing = "adding a loop to a graph"
        context = call(cu.cuCtxGetCurrent, doing=doing)
        handle = call(cu.cuGraphConditionalHandleCreate, self.handle, context, 1,
                      cu.CU_GRAPH_COND_ASSIGN_DEFAULT, doing=doing)
        node = cu.CUgraphNodeParams()
        node.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle, node.conditional.ctx = handle, context
        node.conditional.type = cu.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        node.conditional.size = 1
        add = getattr(cu, "cuGraphAddNode_v2", cu.cuGraphAddNode)  # 12.9's form with edge data
        call(add, self.handle, None, None, 0, node, doing=doing)
        self.body, self.condition = node.conditional.phGraph_out[0], int(handle)

    def add(self, prepared: Bound, priority: int = 0) -> Any:
        """A node without edges."""
        return prepared.add(self.body, priority)

    def connect(self, edges: Sequence[tuple[Any, Any, bool]]) -> None:
        """Adds edges (from, to, programmatic).

        A call for each kind: drivers up to 610 give all edges of a call the kind of its first.
        """
        for kind in (False, True):
            pairs = [(start, end) for start, end, early in edges if early == kind]
            if pairs:
                starts, ends = (list(column) for column in zip(*pairs, strict=True))
                call(_newest("cuGraphAddDependencies"), self.body, starts, ends,
                     [_edge(kind)] * len(pairs), len(pairs), doing="connecting a graph")

    def instantiate(self) -> None:
        """Makes the executable, in which nodes have the priority that they were added with."""
        flag = cu.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY
        self._exec = call(cu.cuGraphInstantiate, self.handle, int(flag),
                          doing="instantiating a graph")

    def upload(self, stream: Stream) -> None:
        """Brings the executable to the GPU."""
        call(cu.cuGraphUpload, self._exec, stream.handle, doing="uploading a graph")

    def launch(self, stream: Stream) -> None:
        code = cu.cuGraphLaunch(self._exec, stream.handle)[0]
        if code:
            raise failure("cuGraphLaunch", code, "launching a graph")

    def set(self, node: Any, prepared: Bound) -> None:
        """From the next launch on the executable's node runs `prepared`."""
        prepared.set(self._exec, node)

    def adopt(self, other: "Graph") -> bool:
        """The executable takes over another graph's parameters; False where it cannot.

        Its nodes are still those of this graph.
        """
        code = cu.cuGraphExecUpdate(self._exec, other.handle)[0]
        if code == cu.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE:
            return False
        if code:
            raise failure("cuGraphExecUpdate", code, "updating a graph from another")
        return True

    def read_back(self) -> list[GraphNode]:
        """The nodes, in the order in which they were added; of a loop those of its body."""
        doing = "reading a graph"
        _, count = call(cu.cuGraphGetNodes, self.body, doing=doing)
        nodes, _ = call(cu.cuGraphGetNodes, self.body, count, doing=doing)
        *_, n_edges = call(_newest("cuGraphGetEdges"), self.body, doing=doing)
        starts, ends, data, _ = call(
            _newest("cuGraphGetEdges"), self.body, n_edges, doing=doing
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


def _read_node(node: Any, after: tuple[tuple[int, bool], ...]) -> GraphNode:
    doing, kinds = "reading a graph's node", cu.CUgraphNodeType
    if call(cu.cuGraphNodeGetType, node, doing=doing) == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
        return _read_copy(node, after)
    p = call(cu.cuGraphKernelNodeGetParams, node, doing=doing)
    name = call(cu.cuFuncGetName, p.func, doing=doing)
    w = call(cu.cuGraphKernelNodeGetAttribute, node, WINDOW, doing=doing).accessPolicyWindow
    window = (int(w.base_ptr), w.num_bytes, w.hitRatio) if w.num_bytes else None
    priority = -call(cu.cuGraphKernelNodeGetAttribute, node, PRIORITY, doing=doing).priority
    registers = call(cu.cuFuncGetAttribute, cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS,
                     p.func, doing=doing)
    return GraphNode(
        name.decode(), (p.gridDimX, p.gridDimY, p.gridDimZ), p.blockDimX, p.sharedMemBytes,
        tuple(_read_params(p.func, int(p.kernelParams))), after, window, priority, registers,
    )


def _read_copy(node: Any, after: tuple[tuple[int, bool], ...]) -> GraphNode:
    p = call(cu.cuGraphMemcpyNodeGetParams, node, doing="reading a graph's node")
    host = cu.CUmemorytype.CU_MEMORYTYPE_HOST
    ends = [int(at_host if kind == host else at or 0) for kind, at_host, at in (
        (p.srcMemoryType, p.srcHost, p.srcDevice), (p.dstMemoryType, p.dstHost, p.dstDevice))]
    params = (*(end.to_bytes(8, "little") for end in ends), p.WidthInBytes.to_bytes(4, "little"))
    return GraphNode(COPY, (1, 1, 1), 0, 0, params, after)


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
