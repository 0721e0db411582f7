r"""A regular expression of a JSON schema as GBNF for the inside of a JSON string.

The common part of JavaScript's syntax: characters, `.`, classes, `\d \w \s`, groups, `|`,
repetitions, and `^` and `$` at the ends; where these are missing, anything may stand there, as the
schema's rules say. Characters that JSON escapes are written as it does, `\"` or `\n`; other control
characters never come. Does not know schemas.
"""

import re
from collections.abc import Callable
from typing import NoReturn

from .grammar import LAST, Ranges, merged

_SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_LINE_ENDS = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_CLASSES = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "s": [(0x09, 0x0D), (0x20, 0x20)],
}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0, "b": 8}
_TIMES = re.compile(r"([*+?]|\{\d+(?:,\d*)?\})\??")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")


def gbnf_literal(text: str) -> str:
    """The text as a GBNF literal."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1F\x7F]", lambda c: f"\\x{ord(c[0]):02X}", escaped) + '"'


def gbnf_class(ranges: Ranges) -> str:
    """The ranges as a GBNF class."""
    def char(code: int) -> str:
        c = chr(code)
        return c if c.isascii() and c.isalnum() else (
            f"\\x{code:02X}" if code < 0x80 else f"\\U{code:08X}")

    return "[" + "".join(
        char(low) + ("-" + char(high)) * (high > low) for low, high in ranges) + "]"


def json_characters(ranges: Ranges) -> str:
    """One character of the ranges as it stands inside a JSON string; "" where there is none."""
    outside = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)]
    plain = merged([*merged(list(ranges), negated=True), *outside], negated=True)
    escaped = [s for c, s in _SHORT.items() if any(a <= ord(c) <= b for a, b in ranges)]
    parts = [gbnf_class(plain)] if plain else []
    if escaped:
        parts.append('"\\\\" [' + "".join(f"\\x{ord(s):02X}" for s in escaped) + "]")
    return f"({' | '.join(parts)})" if len(parts) > 1 else "".join(parts)


def pattern_to_gbnf(pattern: str, fail: Callable[[str], NoReturn]) -> str:
    """The texts in which the pattern is found, without the quotes around them.

    `fail` is called with what cannot be done, and raises.
    """
    return _Pattern(pattern, fail).whole()


class _Pattern:
    """Reads from `pos` on; a method leaves `pos` behind what it has read."""

    def __init__(self, text: str, fail: Callable[[str], NoReturn]):
        self.text, self.pos, self._fail = text, 0, fail
        self.anything = json_characters(((0, LAST),)) + "*"

    def fail(self, problem: str) -> NoReturn:
        self._fail(f"pattern {self.text!r}, character {self.pos + 1}: {problem}")

    def next(self) -> str:
        return self.text[self.pos : self.pos + 1]

    def take(self, text: str) -> bool:
        found = self.text.startswith(text, self.pos)
        self.pos += len(text) * found
        return found

    def whole(self) -> str:
        parts = []
        while True:
            before = "" if self.take("^") else self.anything
            body = self.sequence()
            after = "" if self.take("$") else self.anything
            parts.append(" ".join(filter(None, (before, body, after))) or '""')
            if not self.take("|"):
                break
        if self.next():
            self.fail(f"{self.next()} does not fit here; ^ and $ only stand at the ends")
        return " | ".join(parts)

    def sequence(self) -> str:
        """Up to an end, `|` or a bracket that closes, as GBNF; literals are joined."""
        parts: list[str] = []
        while self.next() and self.next() not in "|)$^":
            atom = self.atom()
            times = _TIMES.match(self.text, self.pos)
            if times is None and parts and atom[0] == parts[-1][-1] == '"':
                parts[-1] = parts[-1][:-1] + atom[1:]
                continue
            if times:
                self.pos = times.end()
                atom += times[1]
            parts.append(atom)
        return " ".join(parts)

    def atom(self) -> str:
        c = self.next()
        if c == "(":
            return self.group()
        if c in "*+?{":
            self.fail(f"nothing stands before {c} that it could repeat")
        ranges = merged(self.char_class() if c == "[" else self.character())
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1] and (
            char := chr(ranges[0][0])) not in _SHORT:
            return gbnf_literal(char)
        return json_characters(ranges) or self.fail("no character of a JSON string fits here")

    def group(self) -> str:
        opening = _GROUP.match(self.text, self.pos)
        if opening is None:
            self.fail("only groups (...) and (?:...) can be turned into a grammar")
        self.pos = opening.end()
        parts = [self.sequence()]
        while self.take("|"):
            parts.append(self.sequence())
        if not self.take(")"):
            self.fail("a parenthesis is never closed, or ^ or $ stands inside of one")
        return "(" + " | ".join(part or '""' for part in parts) + ")"

    def character(self) -> list[tuple[int, int]]:
        """One character that is no class in brackets, perhaps an escape."""
        c = self.next()
        self.pos += 1
        if c == ".":
            return list(merged(_LINE_ENDS, negated=True))
        if c == "\\":
            return self.escape()
        return [(ord(c), ord(c))]

    def escape(self, in_class: bool = False) -> list[tuple[int, int]]:
        c = self.next()
        if found := _HEX.match(self.text, self.pos):
            self.pos = found.end()
            code = int(found[1] or found[2] or found[3], 16)
            return [(code, code)] if code <= LAST else self.fail("no character has this number")
        self.pos += 1
        if c and c.lower() in _CLASSES:
            return list(merged(_CLASSES[c.lower()], negated=c.isupper()))
        if c in _CONTROLS and c and (c != "b" or in_class):
            return [(_CONTROLS[c], _CONTROLS[c])]
        if not c or c.isalnum():
            self.pos -= 2
            self.fail(f"\\{c} cannot be turned into a grammar")
        return [(ord(c), ord(c))]

    def char_class(self) -> list[tuple[int, int]]:
        self.pos += 1
        negated, ranges = self.take("^"), []
        while not self.take("]"):
            first = self.class_part()
            if self.next() == "-" and self.text[self.pos + 1 : self.pos + 2] not in ("]", ""):
                self.pos += 1
                last = self.class_part()
                if len(first) > 1 or len(last) > 1 or first[0][0] > last[0][0]:
                    self.fail("this is no range of characters")
                first = [(first[0][0], last[0][1])]
            ranges += first
        return list(merged(ranges, negated))

    def class_part(self) -> list[tuple[int, int]]:
        c = self.next()
        if not c:
            self.fail("a bracket is never closed")
        self.pos += 1
        return self.escape(in_class=True) if c == "\\" else [(ord(c), ord(c))]
