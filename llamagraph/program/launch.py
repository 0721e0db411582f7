"""The words of a step: buffers, kernels, launches and calls.

Pure data. Knows no device, no model and no file; `kernels/` writes launches, everything else reads
them.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

COPY = "copy"  # the kernel that every device has by itself: (source, target, n_bytes)
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "I8": 1, "U8": 1}


@dataclass(frozen=True)
class Buffer:
    """A named byte range of an arena.

    Compares by what it is, not by its name. `shape` is in elements, rows first; for a quantised
    weight it is the shape of the dequantised matrix while the range counts the file's bytes.
    `layout` names the order in which a weight's bytes are stored on the device.
    """

    name: str = field(compare=False)
    arena: str  # "weights", "kv", "scratch" or "io"
    start: int
    stop: int
    dtype: str
    shape: tuple[int, ...]
    layout: str = ""

    @property
    def n_bytes(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: "Buffer") -> bool:
        return (
            self.arena == other.arena and self.start < other.stop and other.start < self.stop
        )

    def covers(self, other: "Buffer") -> bool:
        return (
            self.arena == other.arena and self.start <= other.start and other.stop <= self.stop
        )

    def at(self, start: int) -> "Buffer":
        """The same buffer at another place of its arena."""
        return replace(self, start=start, stop=start + self.n_bytes)


def dense(name: str, arena: str, start: int, shape: tuple[int, ...], dtype: str = "F32") -> Buffer:
    """A buffer of plain numbers in row-major order."""
    return Buffer(name, arena, start, start + math.prod(shape) * ITEM_BYTES[dtype], dtype, shape)


@dataclass(frozen=True)
class Var:
    """A host integer that may change between steps; lives in a grid or an argument."""

    name: str


class Role(NamedTuple):
    reads: bool
    writes: bool


In = Annotated[Any, Role(True, False)]
Out = Annotated[Any, Role(False, True)]
InOut = Annotated[Any, Role(True, True)]
Value = Buffer | Var | int | float


class Param(NamedTuple):
    """One parameter of a kernel: a buffer with a role, or a number of type `int` or `float`."""

    name: str
    role: Role | None
    type: type | None


class Geometry(NamedTuple):
    """Blocks (x, y, z), threads a block, dynamic shared memory in bytes."""

    grid: tuple[int | Var, int | Var, int | Var]
    block: int
    shared: int = 0


class Work(NamedTuple):
    """What a step does, for the byte count of a launch: true rows, and positions then in the KV."""

    n_rows: int = 1
    kv_len: int = 1


class Window(NamedTuple):
    """A range that the L2 cache is asked to keep a share of, from one step to the next.

    `where` is a buffer, in a `Call` its address.
    """

    where: Any
    n_bytes: int
    hit_ratio: float


class Traffic(NamedTuple):
    """Bytes that a launch must read and write at least."""

    read: int
    written: int


@dataclass(frozen=True)
class Kernel:
    """An entry point of `csrc/`, with its meaning in numpy.

    Without a source it is numpy's alone, or, with the name COPY, what every device does by itself.

    `reference` has the kernel's parameters, in order; its keyword-only parameters are the
    compile-time constants (`-DNAME=value`). `geometry(target, *args, **constants)` places the
    work, `cost(work, *args, **constants)` counts bytes, `flops`, called alike, the multiplications
    and additions of products with weights; `example(rng)` yields valid random inputs: `(args,
    constants)` with numpy arrays, numbers and weights. `arch` is the only architecture that can
    run it, if there is but one.
    """

    name: str
    source: str
    constants: tuple[tuple[str, int | str], ...] = ()
    reference: Callable[..., None] = field(compare=False, kw_only=True)
    geometry: Callable[..., Geometry] = field(compare=False, kw_only=True)
    cost: Callable[..., Traffic] | None = field(compare=False, kw_only=True)
    flops: Callable[..., int] | None = field(default=None, compare=False, kw_only=True)
    example: Callable[[Any], Iterator[tuple[tuple, dict]]] | None = field(
        compare=False, kw_only=True
    )
    params: tuple[Param, ...] = field(compare=False, kw_only=True)
    arch: str = field(default="", compare=False, kw_only=True)

    def __call__(self, **constants: int | str) -> "Kernel":
        """This kernel with its constants fixed."""
        return replace(self, constants=tuple(sorted(constants.items())))

    def traffic(self, work: Work, args: tuple[Value, ...]) -> Traffic:
        if self.cost is not None:
            return self.cost(work, *args, **dict(self.constants))
        touched = [(p.role, a) for p, a in zip(self.params, args, strict=True) if p.role]
        read = sum(a.n_bytes for role, a in touched if role.reads and isinstance(a, Buffer))
        written = sum(a.n_bytes for role, a in touched if role.writes and isinstance(a, Buffer))
        return Traffic(read, written)


def product_flops(n_rows: int, *weights: Buffer) -> int:
    """Multiplications and additions of rows with matrices."""
    return 2 * n_rows * sum(math.prod(w.shape) for w in weights)


def parameters(reference: Callable[..., None]) -> tuple[Param, ...]:
    """The roles and types of a reference's positional parameters."""
    params = []
    for p in inspect.signature(reference, eval_str=True).parameters.values():
        if p.kind is p.KEYWORD_ONLY:
            continue
        role = next(iter(getattr(p.annotation, "__metadata__", ())), None)
        assert role or p.annotation in (int, float), f"{reference.__name__}: {p.name} has no role"
        params.append(Param(p.name, role, None if role else p.annotation))
    return tuple(params)


def kernel(
    source: str,
    *,
    geometry: Callable[..., Geometry],
    cost: Callable[..., Traffic] | None = None,
    flops: Callable[..., int] | None = None,
    example: Callable[[Any], Iterator[tuple[tuple, dict]]] | None = None,
    arch: str = "",
) -> Callable[[Callable[..., None]], Kernel]:
    """Makes a numpy reference the kernel of the same name in `csrc/<source>`."""

    def decorate(reference: Callable[..., None]) -> Kernel:
        return Kernel(
            reference.__name__, source, reference=reference, geometry=geometry, cost=cost,
            flops=flops, example=example, params=parameters(reference), arch=arch,
        )

    return decorate


@dataclass(frozen=True)
class Call:
    """A launch with its `Var`s filled in. Two equal calls mean that no update is needed."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: int
    shared: int
    args: tuple[Any, ...]
    pdl: bool = False
    window: Window | None = None


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel of a step, with the reason why it was chosen.

    `stable` is False where the next step may want another variant (attention, as the context
    grows). `pdl` asks for programmatic dependent launch.
    """

    kernel: Kernel
    geometry: Geometry
    args: tuple[Value, ...]
    label: str
    variant: str = ""
    reason: str = ""
    stable: bool = True
    pdl: bool = False
    window: Window | None = None

    def resolve(self, vars: Mapping[str, int], address: Callable[[Buffer], Any]) -> Call:
        """The one place where names become values; `address` decides what a buffer becomes."""

        def fill(value: Any) -> Any:
            if isinstance(value, Buffer):
                return address(value)
            return vars[value.name] if isinstance(value, Var) else value

        x, y, z = (fill(n) for n in self.geometry.grid)
        args = tuple(fill(a) for a in self.args)
        window = self.window and self.window._replace(where=address(self.window.where))
        return Call(
            self.kernel, (x, y, z), self.geometry.block, self.geometry.shared, args, self.pdl,
            window,
        )

    def vars(self) -> set[str]:
        return {v.name for v in (*self.geometry.grid, *self.args) if isinstance(v, Var)}

    def touches(self) -> Iterator[tuple[Buffer, Role]]:
        """Every buffer that the launch reads or writes."""
        for param, arg in zip(self.kernel.params, self.args, strict=True):
            if param.role:
                assert isinstance(arg, Buffer), f"{self.label}: {param.name} is {arg!r}"
                yield arg, param.role

    def traffic(self, work: Work) -> Traffic:
        return self.kernel.traffic(work, self.args)

    def flops(self, work: Work) -> int:
        """Multiplications and additions of the launch's products with weights."""
        count = self.kernel.flops
        return count(work, *self.args, **dict(self.kernel.constants)) if count else 0


@dataclass(frozen=True)
class StepKey:
    """What selects a program. A pointer is never part of it."""

    rows: int = 1  # the row bucket: grids and scratch are sized for it
    logits: str = "last"  # of which rows: "none", "last" or "all"
    attention: str = "short"  # "short" or "long": the depth class of the KV
    sampler: str = "greedy"  # "greedy" or "chain" on the device, "host"
    adapters: tuple[str, ...] = ()
    repeats: bool = False  # whether the device decides at the end that the step runs again
    shift: bool = False  # no step: the KV of a full context moves


@dataclass(frozen=True, eq=False)
class Program:
    """A step: its launches in order, and what they were planned for."""

    launches: tuple[Launch, ...]
    key: StepKey
    target: Any
    scratch_bytes: int
    outputs: Mapping[str, Buffer]

    @property
    def vars(self) -> set[str]:
        return set().union(*(launch.vars() for launch in self.launches))
