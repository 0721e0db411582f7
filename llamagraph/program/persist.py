"""Which launches ask the L2 cache to keep some of their bytes until the next step.

A step of one row reads every weight once and the next step reads them all again, in the same order:
what the cache would keep of them by itself is gone when its turn comes, because all the others have
passed through. A part that is set aside is still there. Activations and partial results need no
asking, they are read right after they were written; the KV cache grows, and what it has of the
bytes would have to change. A step of many rows reads its weights for all of them at once.
"""

from collections.abc import Sequence
from dataclasses import replace

from llamagraph.program.launch import Buffer, Launch, StepKey, Window, Work
from llamagraph.program.target import Target

PARTS = 256  # hit ratios are whole parts of this many: they are the same as a float32
FEWEST = 32  # of these parts: below an eighth of the bytes, what is set aside is missed elsewhere


def weights(launches: Sequence[Launch]) -> list[Buffer | None]:
    """The largest weight that each launch reads whole; a launch can ask for one range."""
    found = []
    for launch in launches:
        n_read = launch.traffic(Work()).read
        read = [b for b, role in launch.touches()
                if role.reads and b.arena == "weights" and b.n_bytes <= n_read]
        found.append(max(read, key=lambda b: b.n_bytes, default=None))
    return found


def persistent(launches: Sequence[Launch], key: StepKey, target: Target) -> list[Launch]:
    """The launches, with a window each over its weight where some of it can stay in the cache.

    All get the same share, so that each has its part from the cache while the rest comes from
    memory. Nothing changes where the target sets nothing aside, or where the share is small:
    measured on an H200, a twentieth of the bytes in the cache made a step 5 % slower, a hundredth
    10 %, because everything else has to do with a third of the cache.
    """
    if not target.l2_persist or key.rows > 1 or key.shift:
        return list(launches)
    found = weights(launches)
    asked = [min(b.n_bytes, target.l2_window) if b else 0 for b in found]
    share = min(PARTS, PARTS * target.l2_persist // max(1, sum(asked)))
    if share < FEWEST:
        return list(launches)
    return [_asking(launch, buffer, n_bytes, share) if buffer else launch
            for launch, buffer, n_bytes in zip(launches, found, asked, strict=True)]


def _asking(launch: Launch, buffer: Buffer, n_bytes: int, share: int) -> Launch:
    why = f"{100 * share / PARTS:.2g} % of {buffer.name} stay in L2"
    return replace(launch, window=Window(buffer, n_bytes, share / PARTS),
                   reason="; ".join(filter(None, (launch.reason, why))))
