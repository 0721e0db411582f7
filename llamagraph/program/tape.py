"""Where operations write a step's launches. Knows the target and the key, no device."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from llamagraph.program.launch import (
    COPY,
    Buffer,
    Geometry,
    Kernel,
    Launch,
    Program,
    StepKey,
    Value,
    dense,
)
from llamagraph.program.persist import persistent
from llamagraph.program.plan import ALIGNMENT, place
from llamagraph.program.target import Target

T = TypeVar("T")


class Tape:
    """Collects launches over the `io` buffers and over scratch that is placed at the end."""

    def __init__(self, target: Target, key: StepKey, io: Mapping[str, Buffer]):
        self.target, self.key, self.io = target, key, io
        self._launches: list[Launch] = []
        self._outputs: dict[str, Buffer] = {}
        self._scope = ""
        self._scratch_end = 0
        self._choices: dict[Hashable, Any] = {}

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Labels inside begin with `name` and a dot."""
        outer, self._scope = self._scope, f"{self._scope}{name}."
        try:
            yield
        finally:
            self._scope = outer

    def once(self, key: Hashable, choose: Callable[[], T]) -> T:
        """What `choose` says, asked once a step for the key: layers are alike."""
        if key not in self._choices:
            self._choices[key] = choose()
        return self._choices[key]

    def scratch(self, name: str, *shape: int, dtype: str = "F32") -> Buffer:
        """A buffer that lives from its first to its last use within the step."""
        buffer = dense(self._scope + name, "scratch", self._scratch_end, shape, dtype)
        self._scratch_end = -(-buffer.stop // ALIGNMENT) * ALIGNMENT
        return buffer

    def output(self, name: str, buffer: Buffer) -> None:
        """Keeps a scratch buffer's contents until the next step."""
        self._outputs[name] = buffer

    def launch(
        self,
        kernel: Kernel,
        *args: Value,
        label: str,
        variant: str = "",
        reason: str = "",
        stable: bool = True,
    ) -> None:
        geometry: Geometry = kernel.geometry(self.target, *args, **dict(kernel.constants))
        assert len(args) == len(kernel.params), f"{kernel.name}: {len(args)} arguments"
        self._launches.append(
            Launch(
                kernel, geometry, args, self._scope + label, variant, reason, stable,
                self.target.pdl and kernel.name != COPY,
            )
        )

    def program(self) -> Program:
        launches, outputs, n_bytes = place(self._launches, self._outputs)
        launches = persistent(launches, self.key, self.target)
        return Program(tuple(launches), self.key, self.target, n_bytes, outputs)
