"""A model's weights as a tree of GGUF names: `w.blk[3].attn_q.weight`. Knows buffers, no file."""

from collections.abc import Mapping

from llamagraph.errors import FormatError
from llamagraph.program.launch import Buffer


class Weights:
    """A node of the tree: an attribute or an index goes one name down.

    `.weight` must exist (FormatError names the file and the tensor), `.bias` may be None.
    """

    def __init__(self, buffers: Mapping[str, Buffer], source: str, prefix: str = ""):
        self._buffers, self._prefix = buffers, prefix
        self._source = source

    def __getattr__(self, name: str) -> "Weights":
        if name.startswith("_"):
            raise AttributeError(name)
        return Weights(self._buffers, self._source, f"{self._prefix}{name}.")

    def __getitem__(self, index: int) -> "Weights":
        return getattr(self, str(index))

    def __contains__(self, name: str) -> bool:
        return f"{self._prefix}{name}.weight" in self._buffers

    @property
    def name(self) -> str:
        return self._prefix.rstrip(".")

    @property
    def where(self) -> str:
        """The file and the name, for a message."""
        return f"{self._source}: {self.name}"

    @property
    def weight(self) -> Buffer:
        name = f"{self._prefix}weight"
        if name not in self._buffers:
            raise FormatError(f"{self._source}: tensor {name} is missing; is the file complete?")
        return self._buffers[name]

    @property
    def bias(self) -> Buffer | None:
        return self._buffers.get(f"{self._prefix}bias")
