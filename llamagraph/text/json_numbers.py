"""Numbers within bounds, written as GBNF: digit by digit, so that exactly these fit.

Integers have at most 16 digits. Decimals have 15, so that a reader's doubles keep them apart and
on the right side of a bound. Does not know schemas.
"""

from decimal import Decimal

MAX_DIGITS = 16
PRECISION = 15  # decimal digits that a double keeps
Tails = tuple[bool, list[str]]  # whether no digit at all will do, and what others there are


def _digits(low: int, high: int | None = None) -> str:
    high = low if high is None else high
    if high <= 1:
        return ("", " [0-9]" + "?" * (low < 1))[max(high, 0)]
    return f" [0-9]{{{low}}}" if low == high else f" [0-9]{{{low},{high}}}"


def _text(digits: str) -> str:
    return f'"{digits}" ' if digits else ""


def _range(low: str | int, high: str | int) -> str:
    return f"[{low}-{high}]" if str(low) != str(high) else f'"{low}"'


def _same_length(low: str, high: str) -> list[str]:
    """Digit strings from low to high, both of the same length."""
    rest = len(low) - 1
    if not rest:
        return [_range(low, high)]
    if low[0] == high[0]:
        return [f'"{low[0]}" ({" | ".join(_same_length(low[1:], high[1:]))})']
    first, last, parts = int(low[0]), int(high[0]), []
    if low[1:] != "0" * rest:
        parts.append(f'"{low[0]}" ({" | ".join(_same_length(low[1:], "9" * rest))})')
        first += 1
    if high[1:] != "9" * rest:
        parts.append(f'"{high[0]}" ({" | ".join(_same_length("0" * rest, high[1:]))})')
        last -= 1
    return parts + ([_range(first, last) + _digits(rest)] if first <= last else [])


def naturals(low: int, high: int | None) -> list[str]:
    """Whole numbers from low >= 0 to high (None: MAX_DIGITS digits), as alternatives."""
    high = 10**MAX_DIGITS - 1 if high is None else min(high, 10**MAX_DIGITS - 1)
    parts: list[str] = []
    while low <= high:
        top = min(high, 10 ** len(str(low)) - 1)
        if top == high or low != 10 ** (len(str(low)) - 1):
            parts += _same_length(str(low), str(top))
        else:  # all numbers of some lengths at once
            shortest, longest = len(str(low)), len(str(high + 1)) - 1
            top = 10**longest - 1
            parts.append("[1-9]" + _digits(shortest - 1, longest - 1))
        low = top + 1
    return parts


def integers(low: int | None, high: int | None) -> list[str]:
    """Whole numbers from low to high (None: no bound), as alternatives; [] where there is none."""
    parts = []
    if high is None or high >= 0:
        parts = naturals(max(low or 0, 0), high)
    if low is None or low < 0:
        below = naturals(1 if high is None else max(1, -high), None if low is None else -low)
        parts += [f'"-" ({" | ".join(below)})'] if below else []
    return parts


class Decimals:
    """Decimals from low to high (None: no bound); `open` ones leave the bound itself out."""

    def __init__(self, low: Decimal | None, high: Decimal | None, low_open: bool = False,
                 high_open: bool = False):
        self.low, self.high, self.low_open, self.high_open = low, high, low_open, high_open

    def alternatives(self) -> list[str]:
        """As GBNF; [] where there is no such number."""
        zero, parts = Decimal(0), []
        if self.high is None or self.high >= 0:
            from_zero = self.low is None or self.low < 0
            parts = self._positive(zero if from_zero or self.low is None else self.low,
                                   self.low_open and not from_zero, self.high, self.high_open)
        if self.low is None or self.low < 0:
            to_zero = self.high is None or self.high > 0
            below = self._positive(
                zero if to_zero or self.high is None else -self.high,
                self.high_open and not to_zero,
                None if self.low is None else -self.low, self.low_open)
            parts += [f'"-" ({" | ".join(below)})'] if below else []
        return parts

    def _positive(self, low: Decimal, low_open: bool, high: Decimal | None,
                  high_open: bool) -> list[str]:
        first, above = _split(low)
        self.n = max(PRECISION - len(str(first if high is None else int(high))), 1)
        if high is None:
            return [*self._number(first, self._at_least(above, low_open)),
                    *self._whole(first + 1, None)]
        last, below = _split(high)
        if high < low or (high == low and (low_open or high_open)):
            return []
        if first == last:
            return self._number(first, self._between(above, low_open, below, high_open))
        return [*self._number(first, self._at_least(above, low_open)),
                *self._whole(first + 1, last - 1),
                *self._number(last, self._at_most(below, high_open))]

    def _whole(self, low: int, high: int | None) -> list[str]:
        """All that begin with a whole number from low to high."""
        parts = naturals(low, high)
        return [f'({" | ".join(parts)}) ("." {self._any(1)})?'] if parts else []

    def _number(self, whole: int, tails: Tails) -> list[str]:
        empty, some = tails
        if not some:
            return [f'"{whole}"'] if empty else []
        return [f'"{whole}" ("." ({" | ".join(some)}))' + "?" * empty]

    def _any(self, at_least: int, used: int = 0) -> str:
        return _digits(at_least, max(self.n - used, at_least)).strip()

    def _zeros(self, at_least: int, used: int) -> str:
        return f'"0"{{{at_least},{max(self.n - used, at_least)}}}'

    def _at_least(self, d: str, is_open: bool, before: str = "") -> Tails:
        """Digits behind the point, after `before`, that are worth d or more (more where open)."""
        used, first = len(before + d), len(before) + 1
        parts = [f'{_text(before + d[:i])}{_range(int(c) + 1, 9)} {self._any(0, first + i)}'
                 for i, c in enumerate(d) if c != "9"]
        if is_open:
            n = max(self.n - used - 1, 0)  # half of them for zeros
            parts.append(f'{_text(before + d)}"0"{{0,{n // 2}}} [1-9] [0-9]{{0,{n - n // 2}}}')
            return False, parts
        parts.append(f'{_text(before + d)}{self._any(int(not used), used)}')
        return not used, parts

    def _at_most(self, d: str, is_open: bool, before: str = "") -> Tails:
        used, first = len(before + d), len(before) + 1
        parts = [f'{_text(before + d[:i])}{_range(0, int(c) - 1)} {self._any(0, first + i)}'
                 for i, c in enumerate(d) if c != "0"]
        parts += [f'"{before}{d[:i]}"' for i in range(len(d)) if before or i]
        if not is_open:
            parts.append(f'{_text(before + d)}{self._zeros(int(not used), used)}')
        return not before and bool(d or not is_open), parts

    def _between(self, low: str, low_open: bool, high: str, high_open: bool) -> Tails:
        as_low = f'{_text(low)}{self._zeros(int(not low), len(low))}'
        if low == high:
            return not low, [as_low]
        n = max(len(low), len(high))
        a, b = low.ljust(n, "0"), high.ljust(n, "0")
        i = next(i for i in range(n) if a[i] != b[i])
        parts = [*self._at_least(low[i + 1 :], low_open, a[: i + 1])[1],
                 *self._at_most(high[i + 1 :], high_open, b[: i + 1])[1]]
        if int(a[i]) + 1 < int(b[i]):
            middle = _range(int(a[i]) + 1, int(b[i]) - 1)
            parts.append(f'{_text(a[:i])}{middle} {self._any(0, i + 1)}')
        if not low_open and len(low) <= i:
            parts.append(as_low)
        return not low and not low_open, parts


def _split(value: Decimal) -> tuple[int, str]:
    """The whole part of a number >= 0, and the digits behind its point without last zeros."""
    whole, _, digits = f"{value:f}".partition(".")
    return int(whole), digits.rstrip("0")
