"""Executors by `StepKey`: made at first use, the least recently used one closed when full."""

from collections import OrderedDict
from collections.abc import Callable

from llamagraph.execute.stream import Stream
from llamagraph.program.launch import StepKey


class ExecutorCache:
    """At most `limit` executors; `make(key)` plans and prepares one."""

    def __init__(self, make: Callable[[StepKey], Stream], limit: int = 16):
        self._make, self._limit = make, limit
        self._executors: OrderedDict[StepKey, Stream] = OrderedDict()
        self.made = 0

    def __getitem__(self, key: StepKey) -> Stream:
        if key not in self._executors:
            while len(self._executors) >= self._limit:
                self._executors.popitem(last=False)[1].close()
            self._executors[key] = self._make(key)
            self.made += 1
        self._executors.move_to_end(key)
        return self._executors[key]

    def __len__(self) -> int:
        return len(self._executors)

    def values(self) -> list[Stream]:
        return list(self._executors.values())

    def close(self) -> None:
        while self._executors:
            self._executors.popitem()[1].close()
