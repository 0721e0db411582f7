"""Text without special tokens to ids, by llama.cpp's two algorithms.

BPE joins the pair with the lowest merge rank, SPM the pair whose token has the highest score; both
take the leftmost of equals. Does not know special tokens, BOS and EOS, or where the text came from
(tokenizer.py).
"""

import functools
import heapq
from collections.abc import Callable, Iterable

from .pretokenizers import IGNORES_MERGES, PLAIN_TEXT, PRETOKENIZERS, PreTokenizer
from .vocabulary import Vocabulary

_SPACE = "\u2581"  # stands for a space
_CACHED_WORDS = 1 << 16


def byte_signs() -> dict[int, str]:
    """GPT-2's printable character for each byte: itself, or one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict(zip(printable + others, map(chr, [*printable, *range(0x100, 0x200)]), strict=False))


def merge(symbols: list[str], rank: Callable[[str, str], float | None]) -> list[str]:
    """Joins neighbours until no pair has a rank: always the lowest rank, the leftmost of equals.

    A heap of candidates over a linked list, so n symbols take n log n steps.
    """
    symbols = symbols.copy()
    last = len(symbols)
    before = list(range(-1, last - 1))
    after = list(range(1, last + 1))
    heap: list[tuple[float, int, int, int]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right < last:
            priority = rank(symbols[left], symbols[right])
            if priority is not None:
                size = len(symbols[left]) + len(symbols[right])
                heapq.heappush(heap, (priority, left, right, size))

    for i in range(1, last):
        offer(i - 1, i)
    while heap:
        _, left, right, size = heapq.heappop(heap)
        # A symbol that has been joined meanwhile is empty, or longer than it was.
        if not symbols[left] or not symbols[right]:
            continue
        if len(symbols[left]) + len(symbols[right]) != size:
            continue
        symbols[left] += symbols[right]
        symbols[right] = ""
        after[left] = after[right]
        if after[left] < last:
            before[after[left]] = left
        offer(before[left], left)
        offer(left, after[left])
    return [symbol for symbol in symbols if symbol]


class BytePairs:
    """BPE: words from the pre-tokenizer, joined by merge ranks; bytes are printable signs."""

    def __init__(self, vocabulary: Vocabulary, merges: list[str]) -> None:
        self._ids = vocabulary.ids
        self._pre = vocabulary.pre
        self._plain = vocabulary.pre in PLAIN_TEXT
        self._merges = merges
        self._signs = byte_signs()
        self._bytes = {sign: bytes([byte]) for byte, sign in self._signs.items()}
        self._word = functools.lru_cache(_CACHED_WORDS)(self._encode_word)

    @functools.cached_property
    def _pretokenizer(self) -> PreTokenizer:
        return PreTokenizer(PRETOKENIZERS[self._pre])

    @functools.cached_property
    def _ranks(self) -> dict[str, int]:
        """Rank by "left right"; of two equal merges the first counts."""
        return dict(zip(reversed(self._merges), range(len(self._merges) - 1, -1, -1), strict=True))

    def encode(self, text: str, after_special: bool) -> Iterable[int]:
        """The ids of text that holds no special token."""
        if self._plain:
            text = text.replace(" ", _SPACE)
        for word in self._pretokenizer.split(text):
            yield from self._word(word)

    def _encode_word(self, word: str) -> tuple[int, ...]:
        text = word if self._plain else word.encode().decode("latin-1").translate(self._signs)
        whole = self._pre in IGNORES_MERGES or (self._pre == "gemma4" and not word.strip("\n"))
        if whole and text in self._ids:
            return (self._ids[text],)
        ranks = self._ranks
        symbols = merge(list(text), lambda left, right: ranks.get(f"{left} {right}"))
        return tuple(token for symbol in symbols for token in self._tokens(symbol))

    def _tokens(self, symbol: str) -> Iterable[int]:
        """The symbol's token, else those of its bytes; what has no token at all is left out."""
        if symbol in self._ids:
            return (self._ids[symbol],)
        parts = [f"<0x{byte:02X}>" for byte in symbol.encode()] if self._plain else symbol
        return (self._ids[part] for part in parts if part in self._ids)

    def bytes_of(self, text: str) -> bytes:
        """What a normal token's text stands for."""
        if self._plain:
            return utf8(text.replace(_SPACE, " "))
        return b"".join(self._bytes.get(sign) or utf8(sign) for sign in text)


class ScoredPieces:
    """SPM: characters joined by the score of the token they make; spaces are U+2581."""

    def __init__(self, vocabulary: Vocabulary, add_space_prefix: bool) -> None:
        self._ids = vocabulary.ids
        self._scores = vocabulary.scores
        self._prefix = " " if add_space_prefix else ""

    def encode(self, text: str, after_special: bool) -> Iterable[int]:
        """The ids of text that holds no special token."""
        text = (self._prefix if after_special else "") + text
        for symbol in merge(list(text.replace(" ", _SPACE)), self._rank):
            if symbol in self._ids:
                yield self._ids[symbol]
            else:
                yield from self._bytes(symbol)

    def _rank(self, left: str, right: str) -> float | None:
        token = self._ids.get(left + right)
        return None if token is None else -self._scores[token]

    def _bytes(self, symbol: str) -> Iterable[int]:
        """The tokens of the symbol's bytes; a byte that has none is left out."""
        for byte in symbol.encode():
            token = self._ids.get(f"<0x{byte:02X}>", self._ids.get(chr(byte)))
            if token is not None:
                yield token

    def bytes_of(self, text: str) -> bytes:
        """What a normal token's text stands for."""
        return utf8(text.replace(_SPACE, " "))


def utf8(text: str) -> bytes:
    """The bytes of a text from a file, also where they are no UTF-8."""
    return text.encode("utf-8", "surrogateescape")
