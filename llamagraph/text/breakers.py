"""Sequence breakers of the DRY sampler: texts to the tokens that may hold or begin them.

Knows a vocabulary as texts and a way to encode. Does not know what a breaker is good for.
"""

from collections.abc import Callable, Iterable, Sequence

MAX_CHARACTERS = 40  # of a breaker that count
MAX_TAIL = 20  # tokens after the one that begins it


def sequence_breakers(texts: Iterable[str], tokens: Sequence[str],
                      encode: Callable[[str], Sequence[int]]) -> dict[int, list[tuple[int, ...]]]:
    """For each token that can begin a breaker: the tokens that must follow, () for none.

    A token begins a breaker if it contains it, or ends with its first characters; the rest of the
    breaker is then encoded. `tokens` are the texts of the vocabulary, by id.
    """
    found: dict[int, list[tuple[int, ...]]] = {}
    for text in (t[:MAX_CHARACTERS] for t in texts if t):
        for id, token in enumerate(tokens):
            if text in token:
                found.setdefault(id, []).append(())
                continue
            for n in range(min(len(token), len(text) - 1), 0, -1):
                if token.endswith(text[:n]):
                    found.setdefault(id, []).append(tuple(encode(text[n:])[:MAX_TAIL]))
    return found
