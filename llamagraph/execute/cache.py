"""Executors by `StepKey`: made at first use, of the least recently used one when full."""

from collections import OrderedDict
from collections.abc import Callable

from llamagraph.execute.stream import Stream
from llamagraph.program.launch import StepKey


class ExecutorCache:
    """At most `limit` executors; `make(key, old)` plans and prepares one.

    `old`, None while there is room, is the least recently used one: `make` takes of it what it can
    update to the new program, the rest is closed.
    """

    def __init__(self, make: Callable[[StepKey, Stream | None], Stream], limit: int = 16):
        self._make, self.limit = make, limit
        self._executors: OrderedDict[StepKey, Stream] = OrderedDict()
        self.made = 0

    def __getitem__(self, key: StepKey) -> Stream:
        if key not in self._executors:
            while len(self._executors) > self.limit:
                self._least_used().close()
            old = self._least_used() if len(self._executors) == self.limit else None
            try:
                self._executors[key] = self._make(key, old)
            finally:
                if old:
                    old.close()
            self.made += 1
        self._executors.move_to_end(key)
        return self._executors[key]

    def _least_used(self) -> Stream:
        return self._executors.popitem(last=False)[1]

    def __contains__(self, key: StepKey) -> bool:
        return key in self._executors

    def __len__(self) -> int:
        return len(self._executors)

    def values(self) -> list[Stream]:
        return list(self._executors.values())

    def close(self) -> None:
        while self._executors:
            self._executors.popitem()[1].close()
