"""Runs a program as graphs: captured whole, built node by node, cut at unstable launches, or as the
body of a loop.

Each holds the launches that may change and sends only the calls that differ. Knows a device's
graphs and the program, no driver.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from llamagraph.execute.stream import Stream
from llamagraph.program.deps import dependencies, priorities
from llamagraph.program.launch import Buffer


class Captured(Stream):
    """The stream executor's launches, captured once and replayed."""

    def _prepare(self, old: Sequence[Any]) -> None:
        self._graph, self._nodes = self._make(*old)
        self.graphs.append(self._graph)
        self.n_nodes, self.n_queued = len(self._nodes), 1

    def _make(self, old: Any = None) -> tuple[Any, Sequence[Any]]:
        return self.device.graphs.capture(self._launch_all, old)

    def run(self, vars: Mapping[str, int]) -> list[int]:
        changed = self._changed(vars)
        for i in changed:
            self.device.graphs.update(self._graph, self._nodes[i], self._bound[i])
        self.device.graphs.replay(self._graph)
        return changed


class Built(Captured):
    """One node a launch, with the edges that hazards ask for and no others.

    Where launches may run side by side, those on the longest path are preferred.
    """

    def _make(self, old: Any = None) -> tuple[Any, Sequence[Any]]:
        before = dependencies(self.program.launches)
        priority = priorities(self.program.launches, before, self.program.key.rows)
        return self.device.graphs.build(self._bound, before, priority, old, self._condition())

    def _condition(self) -> Buffer | None:
        """What says whether the graph is repeated."""
        return None


class Loop(Built):
    """A decode step as the body of a WHILE node: one replay runs it until its last launch says no.

    Programs that do not repeat themselves are built as they are.
    """

    def _condition(self) -> Buffer | None:
        if not self.program.key.repeats:
            return None
        (condition,) = (b for b, role in self.program.launches[-1].touches() if role.writes)
        return condition


class Partial(Stream):
    """Stable runs of launches as graphs; the unstable ones between them are streamed."""

    def _prepare(self, old: Sequence[Any]) -> None:
        launches, spare = self.program.launches, iter(old)
        runs = groupby(range(len(launches)), key=lambda i: launches[i].stable)
        self._parts = [(list(run), self._capture(run, next(spare, None)) if stable else None)
                       for stable, run in ((s, list(r)) for s, r in runs)]
        self.n_nodes = sum(len(c[1]) for _, c in self._parts if c)
        self.n_queued = sum(1 if c else len(run) for run, c in self._parts)

    def _capture(self, run: Sequence[int], old: Any) -> tuple[Any, dict[int, Any]]:
        graph, nodes = self.device.graphs.capture(
            lambda: [self.device.queue.launch(self._bound[i]) for i in run], old
        )
        self.graphs.append(graph)
        return graph, dict(zip(run, nodes, strict=True))

    def run(self, vars: Mapping[str, int]) -> list[int]:
        changed = self._changed(vars)
        for run, captured in self._parts:
            if captured is None:
                for i in run:
                    self.device.queue.launch(self._bound[i])
                continue
            graph, nodes = captured
            for i in changed:
                if i in nodes:
                    self.device.graphs.update(graph, nodes[i], self._bound[i])
            self.device.graphs.replay(graph)
        return changed
