"""Places scratch buffers: lifetimes become offsets. Knows launches, nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from llamagraph.program.launch import Buffer, Launch

ALIGNMENT = 256


def lifetimes(
    launches: Sequence[Launch], kept: Sequence[Buffer] = ()
) -> dict[Buffer, tuple[int, int]]:
    """First and last launch that touches each scratch buffer; kept ones live to the end."""
    spans: dict[Buffer, tuple[int, int]] = {}
    for i, launch in enumerate(launches):
        for buffer, _ in launch.touches():
            if buffer.arena == "scratch":
                spans[buffer] = (spans.get(buffer, (i, i))[0], i)
    for buffer in kept:
        spans[buffer] = (spans[buffer][0], len(launches))
    return spans


def _first_gap(size: int, taken: list[tuple[int, int]]) -> int:
    """The lowest aligned offset where `size` bytes fit between sorted ranges."""
    offset = 0
    for start, stop in taken:
        if offset + size <= start:
            break
        offset = max(offset, -(-stop // ALIGNMENT) * ALIGNMENT)
    return offset


def offsets(spans: Mapping[Buffer, tuple[int, int]]) -> dict[Buffer, int]:
    """First fit in the order of first use: buffers that live at the same time never overlap."""
    placed: dict[Buffer, int] = {}
    live: list[Buffer] = []
    for buffer, (first, _) in sorted(spans.items(), key=lambda item: (item[1][0], item[0].start)):
        live = [b for b in live if spans[b][1] >= first]
        taken = sorted((placed[b], placed[b] + b.n_bytes) for b in live)
        placed[buffer] = _first_gap(buffer.n_bytes, taken)
        live.append(buffer)
    return placed


def place(
    launches: Sequence[Launch], outputs: Mapping[str, Buffer]
) -> tuple[list[Launch], dict[str, Buffer], int]:
    """The launches and outputs over placed scratch, and the scratch bytes that they need."""
    placed = {buffer: buffer.at(offset) for buffer, offset
              in offsets(lifetimes(launches, list(outputs.values()))).items()}
    moved = [
        replace(launch, args=tuple(placed.get(a, a) if isinstance(a, Buffer) else a
                                   for a in launch.args))
        for launch in launches
    ]
    n_bytes = max((buffer.stop for buffer in placed.values()), default=0)
    return moved, {name: placed[b] for name, b in outputs.items()}, n_bytes
