"""What a device is: three objects and a target. Every executor and the runner see only this."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llamagraph.program.launch import Buffer, Call, Kernel, Launch
from llamagraph.program.target import Target


class Repack(Protocol):
    """How a device that has layouts of its own stores a weight."""

    def convert(self, weight: Buffer, raw: Any) -> Any:
        """The file's bytes, uint8 (n_bytes,), in the type that the weight is stored in."""

    def launch(self, weight: Buffer, raw: Buffer) -> Launch | None:
        """Brings those bytes, now on the device, into the weight's layout; None where they are."""


class Memory(Protocol):
    """Arenas of bytes. Buffers keep their address for as long as the device is open."""

    def reserve(self, arena: str, n_bytes: int) -> None:
        """Makes an arena of that size; its bytes become usable with `grow`."""

    def grow(self, arena: str, start: int, stop: int) -> None:
        """Makes the bytes from start to stop usable. Raises MemoryLimitError."""

    def available(self) -> int:
        """Bytes that can still be used."""

    def weight_bytes(self, weight: Buffer) -> int:
        """Bytes that a weight takes on this device."""

    def upload(self, weight: Buffer, raw: Any, repack: Repack) -> None:
        """Stores a weight from its bytes in the file, uint8 (n_bytes,)."""

    def write(self, buffer: Buffer, values: Any, first: int = 0) -> None:
        """Writes numbers into a buffer from element `first` on, behind the work queued so far."""

    def read(self, buffer: Buffer) -> Any:
        """The buffer as a numpy array of its shape, after all queued work."""

    def host_view(self, buffer: Buffer) -> Any:
        """A live numpy array over a buffer of the `mapped` arena, which begins as zeros."""

    def address(self, buffer: Buffer) -> Any:
        """What stands for the buffer in a `Call`; compares by value."""

    def account(self) -> dict[str, int]:
        """Bytes in use, by arena."""


class Queue(Protocol):
    """An ordered queue of launches. `ahead`: launches return before their work is done."""

    ahead: bool

    def load(self, kernels: Iterable[Kernel]) -> None:
        """Makes kernels ready, many at once in less time than one by one in `bind`."""

    def bind(self, call: Call) -> Any:
        """The call made ready: its kernel loaded, its arguments packed."""

    def pack(self, call: Call) -> Sequence[bytes]:
        """The call's arguments as `Graphs.read_back` tells them, 8 bytes each."""

    def launch(self, bound: Any) -> Any:
        """Queues a bound call; inside a capture returns its node."""

    def wait(self) -> None:
        """Returns when all queued work is done."""

    def rest(self, seconds: float) -> None:
        """Passes about so much time, in which queued work goes on."""

    def time(self, work: Callable[[], Any]) -> float:
        """Seconds that the device takes for what `work` queues."""


@dataclass(frozen=True)
class GraphNode:
    """A node as a device's graph has it. `params`: each argument's bytes; `after`: the nodes
    before it, by index, with True where it may start early; `window` as in a `Call`; `registers`
    are a thread's, 0 where a kernel has none."""

    function: str
    grid: tuple[int, int, int]
    block: int
    shared: int
    params: tuple[bytes, ...]
    after: tuple[tuple[int, bool], ...]
    window: tuple[Any, int, float] | None = None
    priority: int = 0
    registers: int = 0


class Graphs(Protocol):
    """Executables made of bound calls. `no_loop` says why there are no loops, if there are none.

    `old`, given to what makes one, is an executable that nobody needs any more: it becomes the new
    one, updated whole, where its nodes and edges are the same, and is closed where they are not.
    """

    no_loop: str

    def capture(self, record: Callable[[], Sequence[Any]], old: Any = None
                ) -> tuple[Any, Sequence[Any]]:
        """Runs `record` in a capture: the executable, and a node for each that it returned."""

    def build(self, bound: Sequence[Any], before: Sequence[Sequence[int]],
              priority: Sequence[int], old: Any = None, condition: Buffer | None = None
              ) -> tuple[Any, Sequence[Any]]:
        """One node a bound call, an edge from each of `before[i]` to i: executable and nodes.

        Of nodes that could run, those with the higher `priority` are first. With `condition` a
        replay repeats all of it until a call leaves condition[2] at 0; words 0 and 1 are the
        device's own. What is repeated is always made anew.
        """

    def update(self, graph: Any, node: Any, bound: Any) -> None:
        """Lets a node launch another bound call of the same kernel from the next replay on."""

    def replay(self, graph: Any) -> None:
        """Queues the executable."""

    def read_back(self, graph: Any) -> Sequence[GraphNode]:
        """The nodes that it was made with, in their order; single updates do not show."""

    def handle(self, graph: Any) -> int:
        """The number by which a call within a loop sets its condition; 0 where there is none."""

    def size(self, graph: Any) -> int:
        """Bytes that the executable takes, as far as they are known."""

    def times(self, graph: Any) -> Mapping[str, float]:
        """Seconds that the steps of making it took, by name."""

    def close(self, graph: Any) -> None:
        """Frees the executable once it is idle; again it does nothing."""


class Device(Protocol):
    """`name` is what --device calls it."""

    name: str
    target: Target

    @property
    def memory(self) -> Memory: ...

    @property
    def queue(self) -> Queue: ...

    @property
    def graphs(self) -> Graphs: ...

    def close(self) -> None:
        """Frees everything; the device cannot be used after."""
