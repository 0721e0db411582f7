"""A graph that the device has otherwise than it was planned is an error that names the place."""

from dataclasses import replace

import pytest
from tiny import tiny_model

from llamagraph.devices.cpu import CpuDevice
from llamagraph.errors import DeviceError, LlamaGraphError
from llamagraph.gguf.reader import GGUFFile
from llamagraph.inspection import Setting, inspect
from llamagraph.inspection_driver import verify
from llamagraph.planner import Planner
from llamagraph.program.launch import Window
from llamagraph.program.target import target_named


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "m.gguf", n_ctx=1024, n_layer=3)


@pytest.fixture(scope="module")
def planner(path):
    return Planner(GGUFFile(path), target_named("numpy"))


def label_at(planner, label):
    return [n.label for n in inspect(planner, Setting()).nodes].index(label)


def read(path, planner, mode, spoil=lambda graph: None, setting=None, steps=0):
    """What is found when `spoil` has changed the graph that was made."""
    device = CpuDevice()
    capture, build = device.graphs.capture, device.graphs.build

    def spoilt(make):
        def made(*arguments):
            graph, nodes = make(*arguments)
            spoil(graph)
            return graph, nodes
        return made

    device.graphs.capture, device.graphs.build = spoilt(capture), spoilt(build)
    device.graphs.handle = lambda graph: 0x1234 if graph.goes_on is not None else 0
    setting = replace(setting or Setting(depth=300), mode=mode)
    try:
        return verify(GGUFFile(path), device, inspect(planner, setting, steps))
    finally:
        device.close()


@pytest.mark.parametrize("setting", [Setting(depth=300), Setting(8, 5), Setting(sampler="host")],
                         ids=["decode", "prompt", "host"])
@pytest.mark.parametrize("mode", ["capture", "build", "partial", "loop"])
def test_a_graph_as_planned_is_counted(path, planner, mode, setting):
    found = read(path, planner, mode, setting=setting)
    driver, in_graphs = found.totals["driver"], [n for n in found.nodes if n.part is not None]
    assert driver["nodes"] == len(in_graphs) and driver["graphs"] == found.totals["graphs"]
    if mode in ("build", "loop"):
        assert driver["edges"] == found.totals["edges"]
    assert driver.get("handles") == ([0x1234] if "loop" in found.totals else None)
    assert set(found.totals["memory_bytes"]) >= {"weights", "kv", "scratch", "io", "mapped",
                                                 "graphs"}


def test_any_targets_list_is_read_back_with_its_windows_and_early_starts(path):
    target = target_named("sm_90a", persist=True)
    planner, device = Planner(GGUFFile(path), target), CpuDevice(target)
    found = verify(GGUFFile(path), device, inspect(planner, Setting(mode="build")))
    assert found.totals["driver"]["programmatic_edges"] > 0
    assert any(node.l2_window for node in found.nodes)


def changed(graph, at, **fields):
    """The node's call is another one, as if it had been bound so."""
    bound = graph.bound[at]
    bound.call = replace(bound.call, **fields)


SPOILT = {
    "grid": (lambda g, i: changed(g, i, grid=(9, 9, 9)), r"blk.0.attn: grid is \(9, 9, 9\), plan"),
    "block": (lambda g, i: changed(g, i, block=7), "blk.0.attn: block is 7, planned"),
    "window": (lambda g, i: changed(g, i, window=Window(0, 1, 0.5)), "blk.0.attn: window is"),
    "kernel": (lambda g, i: g.bound.__setitem__(i, g.bound[0]), "blk.0.attn: function is embed"),
    "edge": (lambda g, i: g.before[i].clear(), "blk.0.attn: after is"),
    "more edges": (lambda g, i: g.before[i].insert(0, 0), "blk.0.attn: after is"),
    "priority": (lambda g, i: g.priority.__setitem__(i, 5), "blk.0.attn: priority is 5, planned"),
    "node": (lambda g, i: (g.bound.pop(), g.before.pop(), g.priority.pop()), "nodes are planned"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_graph_that_differs_fails_loudly(path, planner, what):
    spoil, message = SPOILT[what]
    at = label_at(planner, "blk.0.attn")
    with pytest.raises(LlamaGraphError, match=message):
        read(path, planner, "build", lambda graph: spoil(graph, at))


@pytest.mark.parametrize("mode", ["capture", "build", "partial"])
def test_an_argument_that_differs_is_named(path, planner, mode):
    def spoil(graph):
        first = graph.bound[0]
        if first.call.kernel.name != "embed_rows":
            return
        args = list(first.args)
        args[0] = args[0][1:]  # the same buffer, 4 bytes on
        other = type(first)(first.func, *args, **first.keywords)
        other.call, graph.bound[0] = first.call, other

    with pytest.raises(LlamaGraphError, match=r"token_embd: argument tokens is .*, planned"):
        read(path, planner, mode, spoil)


def test_parts_that_are_missing_are_said(path, planner):
    device = CpuDevice()
    device.graphs.read_back, read_back = lambda graph: read_back(graph)[:1], device.graphs.read_back
    with pytest.raises(LlamaGraphError, match="nodes are planned, 1 are there"):
        verify(GGUFFile(path), device, inspect(planner, Setting(mode="partial")))


def test_where_there_is_nothing_to_read_back_it_is_said(path, planner):
    with pytest.raises(LlamaGraphError, match="stream makes no graph"):
        read(path, planner, "stream")

    def refuse(*_):
        raise DeviceError("capturing: not permitted")

    device = CpuDevice()
    device.graphs.capture = refuse
    with pytest.raises(LlamaGraphError, match="no graphs: capturing: not permitted"):
        verify(GGUFFile(path), device, inspect(planner, Setting(mode="capture")))


@pytest.mark.parametrize("setting, steps, at", [
    (Setting(depth=240), 40, {257: 3}), (Setting(depth=260), 60, {}),
    (Setting(rows=8, depth=240), 3, {}), (Setting(depth=250, sampler="host"), 10, {257: 3}),
])
def test_the_steps_that_are_run_update_what_was_planned(path, planner, setting, steps, at):
    found = read(path, planner, "build", setting=setting, steps=steps)
    assert found.updates.ran and found.updates.at == at
    assert found.updates.node_updates == sum(at.values())
    assert found.updates.labels == (tuple(f"blk.{i}.attn" for i in range(3)) if at else ())


def test_updates_that_were_not_planned_fail_loudly(path, planner):
    inspection = inspect(planner, Setting(depth=250, mode="capture"), 10)
    wrong = replace(inspection, updates=replace(inspection.updates, at={}, labels=()))
    with pytest.raises(LlamaGraphError, match=r"10 steps updated \{257: 3\}.*planned \{\}"):
        verify(GGUFFile(path), CpuDevice(), wrong)
