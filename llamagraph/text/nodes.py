"""A grammar's rules as linked nodes over bytes: what is left to match, and what may come first.

A character class becomes the UTF-8 sequences of its characters, so a token may end inside of one.
Does not know stacks and states (matcher.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Optional

from ..errors import LlamaGraphError
from .grammar import Chars, Choice, Element, Grammar, Ranges, Repeat, Sequence, TokenIs
from .trie import TokenTrie

Bytes = tuple[tuple[int, int], ...]  # a range a byte


def utf8_ranges(low: int, high: int) -> list[Bytes]:
    """The characters from low to high as byte sequences with a range for each byte.

    Cut wherever the number of bytes changes, and so that all but one leading part of the bytes are
    the same or run through their whole range.
    """
    for first, last in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xD800, 0xDFFF),
                        (0xE000, 0xFFFF), (0x10000, 0x10FFFF)):
        if low <= last < high:
            return utf8_ranges(low, last) + utf8_ranges(last + 1, high)
        if first <= low and high <= last:
            break
    if first == 0xD800:  # halves of surrogate pairs are no characters
        return []
    for n_bits in (6, 12, 18) if low > 0x7F else ():
        tail = (1 << n_bits) - 1
        if low >> n_bits == high >> n_bits:
            continue
        if low & tail:
            return utf8_ranges(low, low | tail) + utf8_ranges((low | tail) + 1, high)
        if high & tail != tail:
            return utf8_ranges(low, (high & ~tail) - 1) + utf8_ranges(high & ~tail, high)
    return [tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))]


@dataclass(eq=False, slots=True)
class Node:
    """What is left of a sequence: an element, and what follows it (None: nothing).

    The element is a set of bytes (as bits), a token, or `alternatives`, each the first node of a
    sequence or None for an empty one. These are taken `low` to `high` times (None: without end).
    """

    next: Optional["Node"]
    bytes: int = 0
    token: TokenIs | None = None
    alternatives: list[Optional["Node"]] | None = None
    low: int = 1
    high: int | None = 1
    _after: Optional["Node"] = None
    _first: tuple[tuple[tuple["Node", ...], ...], bool] | None = None

    def after(self) -> Optional["Node"]:
        """What is left once an alternative was taken."""
        if self.high == 1:
            return self.next
        if self.high is None and self.low == 0:
            return self
        if self._after is None:
            high = None if self.high is None else self.high - 1
            self._after = Node(self.next, alternatives=self.alternatives,
                               low=max(self.low - 1, 0), high=high)
        return self._after

    def first(self) -> tuple[tuple[tuple["Node", ...], ...], bool]:
        """The stacks that stand for this node, each with bytes or a token on top (the last one).

        And whether the node, with all that follows it in its sequence, may match nothing.
        """
        if self._first is None:
            paths: dict[tuple[Node, ...], None] = {}
            node: Node | None = self
            while node is not None and node._add_first(paths):
                node = node.next
            self._first = tuple(paths), node is None
        return self._first

    def _add_first(self, paths: dict[tuple["Node", ...], None]) -> bool:
        """Adds the stacks of the element; whether it may match nothing."""
        if self.alternatives is None:
            paths[(self,)] = None
            return False
        may_be_empty, after = self.low == 0, self.after()
        for head in self.alternatives:
            inner, empty = head.first() if head else ((), True)
            may_be_empty |= empty
            for path in inner:
                paths[(after, *path) if after else path] = None
        return may_be_empty


class Compiler:
    """Makes nodes of rules; equal classes share theirs. Raises LlamaGraphError for wrong tokens.

    `rules` holds the alternatives of each rule, `byte_sets` all the sets of bytes that occur.
    """

    def __init__(self, grammar: Grammar, tokens: TokenTrie):
        self.tokens = tokens
        self.rules: dict[str, list[Node | None]] = {name: [] for name in grammar.rules}
        self._classes: dict[Ranges, list[Node | None]] = {}
        self.byte_sets: set[int] = set()
        for name, choice in grammar.rules.items():
            self.rules[name] += self._heads(choice.alternatives)

    def _heads(self, sequences: Iterable[Sequence]) -> list[Node | None]:
        return [self._chain(sequence, None) for sequence in sequences]

    def _chain(self, sequence: Sequence, following: Node | None) -> Node | None:
        for element in reversed(sequence):
            if isinstance(element, Choice) and len(element.alternatives) == 1:
                following = self._chain(element.alternatives[0], following)
            elif not (isinstance(element, Repeat) and element.high == 0):
                following = self._node(element, following)
        return following

    def _node(self, element: Element, following: Node | None) -> Node:
        if isinstance(element, TokenIs):
            return self._token(element, following)
        if isinstance(element, Chars):
            return self._chars(element.ranges, following)
        if isinstance(element, Choice):
            return Node(following, alternatives=self._heads(element.alternatives))
        if isinstance(element, Repeat):
            body = element.body.alternatives if isinstance(element.body, Choice) else (
                (element.body,),)
            return Node(following, alternatives=self._heads(body), low=element.low,
                        high=element.high)
        return Node(following, alternatives=self.rules[element.rule])

    def _token(self, element: TokenIs, following: Node | None) -> Node:
        if element.id >= self.tokens.n_vocab:
            raise LlamaGraphError(f"grammar: there is no token <[{element.id}]>; the model's go "
                                  f"from 0 to {self.tokens.n_vocab - 1}")
        if element.id in self.tokens.ends and not element.negated:
            raise LlamaGraphError(f"grammar: <[{element.id}]> ends the text; leave it away, the "
                                  f"text may end where root does")
        return Node(following, token=element)

    def _chars(self, ranges: Ranges, following: Node | None) -> Node:
        if ranges not in self._classes:
            self._classes[ranges] = self._byte_heads(ranges)
        heads = self._classes[ranges]
        if len(heads) == 1 and heads[0] is not None and heads[0].next is None:
            return Node(following, heads[0].bytes)
        return Node(following, alternatives=heads)

    def _byte_heads(self, ranges: Ranges) -> list[Node | None]:
        single, heads = 0, []
        for sequence in (s for low, high in ranges for s in utf8_ranges(low, high)):
            node: Node | None = None
            for low, high in reversed(sequence):
                node = Node(node, (2 << high) - (1 << low))
                self.byte_sets.add(node.bytes)
            if node is not None and node.next is None:
                single |= node.bytes
            else:
                heads.append(node)
        self.byte_sets.add(single)
        return [Node(None, single), *heads] if single else heads
