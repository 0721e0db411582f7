"""Checks of the CUDA device with three tiny kernels of its own: no model and no `csrc/`."""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checks import timing
from checks.report import Report
from checks.tiny import FACTORS, Bench, N, blend, empty, error, gather
from llamagraph.devices.cuda import driver_graphs
from llamagraph.errors import LlamaGraphError
from llamagraph.program.launch import dense


def check_stream(b: Bench, report: Report) -> np.ndarray:
    outputs = []
    for pdl in (False, True) if b.pdl else (False,):
        b.clear()
        b.launch_all(b.chain(FACTORS, pdl))
        outputs.append(b.result())
        bad = error(outputs[-1], b.expected(FACTORS))
        report.add("self", f"stream of 60, {'PDL' if pdl else 'plain'}", bad < 1e-5, f"{bad:.1e}")
    report.add("self", "PDL equals plain, bit for bit", np.array_equal(outputs[0], outputs[-1]))
    return outputs[0]


def check_capture(b: Bench, report: Report, streamed: np.ndarray) -> None:
    graphs, bound = b.device.graphs, b.chain(FACTORS)
    graph, nodes = graphs.capture(lambda: b.launch_all(bound))
    b.clear()
    graphs.replay(graph)
    report.add("self", "capture equals stream", np.array_equal(b.result(), streamed))
    read = graphs.read_back(graph)
    factors = [np.frombuffer(n.params[2], np.float32)[0] for n in read if len(n.params) == 4]
    report.add("self", "nodes read back", [n.function for n in read] == ["blend"] * len(FACTORS)
               and np.allclose(factors, FACTORS), f"{len(read)} nodes, params {len(factors)}")
    early = sum(edge[1] for n in read for edge in n.after)
    report.add("self", "programmatic edges in capture", early == (len(FACTORS) - 1) * b.pdl,
               f"{early} of {sum(len(n.after) for n in read)}")
    changed = (*FACTORS[:40], 0.25, *FACTORS[41:])
    graphs.update(graph, nodes[40], b.chain(changed)[40])
    b.clear()
    graphs.replay(graph)
    bad = error(b.result(), b.expected(changed))
    report.add("self", "one node updated in place", bad < 1e-5, f"{bad:.1e}")
    again, _ = graphs.capture(lambda: b.launch_all(bound))
    adopted = graph.graph.adopt(again.graph)
    b.clear()
    graphs.replay(graph)
    report.add("self", "cuGraphExecUpdate from another graph",
               adopted and np.array_equal(b.result(), streamed))
    for g in (graph, again):
        graphs.close(g)


def check_build(b: Bench, report: Report) -> None:
    """x -> two branches -> joined: every edge matters, the join has two before it."""
    left, right = b.others[:2]
    f = (0.5, -0.7)
    bound = [b.bind(blend, b.x, left, 0.0, N), b.bind(blend, b.z, left, f[0], N),
             b.bind(blend, b.z, right, 0.0, N), b.bind(blend, b.x, right, f[1], N),
             b.bind(gather, left, right, b.y, N)]
    x, z = b.values[b.x], b.values[b.z]
    expected = np.float32(f[0]) * x + z - 2 * (np.float32(f[1]) * z + x)
    for buffer in (left, right):
        b.device.memory.fill(buffer, 0)
    graph, _ = b.device.graphs.build(bound, [[], [0], [], [2], [1, 3]], [0, 0, 1, 1, 0])
    read = b.device.graphs.read_back(graph)
    worst = 0.0
    for _ in range(200):
        b.clear()
        b.device.graphs.replay(graph)
        worst = max(worst, error(b.result(), expected))
    edges = [e for n in read for e in n.after]
    early = sum(e[1] for e in edges)
    report.add("self", "built graph with a join, 200 replays", worst < 1e-5 and early == 2 * b.pdl,
               f"{worst:.1e}, {len(edges)} edges, {early} programmatic")
    b.device.graphs.close(graph)
    if b.pdl:
        _early_join(b, report, bound, expected)


def _early_join(b: Bench, report: Report, bound: Sequence[Any], expected: np.ndarray) -> None:
    """Whether a node may start early behind two others; a fact to record, `build` does not."""
    graph = driver_graphs.Graph()
    nodes = [graph.add(p) for p in bound]
    try:
        graph.connect([(nodes[j], nodes[i], True) for j, i in ((0, 1), (2, 3), (1, 4), (3, 4))])
        stream = b.device.graphs._stream
        graph.instantiate()
        graph.upload(stream)
        worst = 0.0
        for _ in range(200):
            b.clear()
            graph.launch(stream)
            worst = max(worst, error(b.result(), expected))
        report.add("self", "fact: early start behind two nodes", True, f"works, {worst:.1e}")
    except LlamaGraphError as refused:
        report.add("self", "fact: early start behind two nodes", True, f"refused: {refused}")
    b.device.queue.wait()
    graph.close()


def check_growth(b: Bench, report: Report) -> None:
    """Pages are mapped between replays that are in flight; nothing moves."""
    memory, graphs = b.device.memory, b.device.graphs
    graph, _ = graphs.capture(lambda: b.launch_all(b.chain(FACTORS)))
    before, ok, took = memory.address(b.y), True, 0.0
    free = memory.available()
    for step in range(1, 33):
        b.clear()
        graphs.replay(graph)
        start = 16 * (step << 20)
        started = time.perf_counter()
        memory.grow("scratch", start, start + 4 * N)
        took += time.perf_counter() - started
        far = dense("far", "scratch", start, (N,))
        memory.write(far, np.full(N, step, np.float32))
        b.launch_all([b.bind(blend, b.x, far, 1.0, N)])
        ok &= error(memory.read(far), b.values[b.x] + step) < 1e-5
    ok &= error(b.result(), b.expected(FACTORS)) < 1e-5 and memory.address(b.y) == before
    used = memory.account()["scratch"]
    report.add("self", "32 pages mapped while a graph replays", ok,
               f"{took / 32 * 1e3:.2f} ms each, {used >> 20} MiB used of 1 GiB, "
               f"{(free - memory.available()) >> 20} MiB gone")
    graphs.close(graph)
    again = memory.account()["scratch"]
    memory.grow("scratch", 0, 4 * N)
    report.add("self", "growing twice maps once", memory.account()["scratch"] == again)


def _refused(work: Callable[[], Any]) -> str:
    try:
        work()
    except LlamaGraphError as refused:
        return f"{type(refused).__name__}: {refused}"
    return ""


def check_faults(b: Bench, report: Report, streamed: np.ndarray) -> None:
    def too_big() -> None:
        b.device.memory.reserve("huge", 1 << 42)
        b.device.memory.grow("huge", 0, 1 << 42)

    text = _refused(too_big)
    report.add("self", "what does not fit is refused", text.startswith("MemoryLimit"), text)
    bad = b.bind(blend, b.x, b.y, 1.0, N, block=2048)
    text = _refused(lambda: b.device.queue.launch(bad))
    report.add("self", "a bad launch is refused", "cuLaunchKernelEx" in text, text)
    text = _refused(lambda: b.device.graphs.capture(lambda: b.launch_all([bad])))
    report.add("self", "a bad capture is refused", text, text)
    waits = b.chain(FACTORS[:2])
    text = _refused(lambda: b.device.graphs.capture(
        lambda: (b.launch_all(waits), b.device.queue.wait())))
    report.add("self", "a wait within a capture is refused", text, text)
    b.clear()
    b.launch_all(b.chain(FACTORS))
    report.add("self", "the stream goes on after it", np.array_equal(b.result(), streamed))
    missing = blend(OTHER=1)
    object.__setattr__(missing, "name", "absent")
    text = _refused(lambda: b.bind(missing, b.x, b.y, 1.0, N))
    report.add("self", "an entry that is not there is named", "absent" in text, text)


def check_graph_memory(b: Bench, report: Report) -> None:
    """Executables come and go; the GPU's memory does not shrink."""
    bound, free = b.chain(FACTORS * 5), []
    for _ in range(30):
        graph, _ = b.device.graphs.capture(lambda: b.launch_all(bound))
        b.device.graphs.replay(graph)
        b.device.graphs.close(graph)
        free.append(b.device.memory.available())
    report.add("self", "30 graphs of 300 nodes leave the memory as it was", free[5] == free[-1],
               f"{(free[0] - free[-1]) / 1024:.0f} KiB less")


def run(report: Report) -> None:
    """All of it on GPU 0."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        b = Bench(Path(folder))
        gpu = b.device.gpu
        report.add("self", "opened", True, f"{gpu}; {time.perf_counter() - started:.2f} s")
        started = time.perf_counter()
        b.device.queue.load([blend, gather, empty])
        report.add("self", "compiled", b.compiler.n_compiled == 1,
                   f"NVRTC {b.compiler.version}, {time.perf_counter() - started:.2f} s")
        streamed = np.zeros(N, np.float32)
        with report.check("self", "stream"):
            streamed = check_stream(b, report)
        with report.check("self", "capture"):
            check_capture(b, report, streamed)
        with report.check("self", "faults"):
            check_faults(b, report, streamed)
        for check in (check_build, check_growth, check_graph_memory, timing.run):
            with report.check("self", check.__name__):
                check(b, report)
        b.device.close()
        again = Bench(Path(folder))
        again.device.queue.load([blend])
        report.add("self", "opened again, from the cache", again.compiler.n_compiled == 0,
                   f"{again.device.memory.available() / 1e9:.2f} GB free")
        again.device.close()
