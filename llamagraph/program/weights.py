"""A model's weights as a tree of GGUF names: `w.blk[3].attn_q.weight`. Knows buffers, no file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamagraph.errors import FormatError
from llamagraph.program.launch import Buffer

ROWS = "rows"  # in place of "weight", what is looked up in an embedding matrix


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a product: scales[index] * factor * (x @ a.T) @ b.T.

    a: (rank, n_in); b: (n_out, rank), the rank a multiple of 32. Of embeddings a is
    (n_vocab, rank), and a token's row of it stands for x @ a.T. `label` tells adapters of one
    weight apart, `index` is the adapter's in `scales`.
    """

    adapter: str
    label: str
    a: Buffer
    b: Buffer
    scales: Buffer
    index: int
    factor: float


class Weights:
    """A node of the tree: an attribute or an index goes one name down.

    `.weight` must exist (FormatError names the file and the tensor), `.bias` may be None.
    """

    def __init__(self, buffers: Mapping[str, Buffer], source: str, prefix: str = "",
                 adapters: Mapping[str, Sequence[LowRank]] | None = None):
        self._buffers, self._prefix = buffers, prefix
        self._source, self._adapters = source, adapters or {}

    def adapted(self, adapters: Mapping[str, Sequence[LowRank]]) -> "Weights":
        """The same node with what adapters add, by the name of the tensor that they change."""
        return Weights(self._buffers, self._source, self._prefix, adapters)

    def __getattr__(self, name: str) -> "Weights":
        if name.startswith("_"):
            raise AttributeError(name)
        return Weights(self._buffers, self._source, f"{self._prefix}{name}.", self._adapters)

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

    @property
    def adapters(self) -> Sequence[LowRank]:
        """What is added to products with the weight."""
        return self._adapters.get(f"{self._prefix}weight", ())

    @property
    def row_adapters(self) -> Sequence[LowRank]:
        """What is added to rows of the weight that are looked up."""
        return self._adapters.get(f"{self._prefix}{ROWS}", ())
