"""A graph that the driver has otherwise than it was planned is an error that names the place."""

from dataclasses import dataclass, replace

import pytest
from tiny import tiny_model

from llamagraph.devices.cpu import CpuDevice
from llamagraph.errors import LlamaGraphError
from llamagraph.gguf.reader import GGUFFile
from llamagraph.inspection import Setting, inspect
from llamagraph.inspection_driver import verify
from llamagraph.planner import Planner
from llamagraph.program.launch import Buffer
from llamagraph.program.target import target_named


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "m.gguf", n_ctx=1024, n_layer=3)


@pytest.fixture(scope="module")
def planner(path):
    return Planner(GGUFFile(path), target_named("numpy"))


@dataclass(frozen=True)
class DriverNode:
    """As `devices.cuda.driver.Node`."""

    function: str
    grid: tuple
    block: int
    shared: int
    params: tuple
    after: tuple


def pack(call):
    """Stands for a GPU's packing: a value's text, 8 bytes of it."""
    return [repr((a.arena, a.start) if isinstance(a, Buffer) else a).encode()[-8:].ljust(8)
            for a in call.args]


class ReadableDevice(CpuDevice):
    """Keeps the calls that it binds, and tells a graph's as a driver would; `spoil` errs."""

    def __init__(self, spoil=lambda nodes: nodes):
        super().__init__()
        self.spoil, bind = spoil, self.queue.bind
        self.calls = {}

        def remember(call):
            bound = bind(call)
            self.calls[id(bound)] = (call, bound)
            return bound

        self.queue.bind, self.graphs.read_back = remember, self._read_back

    def _read_back(self, graph):
        before = graph.before or [[i - 1] if i else [] for i in range(len(graph.bound))]
        calls = [self.calls[id(b)][0] for b in graph.bound]
        return self.spoil([
            DriverNode(c.kernel.name, c.grid, c.block, c.shared, tuple(pack(c)),
                       tuple((j, False) for j in b))
            for c, b in zip(calls, before, strict=True)])


def read(path, planner, mode, spoil=lambda nodes: nodes, depth=300):
    device = ReadableDevice(spoil)
    try:
        return verify(GGUFFile(path), device, inspect(planner, Setting(1, depth, mode)), None,
                      pack=pack)
    finally:
        device.close()


@pytest.mark.parametrize("mode", ["capture", "build", "partial"])
def test_a_graph_as_planned_is_counted(path, planner, mode):
    found = read(path, planner, mode)
    driver, in_graphs = found.totals["driver"], [n for n in found.nodes if n.part is not None]
    assert driver["nodes"] == len(in_graphs) and driver["graphs"] == found.totals["graphs"]


@pytest.mark.parametrize("change, message", [
    ({"grid": (9, 9, 9)}, r"blk.0.attn: grid is \(9, 9, 9\), planned"),
    ({"function": "other"}, "blk.0.attn: function is other"),
    ({"after": ()}, "blk.0.attn: after is"),
    ({"params": ()}, "blk.0.attn: 0 arguments, planned"),
    (None, "nodes are planned"),
])
def test_a_graph_that_differs_fails_loudly(path, planner, change, message):
    at = [n.label for n in inspect(planner, Setting()).nodes].index("blk.0.attn")

    def spoil(nodes):
        if change is None:
            return nodes[:-1]
        return [*nodes[:at], replace(nodes[at], **change), *nodes[at + 1 :]]

    with pytest.raises(LlamaGraphError, match=message):
        read(path, planner, "build", spoil)


def test_an_argument_that_differs_is_named(path, planner):
    def spoil(nodes):
        first = nodes[0]
        return [replace(first, params=(b"\0" * 8, *first.params[1:])), *nodes[1:]]

    with pytest.raises(LlamaGraphError, match=r"token_embd: argument .* is 0000"):
        read(path, planner, "capture", spoil)


def test_where_there_is_nothing_to_read_back_it_is_said(path, planner):
    with pytest.raises(LlamaGraphError, match="makes no graph"):
        read(path, planner, "stream")
    with pytest.raises(LlamaGraphError, match="--target numpy"):
        verify(GGUFFile(path), CpuDevice(), inspect(planner, Setting()))
