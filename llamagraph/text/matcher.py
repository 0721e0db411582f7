"""Which tokens a grammar allows next: a machine over bytes, and its walk over all tokens at once.

A state is a set of stacks of what is left to match; states are numbered and where a byte leads from
one is remembered, so that most tokens cost a few look-ups. States are never forgotten: a grammar
of nested counts can have one a token.

What the grammar sees is what a reader sees: a control token has no characters, and is allowed only
where the grammar names it, or any but another (`!<...>`). Does not know how tokens are chosen.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Optional

import numpy as np

from ..errors import LlamaGraphError
from .grammar import Grammar
from .nodes import Compiler, Node
from .trie import TokenTrie

DEAD, START = 0, 1  # the state that nothing leads out of, and the first one
UNKNOWN = -1  # where a byte leads, as long as nobody has asked
MAX_STACKS = 4096  # of one state: so many ways to read the same text
MAX_MASKS = 64  # that are kept


@dataclass(eq=False, slots=True)
class Stack:
    """What is left to match, the next on top; `rest` is None at the bottom."""

    top: Node
    rest: Optional["Stack"]
    _then: frozenset[Optional["Stack"]] | None = field(default=None)


StateStacks = frozenset[Stack | None]  # None is the empty stack: the text may end


class Matcher:
    """A grammar's states over a vocabulary, shared by every text that it is matched against.

    A state is a number; `start` is the first. Raises LlamaGraphError for tokens that do not exist,
    and, also later, for a grammar that is too ambiguous.
    """

    start = START

    def __init__(self, grammar: Grammar, tokens: TokenTrie):
        self.tokens = tokens
        compiler = Compiler(grammar, tokens)
        self._class_of, self._samples = _byte_classes(compiler.byte_sets)
        self._stacks: dict[tuple[Node, Stack | None], Stack] = {}
        self._numbers: dict[StateStacks, int] = {}
        self._states: list[StateStacks] = []
        self._table = np.empty((0, len(self._samples)), np.int32)
        self._masks: dict[int, np.ndarray] = {}
        self._number(frozenset())
        root = Stack(Node(None, alternatives=compiler.rules["root"]), None)
        if self._number(frozenset(self._expanded(root))) != START:
            raise LlamaGraphError("the grammar allows no text at all; look for an empty class")

    def may_end(self, state: int) -> bool:
        """Whether the text may end here."""
        return None in self._states[state]

    def accepts(self, state: int, token: int) -> bool:
        """Whether the token may come next."""
        return self.advance(state, token) != DEAD

    def advance(self, state: int, token: int) -> int:
        """The state after a token, DEAD where it does not fit. An end leaves it as it is."""
        if token in self.tokens.ends:
            return state if self.may_end(state) else DEAD
        text = self.tokens.texts[token]
        after = state if text and 0 not in text else DEAD
        for byte in text:
            after = self._next(after, self._class_of[byte])
        named = [s for s in self._states[state]
                 if s and s.top.token and (s.top.token.id == token) != s.top.token.negated]
        if not named or not self.tokens.real[token]:
            return after
        return self._number(self._states[after].union(*map(self._then, named)))

    def mask(self, state: int) -> np.ndarray:
        """bool (n_vocab,), read only: the tokens that may come next."""
        if state not in self._masks:
            if len(self._masks) >= MAX_MASKS:
                del self._masks[next(iter(self._masks))]
            self._masks[state] = self._find_mask(state)
        return self._masks[state]

    def _find_mask(self, state: int) -> np.ndarray:
        tokens, alive = self.tokens, np.zeros(len(self.tokens.byte), bool)
        nodes, states = np.zeros(1, np.int64), np.full(1, state, np.int32)
        while len(nodes):
            nodes, parents = tokens.children(nodes)
            states = self._next_all(states[parents], self._class_of[tokens.byte[nodes]])
            fits = np.flatnonzero(states)
            nodes, states = nodes[fits], states[fits]
            alive[nodes] = True
        mask = alive[tokens.last_node]
        for token in (s.top.token for s in self._states[state] if s and s.top.token):
            if token.negated:
                others = tokens.real.copy()
                others[token.id : token.id + 1] = mask[token.id : token.id + 1]
                mask |= others
            else:
                mask[token.id : token.id + 1] = True
        mask[list(tokens.ends)] = self.may_end(state)
        mask.flags.writeable = False
        return mask

    def _next_all(self, states: np.ndarray, classes: np.ndarray) -> np.ndarray:
        found = self._table[states, classes]
        unknown = np.flatnonzero(found == UNKNOWN)
        if not len(unknown):
            return found
        n_classes = self._table.shape[1]
        for key in np.unique(states[unknown] * np.int64(n_classes) + classes[unknown]).tolist():
            self._next(*divmod(key, n_classes))
        return self._table[states, classes]

    def _next(self, state: int, byte_class: int) -> int:
        """The state that a byte of the class leads to."""
        found = int(self._table[state, byte_class])
        if found == UNKNOWN:
            byte = self._samples[byte_class]
            stacks = [self._then(s) for s in self._states[state] if s and s.top.bytes >> byte & 1]
            found = self._number(frozenset().union(*stacks))
            self._table[state, byte_class] = found
        return found

    def _number(self, stacks: StateStacks) -> int:
        if stacks in self._numbers:
            return self._numbers[stacks]
        if len(stacks) > MAX_STACKS:
            raise LlamaGraphError(f"the grammar can read one text in more than {MAX_STACKS} ways; "
                                  f"make its alternatives begin differently")
        number = self._numbers[stacks] = len(self._states)
        self._states.append(stacks)
        if number == len(self._table):
            more = np.full((max(number, 64), self._table.shape[1]), UNKNOWN, np.int32)
            self._table = np.concatenate([self._table, more])
        if not stacks:
            self._table[number] = DEAD
        return number

    def _push(self, top: Node, rest: Stack | None) -> Stack:
        key = (top, rest)
        if key not in self._stacks:
            self._stacks[key] = Stack(top, rest)
        return self._stacks[key]

    def _then(self, stack: Stack) -> StateStacks:
        """The stacks after what is on top was matched."""
        if stack._then is None:
            rest = self._push(stack.top.next, stack.rest) if stack.top.next else stack.rest
            stack._then = frozenset(self._expanded(rest))
        return stack._then

    def _expanded(self, stack: Stack | None) -> Iterable[Stack | None]:
        """The same with bytes or a token on top of each."""
        may_be_empty = True
        while stack is not None and may_be_empty:
            paths, may_be_empty = stack.top.first()
            for path in paths:
                grown = stack.rest
                for node in path:
                    grown = self._push(node, grown)
                yield grown
            stack = stack.rest
        if may_be_empty:
            yield None


def _byte_classes(byte_sets: set[int]) -> tuple[np.ndarray, list[int]]:
    """The class of each byte, (256,), and a byte of each; those in the same sets share a class."""
    packed = [np.frombuffer(bits.to_bytes(32, "little"), np.uint8) for bits in byte_sets or {0}]
    member = np.unpackbits(np.stack(packed), axis=1, bitorder="little")
    _, samples, classes = np.unique(member, axis=1, return_index=True, return_inverse=True)
    return classes.reshape(256), samples.tolist()


class Constraint:
    """One text on its way through a matcher; counts what that costs.

    `n_tokens` have been matched, `n_rejected` of them chosen again, in `seconds` spent here.
    """

    def __init__(self, matcher: Matcher):
        self.matcher, self.state = matcher, matcher.start
        self.n_tokens = self.n_rejected = 0
        self.seconds = 0.0

    @property
    def us_per_token(self) -> float:
        return 1e6 * self.seconds / max(self.n_tokens, 1)

    def accepts(self, token: int) -> bool:
        """Whether the token may come next."""
        start = time.perf_counter()
        fits = self.matcher.accepts(self.state, token)
        self.seconds += time.perf_counter() - start
        return fits

    def masked(self, logits: np.ndarray) -> np.ndarray:
        """The logits with minus infinity for tokens that may not come next. float32 (n_vocab,)."""
        start = time.perf_counter()
        self.n_rejected += 1
        mask = self.matcher.mask(self.state)
        if not mask.any():
            raise LlamaGraphError("no token of this model goes on as the grammar wants it; "
                                  "it asks for characters that the model cannot write")
        out = np.where(mask, logits, -np.inf).astype(np.float32)
        self.seconds += time.perf_counter() - start
        return out

    def advance(self, token: int) -> None:
        """Takes the token as the next one. LlamaGraphError where it may not come."""
        start = time.perf_counter()
        self.state, before = self.matcher.advance(self.state, token), self.state
        if self.state == DEAD:
            self.state = before
            raise LlamaGraphError("every token that the grammar allows is forbidden by a bias; "
                                  "change --logit-bias")
        self.n_tokens += 1
        self.seconds += time.perf_counter() - start
