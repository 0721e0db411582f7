"""Thinking: the part of an answer that a model writes for itself, between tags, before it answers.

Knows tags and text, no model. A tag counts only where it can be one: thinking begins at the start
of an answer, or in the prompt already, and ends once.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .tokenizer import THINKING, Tokenizer

TAIL = 16  # tokens at the end of a prompt that may hold a tag


class Piece(NamedTuple):
    """Characters of an answer, and whether they are thinking."""

    thinking: bool
    text: str


class ThinkingText:
    """Splits an answer as it comes; what may yet become a tag is held back, tags are left out.

    `prompt` are the tokens before the answer.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        ids = tokenizer.thinking_tags() or ()
        self._names = {id: tokenizer.token_text(id) for id in ids}  # of tags that show no text
        tail = tokenizer.decode(prompt[-TAIL:]).rstrip()
        self._end = next((end for begin, end in THINKING if tail.endswith(begin)), "")
        self.n_tokens = 0  # of thinking, so far
        self._held = ""
        self._started = False  # whether anything was said
        self._strips = bool(self._end)  # after a tag: newlines are no text

    def feed(self, token: int, text: str) -> list[Piece]:
        """What a token's text adds, in order."""
        if (name := self._names.get(token, "")) not in text:
            text += name
        self._held += text
        if not self._end and not self._started:
            self._begin()
        self.n_tokens += bool(self._end)
        return [*self._thought(), *self._said()]

    def _begin(self) -> None:
        """Looks for a tag at the start."""
        start = self._held.lstrip()
        for begin, end in THINKING:
            if start.startswith(begin):
                self._end, self._held, self._strips = end, start[len(begin) :], True
                return
        self._started = not any(begin.startswith(start) for begin, _ in THINKING)

    def _thought(self) -> list[Piece]:
        if not self._end:
            return []
        thought, found, rest = self._held.partition(self._end)
        n_held = 0 if found else _overlap(thought, self._end)
        self._held = rest if found else thought[len(thought) - n_held :]
        pieces = self._stripped(True, thought[: len(thought) - n_held])
        if found:
            self._end, self._started, self._strips = "", True, True
        return pieces

    def _said(self) -> list[Piece]:
        if self._end or not self._started:
            return []
        said, self._held = self._held, ""
        return self._stripped(False, said)

    def _stripped(self, thinking: bool, text: str) -> list[Piece]:
        if self._strips:
            text = text.lstrip("\n")
            self._strips = not text
        return [Piece(thinking, text)] if text else []

    def flush(self) -> list[Piece]:
        """What was held back, at the end."""
        held, self._held = self._held, ""
        return [Piece(bool(self._end), held)] if held else []


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of the text begin the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1)
                 if text.endswith(tag[:n])), 0)
