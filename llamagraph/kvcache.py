"""The KV cache: where each layer's keys and values lie, and how far they are usable.

A layer has a reserved range of slots for the whole context, made usable as the context grows, so
no address ever changes. A sliding-window layer has fewer slots and uses them in a ring: a slot is
a function of the position. So such a layer holds the last positions alone, and a sequence cannot
go back to any length. Knows buffers and a device's memory, no model.
"""

from collections.abc import Iterator, Sequence

from llamagraph.kernels.attention import AttentionShape, LayerKV
from llamagraph.kernels.kv import cache_buffer
from llamagraph.program.device import Memory
from llamagraph.program.launch import Buffer, dense

RANGE_ALIGNMENT = 2 << 20  # bytes; the page of a GPU's virtual memory
GROW_SLOTS = 256
PART_BYTES = 64 << 20  # at most, of what is read or written at once


def n_slots(shape: AttentionShape, n_ctx: int, max_rows: int) -> int:
    """Slots of a layer: a step's rows must not overwrite what its first row still sees."""
    if not shape.window:
        return n_ctx
    return min(n_ctx, -(-(shape.window + max_rows) // GROW_SLOTS) * GROW_SLOTS)


class KVCache:
    """The layers' buffers in the `kv` arena, of `n_bytes` when all is in use.

    From position `held` on every layer has what was stored, layers that see everything from 0 on.
    `types` are those of keys and of values, as in `kernels.kv`.
    """

    def __init__(self, shapes: Sequence[AttentionShape], n_ctx: int, max_rows: int,
                 types: tuple[str, str]):
        self.layers: list[LayerKV] = []
        self.n_bytes = 0
        self.usable = 0  # positions
        self.held = 0
        self._windows = [shape.window for shape in shapes]
        self._window = max(self._windows)
        for i, shape in enumerate(shapes):
            size = (n_slots(shape, n_ctx, max_rows), shape.n_head_kv, shape.head_dim)
            k, v = (self._buffer(f"cache_{x}.{i}", size, dtype)
                    for x, dtype in zip("kv", types, strict=True))
            self.layers.append(LayerKV(k, v))
        rings = (x.k.shape[0] for x, w in zip(self.layers, self._windows, strict=True) if w)
        self._ring = min(rings, default=n_ctx)

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

    def stored(self, n_past: int) -> None:
        """Notes that steps have stored positions up to n_past - 1: of a ring's the first ones are
        gone, also after the sequence has gone back."""
        self.held = max(self.held, n_past - self._ring)

    def goes_back(self, n_past: int) -> bool:
        """Whether every layer holds what position n_past sees; with nothing there all is new."""
        return self.held == 0 or n_past - self._window + 1 >= self.held

    def shifts(self, n_past: int, keep: int, distance: int) -> bool:
        """Whether the next position would see the right ones if those from keep + distance on moved
        and the first `keep` stayed: a ring may have lost some of these."""
        sees = n_past - distance - self._window + 1
        return self.held == 0 or sees >= min(keep, self.held)

    def shifted(self, keep: int, distance: int) -> None:
        """Notes that positions have moved: in a ring as many as there were behind `keep`."""
        if self.held > keep:
            self.held = max(keep, self.held - distance)

    def parts(self, n_past: int, held: int) -> Iterator[Buffer]:
        """The bytes of all positions, layer by layer, keys first, in the order of positions: from
        `held` on in layers with a window, from 0 on in the others."""
        for layer, window in zip(self.layers, self._windows, strict=True):
            for buffer in (layer.k, layer.v):
                n_slots, position = buffer.shape[0], held if window else 0
                n_bytes = buffer.n_bytes // n_slots
                while position < n_past:
                    slot = position % n_slots
                    n = min(n_slots - slot, n_past - position, max(1, PART_BYTES // n_bytes))
                    yield dense(buffer.name, "kv", buffer.start + slot * n_bytes, (n * n_bytes,),
                                "U8")
                    position += n

    def _ranges(self, low: int, high: int):
        for layer in self.layers:
            for buffer in (layer.k, layer.v):
                slot = buffer.n_bytes // buffer.shape[0]
                first, last = (min(n, buffer.shape[0]) for n in (low, high))
                if first < last:
                    yield buffer.start + first * slot, buffer.start + last * slot
