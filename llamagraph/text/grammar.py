"""What a generated text may look like, as rules of characters: the tree that gbnf.py reads.

A rule is a choice of sequences. Rules that would begin with themselves are refused here, because a
matcher (matcher.py) would never end. Does not know any notation, nor a model's tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..errors import LlamaGraphError

LAST = 0x10FFFF
MAX_DEPTH = 200  # of rules and parentheses that begin with one another
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Chars:
    """One character out of ranges of code points, both ends included, sorted and apart."""

    ranges: Ranges


@dataclass(frozen=True)
class TokenIs:
    """The token `id`, or with `negated` any other that does not end the text."""

    id: int
    negated: bool


@dataclass(frozen=True)
class Choice:
    """One of some sequences; an empty one matches nothing at all."""

    alternatives: tuple["Sequence", ...]


@dataclass(frozen=True)
class Repeat:
    """`low` to `high` times the body; None is without end."""

    body: "Element"
    low: int
    high: int | None


@dataclass(frozen=True)
class Use:
    """Another rule, by name; `where` is its place in the text, as "line:column"."""

    rule: str
    where: str


Element = Chars | TokenIs | Choice | Repeat | Use
Sequence = tuple[Element, ...]


@dataclass(frozen=True)
class Grammar:
    """Rules by name; `root` is the whole text. No rule begins with itself."""

    rules: Mapping[str, Choice]


def merged(ranges: list[tuple[int, int]], negated: bool = False) -> Ranges:
    """The ranges sorted and joined, or all code points but them."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(high, out[-1][1]))
        else:
            out.append((low, high))
    if not negated:
        return tuple(out)
    edges = [-1, *(edge for r in out for edge in r), LAST + 1]
    return tuple((a + 1, b - 1) for a, b in zip(edges[::2], edges[1::2], strict=True) if a + 1 < b)


def check_rules(rules: Mapping[str, Choice], source: str) -> None:
    """LlamaGraphError for a rule that is missing, or that begins with itself."""
    if "root" not in rules:
        raise LlamaGraphError(f"{source}: there is no rule root; begin with: root ::= ...")
    for choice in rules.values():
        for use in _uses(choice):
            if use.rule not in rules:
                raise LlamaGraphError(f"{source}:{use.where}: there is no rule {use.rule}; "
                                      f"define it, or put quotes around text")
    _LeftRecursion(rules, source).check()


def _uses(element: Element) -> Iterator[Use]:
    if isinstance(element, Use):
        yield element
    elif isinstance(element, Repeat):
        yield from _uses(element.body)
    elif isinstance(element, Choice):
        for sequence in element.alternatives:
            for part in sequence:
                yield from _uses(part)


class _LeftRecursion:
    """Finds rules that would have to match themselves before the first character."""

    def __init__(self, rules: Mapping[str, Choice], source: str):
        self.rules, self.source = rules, source
        self.empty: set[str] = set()  # rules that may match nothing at all
        self.done: dict[str, int] = {}  # rules that were visited, and how deep at most

    def check(self) -> None:
        size = -1
        while size < len(self.empty):
            size = len(self.empty)
            self.empty.update(name for name in self.rules if self.may_be_empty(self.rules[name]))
        for name in self.rules:
            self.visit(name, [], "", 0)

    def may_be_empty(self, element: Element) -> bool:
        if isinstance(element, Use):
            return element.rule in self.empty
        if isinstance(element, Repeat):
            return element.low == 0 or self.may_be_empty(element.body)
        return isinstance(element, Choice) and any(
            all(map(self.may_be_empty, sequence)) for sequence in element.alternatives)

    def visit(self, name: str, path: list[str], where: str, depth: int) -> None:
        if name in path:
            loop = " -> ".join([*path[path.index(name) :], name])
            raise LlamaGraphError(
                f"{self.source}:{where}: rule {name} begins with itself ({loop}), which never ends;"
                f" write a repetition instead, as in: item (\",\" item)*")
        if depth > MAX_DEPTH:
            raise LlamaGraphError(f"{self.source}:{where}: more than {MAX_DEPTH} rules and "
                                  f"parentheses begin with one another; put some of them together")
        if depth > self.done.get(name, -1):
            for use, inner in self.first_uses(self.rules[name], depth):
                self.visit(use.rule, [*path, name], use.where, inner)
            self.done[name] = depth

    def first_uses(self, element: Element, depth: int) -> Iterator[tuple[Use, int]]:
        """The rules that may come before the first character, and how deep they stand."""
        if isinstance(element, Use):
            yield element, depth
        elif isinstance(element, Repeat):
            yield from self.first_uses(element.body, depth)
        elif isinstance(element, Choice):
            for sequence in element.alternatives:
                for part in sequence:
                    yield from self.first_uses(part, depth + 1)
                    if not self.may_be_empty(part):
                        break
