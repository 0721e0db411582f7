"""The last launch of a step that repeats itself: whether another one follows.

It is decided on the device, so that a whole answer is one launch. Knows no graph: the handle of a
graph's condition is a number to it.
"""

import numpy as np

from llamagraph.kernels.step import single
from llamagraph.program.launch import Buffer, In, InOut, Traffic, Work, kernel
from llamagraph.program.tape import Tape


def _cost(work: Work, pos, tokens, ends: Buffer, stop, condition: Buffer) -> Traffic:
    return Traffic(12 + ends.n_bytes + condition.n_bytes, 4)


def _example(rng):
    """The last token ends it or not; the position is reached, passed or not; the host says so."""
    tokens = rng.permutation(200).astype(np.int32)
    for pos, until, n_eog, last, stop in (
        (70, 71, 0, 0, 0), (70, 70, 0, 0, 0), (70, 7, 3, 0, 0), (70, 99, 40, 0, 0),
        (70, 99, 40, 1, 0), (70, 99, 62, 1, 0), (70, 99, 1, 1, 0), (0, 1, 5, 0, 1), (0, 1, 5, 0, 0),
    ):
        ends = np.zeros(64, np.int32)
        others = tokens[tokens != tokens[pos]]
        ends[: 2 + n_eog] = until, n_eog, *others[:n_eog]
        if last:
            ends[1 + n_eog] = tokens[pos]
        yield (np.array([pos], np.int32), tokens, ends, np.array([stop], np.int32),
               np.array([0, 0, 7], np.uint32)), {}


@kernel("loop.cu", geometry=single, cost=_cost, example=_example)
def loop_control(pos: In, tokens: In, ends: In, stop: In, condition: InOut) -> None:
    """condition[2] = 1 where another step follows, else 0; a graph's condition becomes the same.

    ends: a position, a count, and so many tokens. The step is the last one where the sequence has
    reached that position, its last token is one of those, or the host has set `stop`. condition:
    words 0 and 1 are the handle, the lower one first; 0 where there is no graph.
    """
    until, n_eog = ends[:2]
    last = pos[0] >= until or stop[0] != 0 or tokens[pos[0]] in ends[2 : 2 + n_eog]
    condition[2] = not last


def repeat(tape: Tape) -> None:
    """Ends a step that the device runs again by itself."""
    names = ("pos", "tokens", "ends", "stop", "condition")
    tape.launch(loop_control, *(tape.io[name] for name in names), label="loop",
                reason="the device decides whether another step follows")
