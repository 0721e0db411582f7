"""Launches made ready for the CUDA driver, and its graphs of them: made, updated, read back.

Knows no launch list and no model.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from llamagraph.devices.cuda.driver import Function, Stream, call, failure, newest
from llamagraph.program.device import GraphNode
from llamagraph.program.launch import COPY

PDL = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
PROGRAMMATIC = int(cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
PROGRAMMATIC_PORT = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
WINDOW = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
PRIORITY = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PRIORITY


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
                call(newest("cuGraphAddDependencies"), self.body, starts, ends,
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
        *_, n_edges = call(newest("cuGraphGetEdges"), self.body, doing=doing)
        starts, ends, data, _ = call(
            newest("cuGraphGetEdges"), self.body, n_edges, doing=doing
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
