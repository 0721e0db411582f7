"""Copies of bytes as launches of the list: the device's own, so there is no entry in `csrc/`.

On a GPU a copy is a memcpy node of its graph. It ends a chain of early starts, so steady decode has
none; what the host must see after a step is what it is for. Knows no model.
"""

import numpy as np

from llamagraph.program.launch import Buffer, Geometry, In, Out, Traffic, Work, kernel
from llamagraph.program.tape import Tape


def _geometry(target, src: Buffer, dst: Buffer, n_bytes: int) -> Geometry:
    return Geometry((1, 1, 1), 0)


def _cost(work: Work, src: Buffer, dst: Buffer, n_bytes: int) -> Traffic:
    return Traffic(n_bytes, n_bytes)


@kernel("", geometry=_geometry, cost=_cost)
def copy(src: In, dst: Out, n_bytes: int) -> None:
    """The first `n_bytes` of dst become those of src; both lie in one piece."""
    to, come = (x.reshape(-1).view(np.uint8) for x in (dst, src))
    to[:n_bytes] = come[:n_bytes]


def copy_launch(tape: Tape, src: Buffer, dst: Buffer, label: str, reason: str) -> None:
    """All of dst from the beginning of src."""
    assert src.n_bytes >= dst.n_bytes
    tape.launch(copy, src, dst, dst.n_bytes, label=label, variant="memcpy", reason=reason)
