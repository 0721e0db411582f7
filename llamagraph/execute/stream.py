"""Runs a program launch by launch. Knows a device's queue and the program, nothing of graphs."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from llamagraph.program.device import Device
from llamagraph.program.launch import Program


class Stream:
    """One launch after the other, from arguments that were packed once.

    `updates` counts the launches whose call has changed since the executor was made, `changed` are
    those of its last step. `graphs` has `n_nodes` nodes; `prepare_seconds` is what they took to
    make. The host queues `n_queued` things a step. `old` is an executor that nobody needs any
    more: graphs of it that can become the new one's do, and are no longer its own.
    """

    def __init__(self, device: Device, program: Program, vars: Mapping[str, int],
                 old: "Stream | None" = None):
        self.device, self.program = device, program
        self.updates = self.n_nodes = 0
        self.changed: list[int] = []
        self.graphs: list[Any] = []
        self._vars = dict(vars)
        self._calls = [launch.resolve(vars, device.memory.address) for launch in program.launches]
        device.queue.load(launch.kernel for launch in program.launches)
        self._bound = [device.queue.bind(call) for call in self._calls]
        self.n_queued = len(self._bound)
        self._variable = [i for i, launch in enumerate(program.launches) if launch.vars()]
        start = time.perf_counter()
        try:
            self._prepare(old.graphs if old and type(old) is type(self) else [])
        except BaseException:
            self.close()
            raise
        finally:
            if old:
                old.graphs = [graph for graph in old.graphs if graph not in self.graphs]
        self.prepare_seconds = time.perf_counter() - start

    def _prepare(self, old: Sequence[Any]) -> None:
        """Makes the graphs that a replay needs, of old ones where that is possible."""

    def _changed(self, vars: Mapping[str, int]) -> list[int]:
        """Binds the calls that differ under `vars` anew; which launches they are."""
        changed = self.changed = list[int]()
        if vars == self._vars:
            return changed
        self._vars = dict(vars)
        for i in self._variable:
            call = self.program.launches[i].resolve(vars, self.device.memory.address)
            if call != self._calls[i]:
                self._calls[i], self._bound[i] = call, self.device.queue.bind(call)
                changed.append(i)
        self.updates += len(changed)
        return changed

    def _launch_all(self) -> list[Any]:
        return [self.device.queue.launch(bound) for bound in self._bound]

    def run(self, vars: Mapping[str, int]) -> list[int]:
        """Queues one step; which launches were updated for it."""
        changed = self._changed(vars)
        self._launch_all()
        return changed

    def size(self) -> int:
        """Bytes of graph memory."""
        return sum(self.device.graphs.size(graph) for graph in self.graphs)

    def close(self) -> None:
        """Frees what the executor holds on the device, once it is idle."""
        if self.graphs:
            self.device.queue.wait()
        while self.graphs:
            self.device.graphs.close(self.graphs.pop())
