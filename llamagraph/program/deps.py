"""Hazards between launches, from the byte ranges that they read and write.

Read after write, write after read and write after write order two launches; nothing else does.
"""

from collections.abc import Sequence

from llamagraph.program.launch import Buffer, Launch


def hazards(launches: Sequence[Launch]) -> list[set[int]]:
    """For each launch the earlier launches that it must follow (some of them implied by others)."""
    live: list[tuple[Buffer, int, bool]] = []  # buffer, launch, was it a write
    result: list[set[int]] = []
    for i, launch in enumerate(launches):
        touched = list(launch.touches())
        result.append(
            {
                j
                for buffer, role in touched
                for earlier, j, wrote in live
                if (role.writes or wrote) and buffer.overlaps(earlier)
            }
        )
        written = [buffer for buffer, role in touched if role.writes]
        live = [e for e in live if not any(b.covers(e[0]) for b in written)]
        live += [(buffer, i, role.writes) for buffer, role in touched]
    return result


def reduced(before: Sequence[set[int]]) -> list[list[int]]:
    """The same order without the edges that a longer path implies (transitive reduction)."""
    reach = [0] * len(before)  # bit j of reach[i]: launch j comes before launch i
    result = []
    for i, earlier in enumerate(before):
        kept = []
        for j in sorted(earlier, reverse=True):
            if not reach[i] >> j & 1:
                kept.append(j)
                reach[i] |= reach[j] | 1 << j
        result.append(sorted(kept))
    return result


def dependencies(launches: Sequence[Launch]) -> list[list[int]]:
    """For each launch the launches that must have finished before it; no edge is redundant."""
    return reduced(hazards(launches))
