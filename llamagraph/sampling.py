"""How the next token is chosen: the parameters, and their place in the `io` arena.

The maths is in `kernels/sample.py`. Knows no model.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from llamagraph.errors import LlamaGraphError
from llamagraph.kernels.sample import device_can, draw, run_chain, uniform
from llamagraph.kernels.step import MAX_BIAS, SAMPLER_FLOATS, SAMPLER_INTS
from llamagraph.program.device import Memory
from llamagraph.program.launch import Buffer
from llamagraph.program.target import Target

BANNED = -1e30  # a bias that no logit outweighs
AGAIN = 0x6A09E667F3BCC908  # turns the seed into another one, for a second draw


@dataclass(frozen=True)
class SamplingParams:
    """llama.cpp's names and defaults. `seed` None draws one; `logit_bias` maps ids to additions."""

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in SAMPLER_FLOATS:
            value = getattr(self, name)
            if not isinstance(value, int | float) or not np.isfinite(value):
                raise LlamaGraphError(f"{name} is {value}; it must be a number")
        for name in ("top_k", "repeat_last_n"):
            value = getattr(self, name)
            if not isinstance(value, int) or not -1 <= value < 1 << 31:
                raise LlamaGraphError(f"{name} is {value}; it must be a whole number below 2^31")
        if self.seed is not None and not isinstance(self.seed, int):
            raise LlamaGraphError(f"seed is {self.seed}; it must be a whole number")
        if self.repeat_penalty <= 0:
            raise LlamaGraphError(f"repeat_penalty is {self.repeat_penalty}; it must be above 0")
        if len(self.logit_bias) > MAX_BIAS:
            raise LlamaGraphError(f"{len(self.logit_bias)} logit biases; {MAX_BIAS} are possible")

    def seeded(self) -> "SamplingParams":
        """The same with a seed: its own, or a random one."""
        if self.seed is not None and self.seed >= 0:
            return self
        return SamplingParams(**{**self.__dict__, "seed": secrets.randbits(32)})

    def sampler(self, target: Target, n_vocab: int) -> str:
        """The sampler of the StepKey: greedy where nothing can change the order of logits."""
        plain = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) == (1, 0, 0)
        if self.temp <= 0 and plain and not self.logit_bias and self.typical >= 1:
            return "greedy"
        return "chain" if not target.is_cuda or device_can(self, n_vocab) else "host"

    def choose(self, logits: np.ndarray, sequence: Sequence[int], again: bool = False) -> int:
        """The token after the sequence, chosen on the host. logits: float32 (n_vocab,).

        `again` draws a second time, independent of the first.
        """
        biased = logits.copy()
        for id, bias in self.logit_bias.items():
            biased[id] += np.float32(bias)
        left = run_chain(biased, np.array(sequence, np.int64), vars(self), vars(self))
        assert self.seed is not None
        return draw(left, uniform(self.seed ^ AGAIN if again else self.seed, len(sequence)))

    def write(self, memory: Memory, io: Mapping[str, Buffer]) -> None:
        """Puts the parameters into the `io` arena."""
        assert self.seed is not None
        seed = np.array([self.seed & 0xFFFFFFFFFFFFFFFF], np.uint64).view(np.int32)
        ints = {"seed_low": seed[0], "seed_high": seed[1], "n_bias": len(self.logit_bias)}
        values = [ints.get(n, getattr(self, n, None)) for n in SAMPLER_INTS]
        memory.write(io["sampler_ints"], np.array(values, np.int32))
        floats = [getattr(self, n) for n in SAMPLER_FLOATS]
        memory.write(io["sampler_floats"], np.array(floats, np.float32))
        if self.logit_bias:
            ids, bias = zip(*sorted(self.logit_bias.items()), strict=True)
            memory.write(io["bias_ids"], np.array(ids, np.int32))
            memory.write(io["bias_values"], np.clip(np.array(bias, np.float32), BANNED, -BANNED))
