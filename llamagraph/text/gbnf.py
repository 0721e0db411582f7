r"""GBNF, llama.cpp's grammar notation, to the rules of grammar.py.

    root ::= "yes" | "no" (", because " [a-z ]{1,80})?   # `root` is the whole text

Literals, classes `[a-z]` and `[^"\\]`, `.`, groups, `|`, `? * + {m} {m,} {m,n}`, comments; the
escapes `\n \r \t \\ \" \[ \] \- \xHH \uHHHH \UHHHHHHHH`; `<think>`, `<[12]>`, `!<think>` for
one token. A rule ends with its line, but for a line break inside parentheses, after `|` or `::=`;
of two rules with one name the later counts, as in llama.cpp. Does not know a model's tokens but
for those that are named, nor how a text is matched (matcher.py).
"""

import re
from collections.abc import Callable
from typing import NoReturn

from ..errors import LlamaGraphError
from .grammar import (
    LAST,
    Chars,
    Choice,
    Element,
    Grammar,
    Repeat,
    Sequence,
    TokenIs,
    Use,
    check_rules,
    merged,
)

MAX_DEPTH = 100  # of parentheses
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_ANY_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_COUNT = re.compile(r"\{\s*(\d+)\s*(,?)\s*(\d*)\s*\}")
_TOKEN = re.compile(r"(!?)<(?:\[(\d+)\]>|([^\r\n>]*>))")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {c: c for c in '\\"[]-'}
_HEX = {"x": 2, "u": 4, "U": 8}


def parse_grammar(text: str, source: str = "grammar",
                  token_id: Callable[[str], int | None] = lambda _: None) -> Grammar:
    """The rules of a GBNF text. Raises LlamaGraphError with source, line, column and the fix.

    `token_id` gives the id of the one token that a text like "<think>" is, or None.
    """
    rules = _Parser(text, source, token_id).rules()
    check_rules(rules, source)
    return Grammar(rules)


class _Parser:
    """Reads from `pos` on; a method leaves `pos` behind what it has read."""

    def __init__(self, text: str, source: str, token_id: Callable[[str], int | None]):
        self.text, self.source, self.token_id = text, source, token_id
        self.pos = self.depth = 0

    def where(self, pos: int) -> str:
        line_start = self.text.rfind("\n", 0, pos) + 1
        return f"{self.text.count(chr(10), 0, pos) + 1}:{pos - line_start + 1}"

    def fail(self, problem: str, pos: int | None = None) -> NoReturn:
        place = self.where(self.pos if pos is None else pos)
        raise LlamaGraphError(f"{self.source}:{place}: {problem}")

    def next(self) -> str:
        return self.text[self.pos : self.pos + 1]

    def skip(self, over_lines: bool) -> None:
        match = (_ANY_SPACE if over_lines else _SPACE).match(self.text, self.pos)
        assert match is not None
        self.pos = match.end()

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        if match := pattern.match(self.text, self.pos):
            self.pos = match.end()
        return match

    def rules(self) -> dict[str, Choice]:
        rules = {}
        self.skip(over_lines=True)
        while self.next():
            name = self.match(_NAME)
            if name is None:
                self.fail(f"a rule was expected, not {self.next()!r}; write: name ::= ...")
            self.skip(over_lines=False)
            if not self.text.startswith("::=", self.pos):
                self.fail(f"::= was expected after {name[0]}")
            self.pos += 3
            self.skip(over_lines=True)
            rules[name[0]] = self.choice(nested=False)
            if self.next() not in ("", "\r", "\n"):
                self.fail(f"{self.next()!r} does not fit here; a rule ends with its line, and what "
                          f"goes over several lines stands in parentheses")
            self.skip(over_lines=True)
        return rules

    def choice(self, nested: bool) -> Choice:
        alternatives = [self.sequence(nested)]
        while self.next() == "|":
            self.pos += 1
            self.skip(over_lines=True)
            alternatives.append(self.sequence(nested))
        return Choice(tuple(alternatives))

    def sequence(self, nested: bool) -> Sequence:
        elements: list[Element] = []
        while (c := self.next()) and c not in "|)\r\n":
            if c in "*+?{":
                if not elements:
                    self.fail(f"nothing stands before {c} that it could repeat")
                low, high = self.times()
                elements[-1] = Repeat(elements[-1], low, high)
            else:
                elements.append(self.element())
            self.skip(nested)
        return tuple(elements)

    def times(self) -> tuple[int, int | None]:
        c = self.next()
        if c != "{":
            self.pos += 1
            return int(c == "+"), 1 if c == "?" else None
        start = self.pos
        count = self.match(_COUNT)
        if count is None:
            self.fail("a number of times is written {m}, {m,} or {m,n}")
        low = int(count[1])
        high = low if not count[2] else int(count[3]) if count[3] else None
        if (high is not None and high < low) or (not count[2] and count[3]):
            self.fail(f"{count[0]} is no range; write the smaller number first", start)
        return low, high

    def element(self) -> Element:
        start, c = self.pos, self.next()
        if c == '"':
            return self.literal()
        if c == "[":
            return self.char_class()
        if c in "<!":
            return self.token()
        if c == ".":
            self.pos += 1
            return Chars(((0, LAST),))
        if c == "(":
            return self.group()
        if name := self.match(_NAME):
            return Use(name[0], self.where(start))
        self.fail(f"{c!r} does not fit here; text stands in double quotes")

    def group(self) -> Choice:
        start = self.pos
        self.pos, self.depth = self.pos + 1, self.depth + 1
        if self.depth > MAX_DEPTH:
            self.fail(f"more than {MAX_DEPTH} parentheses inside each other; make rules of them")
        self.skip(over_lines=True)
        choice = self.choice(nested=True)
        if self.next() != ")":
            self.fail("this parenthesis is never closed", start)
        self.pos, self.depth = self.pos + 1, self.depth - 1
        return choice

    def literal(self) -> Choice:
        start, chars = self.pos, []
        self.pos += 1
        while self.next() != '"':
            at, code = self.pos, self.char(start)
            if 0xD800 <= code < 0xE000:
                self.fail("half of a surrogate pair is no character; write \\U and 8 digits", at)
            chars.append(Chars(((code, code),)))
        self.pos += 1
        return Choice((tuple(chars),))

    def char_class(self) -> Chars:
        start, ranges = self.pos, []
        self.pos += 1
        negated = self.next() == "^"
        self.pos += negated
        while self.next() != "]":
            low = high = self.char(start)
            if self.next() == "-" and self.text[self.pos + 1 : self.pos + 2] != "]":
                self.pos += 1
                high = self.char(start)
            if high < low:
                self.fail(f"{chr(low)!r} to {chr(high)!r} is no range; write the lower one first",
                          start)
            ranges.append((low, high))
        self.pos += 1
        if not ranges:
            self.fail("an empty class; for any character write a point", start)
        return Chars(merged(ranges, negated))

    def char(self, start: int) -> int:
        """A code point, perhaps as an escape. `start` is where the literal or class began."""
        c = self.next()
        if not c:
            self.fail("this is never closed: " + self.text[start : start + 20].split("\n")[0],
                      start)
        self.pos += 1
        if c != "\\":
            return ord(c)
        kind = self.next()
        if kind in _ESCAPES and kind:
            self.pos += 1
            return ord(_ESCAPES[kind])
        n = _HEX.get(kind, 0)
        digits = self.text[self.pos + 1 : self.pos + 1 + n]
        if not n or not re.fullmatch(f"[0-9A-Fa-f]{{{n}}}", digits) or int(digits, 16) > LAST:
            known = r'\n \r \t \\ \" \[ \] \- \xHH \uHHHH \UHHHHHHHH'
            self.fail(f"unknown escape \\{kind}{digits}; there are {known}", self.pos - 1)
        self.pos += 1 + n
        return int(digits, 16)

    def token(self) -> TokenIs:
        start = self.pos
        found = self.match(_TOKEN)
        if found is None:
            self.fail("a token is written <[id]> or <text>, another than that with ! before it")
        id = int(found[2]) if found[2] else self.token_id("<" + found[3])
        if id is None:
            self.fail(f"<{found[3]} is not one token of this model; for text write quotes", start)
        return TokenIs(id, found[1] == "!")
