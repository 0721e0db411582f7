"""Numbers on the command line, and lists and ranges as llama-bench has them. Knows no command."""

import re
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import click

MOST_VALUES = 1000  # of one option


class Number(click.FloatRange):
    """A number in a range; unlike click's, never NaN or infinite."""

    def convert(self, value: Any, param: Any, context: Any) -> Any:
        number = super().convert(value, param, context)
        if not isfinite(number):
            self.fail(f"{value!r} is no finite number", param, context)
        return number


def read_numbers(texts: Sequence[str], least: int = 0) -> list[int]:
    """Numbers, lists and ranges: 512, 1,2,4, 0-8192+4096 (steps of 4096), 1-8*2 (doubling)."""
    values: list[int] = []
    for text in read_words(texts):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?:([+*])(\d{1,9}))?)?", text)
        if match is None:
            raise click.BadParameter(f"{text!r} is not N, FIRST-LAST, FIRST-LAST+STEP or "
                                     f"FIRST-LAST*FACTOR")
        values += _range(text, int(match[1]), int(match[2] or match[1]), match[3], match[4])
    if values and min(values) < least:
        raise click.BadParameter(f"{min(values)} is too small, {least} is the least")
    return values


def _range(text: str, first: int, last: int, sign: str | None, number: str | None) -> list[int]:
    step = int(number or 1)
    if first > last or (sign == "*" and (step < 2 or first == 0)) or step == 0:
        raise click.BadParameter(f"the range {text!r} does not reach its end")
    values = [first]
    while (following := values[-1] * step if sign == "*" else values[-1] + step) <= last:
        values.append(following)
        if len(values) > MOST_VALUES:
            raise click.BadParameter(f"{text!r} has over {MOST_VALUES} values; take larger steps")
    return values


def read_pairs(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Two numbers each: 512,128."""
    pairs = []
    for text in texts:
        match = re.fullmatch(r"(\d{1,9}),(\d{1,9})", text)
        if match is None:
            raise click.BadParameter(f"{text!r} is not PROMPT,GENERATED as in 512,128")
        pairs.append((int(match[1]), int(match[2])))
    return pairs


def read_words(texts: Sequence[str], known: Sequence[str] = ()) -> list[str]:
    """The words of comma lists; where some are known, no others."""
    words = [word for text in texts for word in text.split(",")]
    if known and (wrong := [w for w in words if w not in known]):
        raise click.BadParameter(f"{wrong[0]!r} is none of {', '.join(known)}")
    return words


def numbers_option(*names: str, help: str, least: int = 0) -> Callable:
    """An option that takes numbers, lists and ranges, several times."""
    return click.option(*names, multiple=True, metavar="N,...", help=help,
                        callback=lambda *a: read_numbers(a[2], least))


def words_option(*names: str, help: str, metavar: str, known: Sequence[str] = ()) -> Callable:
    """An option that takes lists of words, several times."""
    return click.option(*names, multiple=True, metavar=metavar, help=help,
                        callback=lambda *a: read_words(a[2], known))
