"""The KV cache: where each layer's keys and values lie, and how far they are usable.

A layer has a reserved range of slots for the whole context, made usable as the context grows, so
no address ever changes. A sliding-window layer has fewer slots and uses them in a ring: a slot is
a function of the position. Knows buffers and a device's memory, no model.
"""

from collections.abc import Sequence

from llamagraph.kernels.attention import AttentionShape, LayerKV
from llamagraph.kernels.kv import cache_buffer
from llamagraph.program.device import Memory

RANGE_ALIGNMENT = 2 << 20  # bytes; the page of a GPU's virtual memory
GROW_SLOTS = 256


def n_slots(shape: AttentionShape, n_ctx: int, max_rows: int) -> int:
    """Slots of a layer: a step's rows must not overwrite what its first row still sees."""
    if not shape.window:
        return n_ctx
    return min(n_ctx, -(-(shape.window + max_rows) // GROW_SLOTS) * GROW_SLOTS)


class KVCache:
    """The layers' buffers in the `kv` arena, of `n_bytes` when all is in use.

    `types` are those of keys and of values, as in `kernels.kv`.
    """

    def __init__(self, shapes: Sequence[AttentionShape], n_ctx: int, max_rows: int,
                 types: tuple[str, str]):
        self.layers: list[LayerKV] = []
        self.n_bytes = 0
        self.usable = 0  # positions
        for i, shape in enumerate(shapes):
            size = (n_slots(shape, n_ctx, max_rows), shape.n_head_kv, shape.head_dim)
            k, v = (self._buffer(f"cache_{x}.{i}", size, dtype)
                    for x, dtype in zip("kv", types, strict=True))
            self.layers.append(LayerKV(k, v))

    def _buffer(self, name: str, size: tuple[int, int, int], dtype: str):
        buffer = cache_buffer(name, self.n_bytes, size, dtype)
        self.n_bytes = -(-buffer.stop // RANGE_ALIGNMENT) * RANGE_ALIGNMENT
        return buffer

    def bytes_at(self, kv_len: int) -> int:
        """Bytes in use with that many positions."""
        return sum(stop - start for start, stop in self._ranges(0, kv_len))

    def grow(self, memory: Memory, kv_len: int) -> None:
        """Makes the slots of the first `kv_len` positions usable."""
        if kv_len > self.usable:
            target = -(-kv_len // GROW_SLOTS) * GROW_SLOTS
            for start, stop in self._ranges(self.usable, target):
                memory.grow("kv", start, stop)
            self.usable = target

    def _ranges(self, low: int, high: int):
        for layer in self.layers:
            for buffer in (layer.k, layer.v):
                slot = buffer.n_bytes // buffer.shape[0]
                first, last = (min(n, buffer.shape[0]) for n in (low, high))
                if first < last:
                    yield buffer.start + first * slot, buffer.start + last * slot
