"""A model with no weights: random logits over a small vocabulary, constrained by a grammar."""

import numpy as np

from llamagraph.text.gbnf import parse_grammar
from llamagraph.text.matcher import Constraint, Matcher
from llamagraph.text.trie import TokenTrie

WORDS = [
    '"name"', '": "', '", "', '":', "true", "false", "null", '{"', '"}', "[[", "]]", "},{", " {",
    "12", "0.5", "2024-", "(1", ") * (", "int ", "while (", "return ", ";\n", " = ", "- ", "\n- ",
    "1. e4", " e5", "Nf3", "O-O", "日本", "は", "語を", "。", "猫が", "    ", "é", "\\n", "\\u00",
]
CONTROL, END = 256 + len(WORDS), 257 + len(WORDS)
TEXTS = [bytes([b]) for b in range(256)] + [w.encode() for w in WORDS] + [b"", b""]


def vocabulary() -> TokenTrie:
    """Every byte, some longer tokens, a control token that shows nothing, and an end."""
    return TokenTrie(TEXTS, np.ones(len(TEXTS), bool), {END})


def matcher(grammar: str) -> Matcher:
    return Matcher(parse_grammar(grammar, token_id={"<think>": CONTROL}.get), vocabulary())


def allows(m: Matcher, text: str | bytes) -> bool:
    """Whether a whole text fits, byte by byte."""
    state = m.start
    for byte in text.encode() if isinstance(text, str) else text:
        state = m.advance(state, byte)
    return m.may_end(state)


class StubModel:
    """Draws tokens as the runner does: the first choice is checked, then all others are.

    So that every text ends, the bytes `toward` become likelier and `away` unlikelier after
    `patience` tokens, as does the end.
    """

    def __init__(self, seed: int, toward: str = "", away: str = "", patience: int = 20):
        self.rng, self.patience = np.random.default_rng(seed), patience
        self.pull = np.zeros(len(TEXTS))
        self.pull[END] = 6
        for id, text in enumerate(TEXTS[:CONTROL]):
            self.pull[id] += 6.0 * (text[:1] in toward.encode()) if text else 0
            self.pull[id] -= 6.0 * any(bytes([b]) in away.encode() for b in text)

    def generate(self, m: Matcher, most: int = 5000) -> str:
        constraint, out = Constraint(m), []
        for n in range(most):
            logits = self.rng.standard_normal(len(TEXTS)) + self.pull * (n > self.patience)
            token = int(logits.argmax())
            if not constraint.accepts(token):
                token = int(constraint.masked(logits).argmax())
            constraint.advance(token)
            if token == END:
                return b"".join(out).decode()
            out.append(TEXTS[token])
        raise AssertionError(f"no end: {b''.join(out)[:200]!r}")
