"""The `io` arena: the values that change every token live on the device, and a step advances them.

The sequence itself is there (`tokens`, by position). A step reads `n_rows` tokens from `pos` on,
and its last kernel moves `pos` forward, so a replay needs nothing from the host.
"""

import numpy as np

from llamagraph.program.launch import Buffer, Geometry, InOut, Value, dense, kernel
from llamagraph.program.plan import ALIGNMENT
from llamagraph.program.tape import Tape

SAMPLER_FLOATS = (
    "temp", "top_p", "min_p", "typical", "repeat_penalty", "presence_penalty", "frequency_penalty",
)
SAMPLER_INTS = ("top_k", "repeat_last_n", "seed_low", "seed_high", "n_bias")
MAX_BIAS = 1024  # entries of a logit bias
N_COUNTERS = 4096  # zero between launches; a kernel that counts leaves them at zero
MAX_EOG = 62  # tokens that end a loop on the device


def step_io(n_ctx: int, n_vocab: int = 0, n_adapters: int = 0) -> dict[str, Buffer]:
    """The buffers of the `io` arena for sequences of up to `n_ctx` tokens.

    `published`, `candidates` and `stop` lie in the `mapped` arena, which the host shares: a chosen
    token appears in the first at its position, as its id + 1, while steps run; the second has the
    logits of a step whose token the host chooses, once the step is done (n_vocab 0: no step does
    that); the host ends a loop by setting `stop`.
    """
    shapes = {
        "pos": ("I32", 1),  # of the step's first row
        "n_rows": ("I32", 1),  # true rows of the step, at most the bucket
        "one": ("I32", 1),  # always 1: the row count of kernels behind the last row's choice
        "tokens": ("I32", n_ctx + 1),  # the sequence; the sampled token is tokens[pos + n_rows]
        "sampler_floats": ("F32", len(SAMPLER_FLOATS)),
        "sampler_ints": ("I32", len(SAMPLER_INTS)),
        "bias_ids": ("I32", MAX_BIAS),
        "bias_values": ("F32", MAX_BIAS),
        "ends": ("I32", 2 + MAX_EOG),  # of a loop: a position, and so many tokens
        "moved": ("I32", 3),  # of a shift: first and last + 1 of the positions, and how far
        "condition": ("U32", 3),  # of a loop: its handle in two words, and whether it goes on
        "lora_scales": ("F32", n_adapters),
        "counters": ("U32", N_COUNTERS),
    }
    buffers, offset = {}, 0
    for name, (dtype, length) in shapes.items():
        buffers[name] = dense(name, "io", offset, (length,), dtype)
        offset = -(-buffers[name].stop // ALIGNMENT) * ALIGNMENT
    buffers["stop"] = dense("stop", "mapped", 0, (1,), "I32")
    published = dense("published", "mapped", ALIGNMENT, (n_ctx + 1,), "I32")
    start = -(-published.stop // ALIGNMENT) * ALIGNMENT
    buffers["published"] = published
    buffers["candidates"] = dense("candidates", "mapped", start, (n_vocab,))
    return buffers


def single(target, *args: Value) -> Geometry:
    """One warp."""
    return Geometry((1, 1, 1), 32)


def _advance_example(rng):
    yield (np.array([7], np.int32), np.array([3], np.int32)), {}


@kernel("step.cu", geometry=single, example=_advance_example)
def advance(pos: InOut, n_rows: InOut) -> None:
    """pos += n_rows; the next step has one row."""
    pos += n_rows
    n_rows[0] = 1


def end_step(tape: Tape) -> None:
    """Moves the position where no choice of a token does it."""
    tape.launch(advance, tape.io["pos"], tape.io["n_rows"], label="advance")


