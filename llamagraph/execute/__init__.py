"""Executors: the ways to run a program on a device, all readers of the same launch list."""

from llamagraph.execute.cache import ExecutorCache
from llamagraph.execute.graph import Built, Captured, Loop, Partial
from llamagraph.execute.stream import Stream

EXECUTORS = {"stream": Stream, "capture": Captured, "build": Built, "partial": Partial,
             "loop": Loop}

__all__ = ["EXECUTORS", "ExecutorCache"]
