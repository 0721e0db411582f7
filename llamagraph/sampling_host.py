"""Chooses tokens on the host: what a device's chain cannot do, and what remembers earlier tokens.

The order and the samplers are in `sampling.py`. Knows no model.
"""

from collections.abc import Sequence

import numpy as np

from llamagraph.kernels.sample import Candidates, draw, finite, ordered, philox
from llamagraph.kernels.samplers import adaptive, mirostat_2, mirostat_k
from llamagraph.sampling import BANNED, SAMPLERS, Now, SamplingParams


def thinks_too_long(sequence: Sequence[int], thinking: tuple[int, int], budget: int) -> bool:
    """Whether thinking has begun, has not ended, and is `budget` tokens long."""
    begin, end = thinking
    for n, token in enumerate(reversed(sequence)):
        if token == end:
            return False
        if token == begin:
            return n >= budget
    return False


class HostChain:
    """Chooses the tokens of one answer. `choose` may be asked again before `accept` is told.

    Mirostat remembers the largest surprise that it lets through (`mu`), adaptive-p a running mean
    of the probabilities of what was chosen.
    """

    def __init__(self, params: SamplingParams):
        p = self.params = params.chain()
        self.mu = 2 * p.mirostat_ent
        self.total = 1 / (1 - p.adaptive_decay)  # adaptive-p: sums of probabilities and weights
        self.sum = self.total * p.adaptive_target
        self._drawn_from: Candidates | None = None  # with the probabilities that accept looks at

    def _draws(self, position: int, again: bool) -> tuple[float, float]:
        """Two draws from [0, 1): the choice's, as on a device, and one for xtc; `again` others."""
        assert self.params.seed is not None
        words = philox(self.params.seed, position)
        first, second = ((word >> 8) / (1 << 24) for word in words[2 * again : 2 * again + 2])
        return first, second

    def candidates(self, logits: np.ndarray, sequence: Sequence[int],
                   again: bool = False) -> Candidates:
        """What the chain leaves, likeliest first. logits: float32 (n_vocab,), unchanged."""
        p, n_vocab = self.params, len(logits)
        biased = logits.copy()
        for id, bias in p.logit_bias.items():
            biased[id] += np.float32(bias)
        alive = np.flatnonzero(biased > BANNED / 2)
        ids = alive if len(alive) else np.arange(n_vocab)
        now = Now(np.array(sequence, np.int64), self._draws(len(sequence), again)[1])
        c = Candidates(ids, finite(biased[ids]), ranked=False)
        for name in p.samplers:
            c = SAMPLERS[name].apply(c, p, now)
        c = ordered(c)
        if p.mirostat == 1:
            return ordered(c, mirostat_k(c, n_vocab, self.mu))
        return ordered(c, mirostat_2(c, self.mu)) if p.mirostat == 2 else c

    def choose(self, logits: np.ndarray, sequence: Sequence[int], again: bool = False) -> int:
        """The token after the sequence. logits: float32 (n_vocab,).

        `again` where a first choice was refused and the logits now leave it out: other draws.
        """
        p = self.params
        if p.thinking and thinks_too_long(sequence, p.thinking, p.reasoning_budget):
            self._drawn_from = None
            return p.thinking[1]
        self._drawn_from = c = self.candidates(logits, sequence, again)
        if p.adaptive_target >= 0 and not p.mirostat:
            target = float(np.clip(2 * p.adaptive_target - self.sum / self.total, 0, 1))
            c = ordered(adaptive(c, target))
        return draw(c, self._draws(len(sequence), again)[0])

    def accept(self, token: int) -> None:
        """The token is part of the answer."""
        p, c = self.params, self._drawn_from
        if c is None or not (p.mirostat or p.adaptive_target >= 0):
            return
        probability = float(c.probabilities()[c.ids == token].sum())
        if p.mirostat:
            surprise = -np.log2(max(probability, 1e-38))
            self.mu -= p.mirostat_lr * (surprise - p.mirostat_ent)
        else:
            self.sum = probability + p.adaptive_decay * self.sum
            self.total = 1 + p.adaptive_decay * self.total
