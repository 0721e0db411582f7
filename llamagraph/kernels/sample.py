"""The choice of the next token: greedy, or a draw from what a chain of samplers leaves.

The choice ends the step: it writes the token behind the sequence and moves the position. Draws come
from Philox4x32-10 (Salmon et al., SC11) keyed by the seed with the position as counter, so a step
that ran too far is undone by moving the position back.

Probabilities are float32, their sums double: sums of so few then do not depend on their order, and
a GPU chooses the same token. A GPU keeps at most MAX_TOP_K candidates; for the rest `device_can`
says no, and the host chooses with the functions here.
"""

from typing import NamedTuple, Protocol

import numpy as np

from llamagraph.kernels.step import SAMPLER_FLOATS, SAMPLER_INTS
from llamagraph.program.launch import Buffer, Geometry, In, InOut, Traffic, Work, kernel
from llamagraph.program.tape import Tape

MAX_TOP_K = 128  # candidates that a GPU can keep
MAX_VOCAB = 1 << 19  # logits that a GPU can rank
SLICE = 4096  # logits of a block
LARGEST = np.float32(1e38)  # stands for infinity, so that differences are never NaN


class Candidates(NamedTuple):
    """Tokens that are left: `ranked` ones the likeliest first, equal logits in the order of ids."""

    ids: np.ndarray
    logits: np.ndarray
    ranked: bool = True

    def where(self, keep) -> "Candidates":
        return Candidates(self.ids[keep], self.logits[keep], self.ranked)

    def probabilities(self) -> np.ndarray:
        weights = np.exp(self.logits - self.logits[0])
        return weights / np.float32(weights.sum(dtype=np.float64))


def running_sum(values: np.ndarray) -> np.ndarray:
    return np.cumsum(values, dtype=np.float64)


def philox(seed: int, counter: int) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit words for a 64-bit key and counter."""
    c = [counter & 0xFFFFFFFF, counter >> 32 & 0xFFFFFFFF, 0, 0]
    k = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        low, high = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [high >> 32 ^ c[1] ^ k[0], high & 0xFFFFFFFF, low >> 32 ^ c[3] ^ k[1], low & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0], c[1], c[2], c[3]


def uniform(seed: int, position: int) -> float:
    """The draw for the token at `position`: in [0, 1), 24 bits."""
    return (philox(seed, position)[0] >> 8) / (1 << 24)


def finite(logits: np.ndarray) -> np.ndarray:
    """Infinities as the largest numbers; NaN as the smallest, so that it is chosen last."""
    return np.fmin(np.fmax(logits, -LARGEST), LARGEST)


def ordered(c: Candidates, k: int = 0) -> Candidates:
    """The k likeliest (all where k <= 0), likeliest first; equal logits in the order of ids.

    Sorts keys of logit and id as a GPU does: several times faster than sorting by two columns.
    """
    if not c.ranked:
        if 0 < k < len(c.ids):
            bound = np.partition(c.logits, len(c.ids) - k)[len(c.ids) - k]
            c = c.where(c.logits >= bound)
        if (np.diff(c.ids) < 0).any():
            c = c.where(np.argsort(c.ids))
        bits = (c.logits + np.float32(0)).view(np.uint32)  # -0 equals 0
        high = np.where(bits >> 31, bits, ~bits & np.uint32(0x7FFFFFFF)).astype(np.uint64)
        keys = np.sort(high << np.uint64(32) | np.arange(len(c.ids), dtype=np.uint64))
        c = c.where((keys & np.uint64(0xFFFFFFFF)).astype(np.int64))._replace(ranked=True)
    return c.where(slice(0, k)) if k > 0 else c


def ranked(logits: np.ndarray, k: int) -> Candidates:
    """The k likeliest tokens of a whole vocabulary, as in `ordered`."""
    return ordered(Candidates(np.arange(len(logits)), logits, ranked=False), k)


def penalised(logits: np.ndarray, recent: np.ndarray, repeat: float, presence: float,
              frequency: float) -> np.ndarray:
    """Repetition penalty (Keskar et al., arXiv:1909.05858), presence and frequency penalties."""
    ids, counts = np.unique(recent, return_counts=True)
    seen = logits[ids]
    out = logits.copy()
    out[ids] = np.where(seen > 0, seen / np.float32(repeat), seen * np.float32(repeat))
    out[ids] -= counts.astype(np.float32) * np.float32(frequency) + np.float32(presence)
    return out


def typical(c: Candidates, p: float) -> Candidates:
    """Locally typical sampling (Meister et al., arXiv:2202.00666)."""
    if p >= 1:
        return c
    probs = c.probabilities()
    surprise = -np.log(np.maximum(probs, np.float32(1e-38)))
    entropy = np.float32((probs * surprise).sum(dtype=np.float64))
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    n = int(np.searchsorted(running_sum(probs[order]), p, side="right")) + 1
    return c.where(np.sort(order[:n]))


def top_p(c: Candidates, p: float) -> Candidates:
    """Nucleus sampling (Holtzman et al., arXiv:1904.09751): the fewest that hold p together."""
    if p >= 1:
        return c
    n = int(np.searchsorted(running_sum(c.probabilities()), p, side="left")) + 1
    return c.where(slice(0, n))


def min_p(c: Candidates, p: float) -> Candidates:
    """Those at least p times as likely as the likeliest (Nguyen et al., arXiv:2407.01082)."""
    return c if p <= 0 else c.where(c.logits >= c.logits[0] + np.log(np.float32(min(p, 1))))


def temperature(c: Candidates, temp: float) -> Candidates:
    """Logits, counted from the likeliest's, over temp; at 0 and below the likeliest alone."""
    if temp <= 0:
        return c.where(slice(0, 1))
    with np.errstate(over="ignore"):  # to minus infinity: a weight of 0
        return Candidates(c.ids, (c.logits - c.logits[0]) / np.float32(temp))


def draw(c: Candidates, u: float) -> int:
    """The token at which the running sum of weights passes the share u of their sum."""
    sums = running_sum(np.exp(c.logits - c.logits[0]))
    return int(c.ids[np.searchsorted(sums, u * sums[-1], side="right")])


def run_chain(logits: np.ndarray, recent: np.ndarray, floats: dict, ints: dict) -> Candidates:
    """The default chain: penalties, top-k, typical, top-p, min-p, temperature."""
    n = ints["repeat_last_n"]
    window = recent if n < 0 else recent[max(0, len(recent) - n) :]
    changed = (floats["repeat_penalty"], floats["presence_penalty"], floats["frequency_penalty"])
    if changed != (1, 0, 0) and len(window):
        logits = penalised(logits, window, *changed)
    c = ranked(finite(logits), ints["top_k"])
    c = typical(c, floats["typical"])
    c = top_p(c, floats["top_p"])
    c = min_p(c, floats["min_p"])
    return temperature(c, floats["temp"])


class ChainParams(Protocol):
    """What `device_can` asks about; `SamplingParams` has it."""

    @property
    def temp(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def typical(self) -> float: ...


def device_can(params: ChainParams, n_vocab: int) -> bool:
    """Whether a GPU's `choose_chain` chooses what `run_chain` would. Others are for the host.

    With temperature 0 and no typical sampling one candidate is enough, whatever top_k is.
    """
    one = params.temp <= 0 and params.typical >= 1
    return n_vocab <= MAX_VOCAB and (one or 0 < params.top_k <= MAX_TOP_K)


def _slices(target, logits, *args) -> Geometry:
    return Geometry((-(-args[-1] // SLICE), 1, 1), 512)


def _cost(work: Work, logits, *args) -> Traffic:
    return Traffic(4 * args[-1], 4)


def _logits(rng, n_vocab: int) -> list[np.ndarray]:
    """Plain ones; many ties; all equal; few above -inf; NaN in between."""
    plain = 3 * rng.standard_normal(n_vocab).astype(np.float32)
    few = np.full(n_vocab, -np.inf, np.float32)
    few[-5:] = 1, 2, 3, 3, np.inf
    holes = np.where(rng.random(n_vocab) < 0.3, np.float32(np.nan), plain)
    return [plain, np.round(plain), np.zeros(n_vocab, np.float32), few, holes]


def _step(rng, n_vocab: int, n_partials: int) -> tuple:
    """Partials and counters, then what ends a step, and the vocabulary's size."""
    tokens = rng.integers(0, min(n_vocab, 20), 100).astype(np.int32)
    return (np.zeros((n_partials, 2), np.uint32), np.zeros(4, np.uint32),
            np.array([70], np.int32), np.array([2], np.int32), tokens, np.zeros_like(tokens),
            n_vocab)


def _bias(rng, n_vocab: int) -> tuple[np.ndarray, np.ndarray]:
    ids = rng.choice(n_vocab, 120, replace=False).astype(np.int32)
    return ids, 4 * rng.standard_normal(len(ids)).astype(np.float32)


def _greedy_example(rng):
    for n_vocab in (300, 5000):
        for logits in _logits(rng, n_vocab):
            for n_bias in (0, 120):
                ints = np.array([0, 0, 0, 0, n_bias], np.int32)
                step = _step(rng, n_vocab, -(-n_vocab // SLICE))
                yield (logits[None], ints, *_bias(rng, n_vocab), *step), {}


_CHAINS = (  # temp, top_p, min_p, typical, repeat, presence, frequency; top_k, last_n, biases
    ((0.8, 0.95, 0.05, 1.0, 1.0, 0.0, 0.0), 40, 64, 0),
    ((1.3, 1.0, 0.0, 1.0, 1.1, 0.3, 0.2), 128, -1, 0),
    ((1.0, 0.6, 0.0, 0.8, 1.0, 0.0, 0.1), 100, 30, 120),
    ((0.0, 0.95, 0.05, 1.0, 1.5, 0.0, 0.0), 0, 64, 3),
    ((0.7, 0.0, 0.5, 0.3, 1.0, 0.0, 0.0), 7, 0, 1),
    ((1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0), 1, 64, 0),
)


def _chain_example(rng):
    for n_vocab in (300, 5000):
        for logits in _logits(rng, n_vocab):
            for floats, top_k, last_n, n_bias in _CHAINS:
                seed = rng.integers(-(2**31), 2**31, 2)
                ints = np.array([top_k, last_n, *seed, n_bias], np.int32)
                bias = _bias(rng, n_vocab)
                step = _step(rng, n_vocab, -(-n_vocab // SLICE) * MAX_TOP_K)
                yield (logits[None], np.array(floats, np.float32), ints, *bias, *step), {}


def _end(pos, n_rows, tokens, published, token: int) -> None:
    tokens[pos[0] + n_rows[0]] = token
    published[pos[0] + n_rows[0]] = token + 1
    pos += n_rows
    n_rows[0] = 1


def _biased(logits: np.ndarray, ids: np.ndarray, values: np.ndarray, n: int) -> np.ndarray:
    biased = logits[0].copy()
    biased[ids[:n]] += values[:n]
    return biased


@kernel("sample.cu", geometry=_slices, cost=_cost, example=_greedy_example)
def choose_greedy(logits: In, sampler_ints: In, bias_ids: In, bias_values: In, partials: InOut,
                  counters: InOut, pos: InOut, n_rows: InOut, tokens: InOut, published: InOut,
                  n_vocab: int) -> None:
    """The likeliest token, the lowest id among equals. logits: (1, n_vocab); ends the step.

    partials: the blocks' results, 8 bytes each; the reference needs none.
    """
    logits = _biased(logits, bias_ids, bias_values, int(sampler_ints[-1]))
    _end(pos, n_rows, tokens, published, int(np.argmax(finite(logits))))


@kernel("sample.cu", geometry=_slices, cost=_cost, example=_chain_example)
def choose_chain(logits: In, sampler_floats: In, sampler_ints: In, bias_ids: In, bias_values: In,
                 partials: InOut, counters: InOut, pos: InOut, n_rows: InOut, tokens: InOut,
                 published: InOut, n_vocab: int) -> None:
    """A draw from the chain. logits: (1, n_vocab); ends the step.

    partials: the blocks' candidates, 8 bytes each; the reference needs none.
    """
    floats = dict(zip(SAMPLER_FLOATS, sampler_floats.tolist(), strict=True))
    ints = dict(zip(SAMPLER_INTS, sampler_ints.tolist(), strict=True))
    where = int(pos[0] + n_rows[0])
    biased = _biased(logits, bias_ids, bias_values, ints["n_bias"])
    left = run_chain(biased, tokens[:where], floats, ints)
    seed = ints["seed_low"] & 0xFFFFFFFF | (ints["seed_high"] & 0xFFFFFFFF) << 32
    _end(pos, n_rows, tokens, published, draw(left, uniform(seed, where)))


def choose(tape: Tape, logits: Buffer) -> None:
    """Ends the step with the next token, or leaves the choice to the host."""
    io, n_vocab = tape.io, logits.shape[1]
    n_blocks = -(-n_vocab // SLICE)
    bias = io["sampler_ints"], io["bias_ids"], io["bias_values"]
    ends = (io["counters"], io["pos"], io["n_rows"], io["tokens"], io["published"], n_vocab)
    reason = f"{n_blocks} blocks rank {SLICE} logits each, the last one chooses"
    if tape.key.sampler == "greedy":
        partials = tape.scratch("partials", n_blocks, 2, dtype="U32")
        tape.launch(choose_greedy, logits, *bias, partials, *ends, label="choose",
                    variant="greedy", reason=reason)
    else:
        partials = tape.scratch("partials", n_blocks * MAX_TOP_K, 2, dtype="U32")
        tape.launch(choose_chain, logits, io["sampler_floats"], *bias, partials, *ends,
                    label="choose", variant="chain", reason=reason)
