"""What the device's own steps cost: launches, replays, updates, reads, writes, uploads."""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from checks.report import Report
from checks.tiny import Bench, empty
from llamagraph.kernels.repack import Tiler
from llamagraph.program.launch import Buffer, dense

N_LAUNCHES = 300  # about as many as a small model's step has


def _per(work: Callable[[], Any], n: int, repeats: int = 30) -> float:
    """Microseconds a piece, the least of the repeats, as the host sees it."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times) / n * 1e6


def time_launches(b: Bench, report: Report, pdl: bool) -> None:
    queue, graphs, kind = b.device.queue, b.device.graphs, "PDL" if pdl else "plain"
    bound = [b.bind(empty, b.x, pdl=pdl, grid=132) for _ in range(N_LAUNCHES)]

    def stream() -> list[Any]:
        return b.launch_all(bound)

    def whole() -> None:
        stream()
        queue.wait()

    def gpu(work: Callable[[], Any]) -> float:
        return min(queue.time(work) for _ in range(30)) / N_LAUNCHES * 1e6

    host, waited = (_per(work, N_LAUNCHES) for work in (stream, whole))
    report.add("time", f"stream launch, {kind}", True,
               f"host {host:.2f} us, with wait {waited:.2f} us, "
               f"GPU {gpu(stream):.2f} us")
    queue.wait()
    started = time.perf_counter()
    graph, nodes = graphs.capture(stream)
    made = (time.perf_counter() - started) * 1e3
    report.add("time", f"graph of {N_LAUNCHES}, {kind}", True,
               f"replay host {_per(lambda: graphs.replay(graph), 1):.1f} us, "
               f"GPU {gpu(lambda: graphs.replay(graph)):.2f} us a node, made in {made:.1f} ms, "
               f"{graph.n_bytes >> 10} KiB")

    def update() -> None:
        for node, launch in zip(nodes, bound, strict=True):
            graphs.update(graph, node, launch)

    binds = _per(lambda: [b.bind(empty, b.x, pdl=pdl) for _ in range(100)], 100)
    report.add("time", f"node update, {kind}", True,
               f"{_per(update, N_LAUNCHES):.2f} us, bind {binds:.2f} us")
    graphs.close(graph)


def time_memory(b: Bench, report: Report) -> None:
    memory = b.device.memory
    one = dense("one", "scratch", 0, (1,), "I32")
    write = _per(lambda: [memory.write(one, [1]) for _ in range(100)], 100)
    read = _per(lambda: [memory.read(one) for _ in range(100)], 100)
    report.add("time", "4 bytes", True, f"write {write:.1f} us, read {read:.1f} us")
    n = 1 << 30
    with tempfile.NamedTemporaryFile(dir=".") as file:
        file.truncate(n)
        raw = np.memmap(file.name, np.uint8, "r+")
        raw[:: 4096] = 1
        raw = np.memmap(file.name, np.uint8, "r")
        weight = Buffer("w", "weights", 0, n, "U8", (n,))
        memory.reserve("weights", n)
        for kind in ("first", "second"):
            started = time.perf_counter()
            memory.upload(weight, raw, Tiler(b.device.target))
            b.device.queue.wait()
            took = time.perf_counter() - started
            report.add("time", f"upload of 1 GiB from the page cache, {kind}", True,
                       f"{n / took / 1e9:.2f} GB/s")
    report.add("self", "upload is exact", np.array_equal(memory.read(weight), raw))
    memory.reserve("weights", 1)


def run(b: Bench, report: Report) -> None:
    for pdl in (False, True) if b.pdl else (False,):
        time_launches(b, report, pdl)
    time_memory(b, report)
