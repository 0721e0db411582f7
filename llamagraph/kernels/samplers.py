"""The samplers that only the host runs, one function each, beside those of `sample.py`.

A sampler takes candidates and gives back those that are left, or the same with other logits.
`mirostat_k` and `mirostat_2` say how many may be drawn, `adaptive` what is drawn from. Formulas are
those of the papers and proposals that each function names. Knows no parameters and no vocabulary.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from llamagraph.kernels.sample import LARGEST, Candidates, penalised, temperature

MIROSTAT_M = 100  # candidates that mirostat fits Zipf's exponent to
FLOAT_MAX_LOG = float(np.log(np.finfo(np.float32).max))
Breakers = Mapping[int, Sequence[tuple[int, ...]]]  # a token, and what may have to follow it


def by_id(c: Candidates, values: Mapping[int, float]) -> np.ndarray:
    """A number for each candidate, by token id; 0 where there is none."""
    table = np.zeros(1 + max(int(c.ids.max()), *values, 0), np.float32)
    table[list(values)] = list(values.values())
    return table[c.ids]


def penalties(c: Candidates, window: np.ndarray, repeat: float, presence: float,
              frequency: float) -> Candidates:
    """`penalised` for what is left; the tokens of `window` are the recent ones."""
    if (repeat, presence, frequency) == (1, 0, 0) or not len(window):
        return c
    places = np.full(1 + max(c.ids.max(), window.max()), -1, np.int64)
    places[c.ids] = np.arange(len(c.ids))
    recent = places[window]
    logits = penalised(c.logits, recent[recent >= 0], repeat, presence, frequency)
    return Candidates(c.ids, logits, ranked=False)


def _since_breaker(window: np.ndarray, breakers: Breakers) -> int:
    """How many tokens at the end of the window come after the last sequence breaker."""
    tokens = window.tolist()
    for at in range(len(tokens) - 1, -1, -1):
        whole = [at + 1 + len(tail) for tail in breakers.get(tokens[at], ())
                 if tuple(tokens[at + 1 : at + 1 + len(tail)]) == tail]
        if whole:
            return len(tokens) - max(whole)
    return len(tokens)


def repeats(window: np.ndarray, most: int) -> dict[int, int]:
    """For each token: how many of the tokens that end the window stand before it earlier on.

    Counts end at `most`.
    """
    longest = dict.fromkeys(window[1:].tolist(), 0)
    ends = np.arange(len(window) - 1)  # positions that may end an earlier occurrence
    for length in range(1, most + 1):
        ends = ends[ends >= length - 1]
        ends = ends[window[ends - (length - 1)] == window[len(window) - length]]
        if not len(ends):
            break
        longest |= dict.fromkeys(window[ends + 1].tolist(), length)
    return longest


def dry(c: Candidates, window: np.ndarray, multiplier: float, base: float, allowed_length: int,
        breakers: Breakers) -> Candidates:
    """Don't Repeat Yourself: a penalty that grows with the length of what a token would repeat.

    multiplier * base ^ (length - allowed_length), from allowed_length on (p-e-w's proposal,
    oobabooga/text-generation-webui pull request 5677). Nothing is repeated across a breaker, and a
    token that is a breaker by itself is never penalised.
    """
    if multiplier == 0 or base < 1 or len(window) <= allowed_length:
        return c
    largest = int(FLOAT_MAX_LOG / np.log(base)) if base > 1.000001 else 0  # power
    limit = min(_since_breaker(window, breakers), max(allowed_length, 1) + largest)
    if limit < allowed_length:
        return c
    penalty = {
        token: min(multiplier * base ** min(length - allowed_length, largest), float(LARGEST))
        for token, length in repeats(window, limit).items()
        if length >= allowed_length and () not in breakers.get(token, ())
    }
    return Candidates(c.ids, c.logits - by_id(c, penalty), ranked=False)


def top_n_sigma(c: Candidates, n: float) -> Candidates:
    """Logits within n standard deviations of the largest (Tang et al., arXiv:2411.07641)."""
    if n <= 0 or len(c.ids) == 1:
        return c
    return c.where(c.logits >= c.logits.max() - np.float32(n * c.logits.std(dtype=np.float64)))


def xtc(c: Candidates, probability: float, threshold: float, chance: float) -> Candidates:
    """Exclude Top Choices: of those with at least the threshold only the least likely stays.

    Where the draw `chance` is below `probability`, and never for a threshold above a half, which
    two candidates cannot reach (p-e-w's proposal, text-generation-webui pull request 6335).
    """
    if chance >= probability or threshold > 0.5:
        return c
    n_above = int((c.probabilities() >= np.float32(threshold)).sum())
    return c.where(slice(max(0, n_above - 1), None))


def entropy(c: Candidates) -> float:
    """In nats."""
    p = c.probabilities().astype(np.float64)
    return float(-(p * np.log(np.maximum(p, 1e-300))).sum())


def dynamic_temperature(c: Candidates, temp: float, spread: float, exponent: float) -> Candidates:
    """A temperature from temp - spread to temp + spread, the higher the less certain the choice is.

    The share is (entropy / largest possible entropy) ^ exponent (kalomaze's proposal, KoboldCpp
    1.57; llama.cpp pull request 4972).
    """
    if spread <= 0:
        return temperature(c, temp)
    if len(c.ids) == 1:
        return c
    low, high = max(0.0, temp - spread), temp + spread
    share = (entropy(c) / np.log(len(c.ids))) ** exponent
    return temperature(c, float(low + (high - low) * share))


def mirostat_k(c: Candidates, n_vocab: int, mu: float) -> int:
    """Mirostat's top-k for a largest surprise of `mu` bits (Basu et al., arXiv:2007.14966).

    Zipf's exponent s is estimated from the likeliest tokens; k = (e 2^mu / (1 - N^-e))^(1/s) with
    e = s - 1.
    """
    head = c.logits[:MIROSTAT_M].astype(np.float64)
    if len(head) < 2:
        return 1
    t = np.log1p(1 / np.arange(1, len(head)))
    s = float(t @ (head[:-1] - head[1:]) / (t @ t))
    e = s - 1 if abs(s - 1) > 1e-9 else 1e-9  # e / (1 - N^-e) goes to 1 / ln N
    with np.errstate(all="ignore"):
        k = np.float64(e * 2.0**mu / (1 - np.float64(n_vocab) ** -e)) ** (np.float64(1) / s)
    return int(np.clip(np.nan_to_num(k, nan=len(c.ids)), 1, len(c.ids)))


def mirostat_2(c: Candidates, mu: float) -> int:
    """How many have a surprise of at most `mu` bits, at least 1 (Mirostat 2.0, as above)."""
    with np.errstate(divide="ignore"):
        return max(1, int((-np.log2(c.probabilities()) <= mu).sum()))


def adaptive(c: Candidates, target: float) -> Candidates:
    """Candidates with a probability near the target made likely: 5 - 10 d^2 / (1 + d).

    d is the distance in units of 0.3 (Adaptive-P by MrJackSpade and ddh0, llama.cpp pull request
    17927).
    """
    d = np.abs(c.probabilities() - np.float32(target)) / np.float32(0.3)
    return Candidates(c.ids, np.float32(5) - np.float32(10) * d * d / (1 + d), ranked=False)
