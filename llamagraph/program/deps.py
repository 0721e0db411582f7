"""Hazards between launches, from the byte ranges that they read and write.

Read after write, write after read and write after write order two launches; nothing else does.
"""

from collections.abc import Sequence

from llamagraph.program.launch import COPY, Buffer, Launch, Work


def hazards(launches: Sequence[Launch]) -> list[set[int]]:
    """For each launch the earlier launches that it must follow (some of them implied by others)."""
    touched = [list(launch.touches()) for launch in launches]
    written = {buffer.arena for pairs in touched for buffer, role in pairs if role.writes}
    live: dict[str, dict[bool, list[tuple[Buffer, int]]]] = {  # by arena: reads, and writes
        arena: {False: [], True: []} for arena in written}  # what nobody writes is no hazard
    result: list[set[int]] = []
    for i, pairs in enumerate(touched):
        pairs = [(buffer, role) for buffer, role in pairs if buffer.arena in written]
        result.append({
            j for buffer, role in pairs for wrote in ((True, False) if role.writes else (True,))
            for earlier, j in live[buffer.arena][wrote] if buffer.overlaps(earlier)
        })
        for buffer, role in pairs:
            if role.writes:
                for known in live[buffer.arena].values():
                    known[:] = [e for e in known if e[1] == i or not buffer.covers(e[0])]
            live[buffer.arena][role.writes].append((buffer, i))
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


def priorities(launches: Sequence[Launch], before: Sequence[Sequence[int]], rows: int
               ) -> list[int]:
    """1 for a launch on the longest path, by bytes, that another may run beside; else 0.

    What is on that path makes the step longer when it waits; a chain has nothing to prefer. A copy
    takes no multiprocessor.
    """
    ending = [sum(launch.traffic(Work(rows, rows))) for launch in launches]
    ordered = [1 << i for i in range(len(launches))]  # a bit for each that cannot run beside
    after = list(ordered)
    for i, earlier in enumerate(before):
        ending[i] += max((ending[j] for j in earlier), default=0)  # now the longest path to it
        for j in earlier:
            ordered[i] |= ordered[j]
    for i in reversed(range(len(launches))):
        for j in before[i]:
            after[j] |= after[i]
    found, path = [0] * len(launches), list(range(len(launches)))
    while path:
        i = max(path, key=ending.__getitem__)
        rivals = (ordered[i] | after[i]).bit_count() < len(launches)
        found[i] = int(rivals and launches[i].kernel.name != COPY)
        path = list(before[i])
    return found


def dependencies(launches: Sequence[Launch]) -> list[list[int]]:
    """For each launch the launches that must have finished before it; no edge is redundant."""
    return reduced(hazards(launches))
