"""The Jinja that chat templates run in: as transformers sets it up, but for templates of strangers.

jinja2's immutable sandbox keeps a template from files, hidden attributes and changing what it was
given. This adds a budget of time and of text and list items made: every turn of a loop, call,
filter, operator and written value is charged to it, and an operation whose operands are too large
is refused before it starts. That stops templates that run or grow without end, by mistake or on
purpose; it is not proof against every trick. Does not know messages or models.
"""

import json
import re
import time
from collections.abc import Callable, Sized
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 1.0  # of the thread's own time, a rendering
MAX_MADE = 1 << 24  # characters and list items, besides 64 times what the caller passed in
MAX_PRODUCT = 1 << 28  # size of an operation's subject times that of its largest argument
MAX_NUMBER = 10_000  # as an argument: a width, a count, a precision
MAX_FACTOR = 1 << 64  # of a product of numbers
MAX_EXPONENT = 64

# Formats whose result may be far longer than what they are given.
_WIDE_FORMAT = re.compile(r"\*|\d{5}|\{[^{}]*\{")

# Filters that look at a list's items, not at the text of the whole list.
_ON_ITEMS = frozenset(
    ("length", "count", "first", "last", "list", "map", "select", "reject", "selectattr", "items")
    + ("rejectattr", "dictsort", "sort", "unique", "groupby", "batch", "slice", "sum", "min", "max")
    + ("reverse", "default", "d", "random", "attr")
)


class TooMuch(TemplateError):
    """A template went past a bound."""


class Refused(TemplateError):
    """A template called `raise_exception`: it does not take these messages."""


class _Meter(NodeTransformer):
    """Puts a charge at the start of every loop body and macro, and on `~` and comparisons."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_call("charge", [nodes.Const(1 + written)])))
        return node

    visit_Macro = visit_CallBlock = visit_For

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("join_texts", node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        sides: list[Any] = [node, *node.ops]
        for side in sides:
            if not isinstance(side.expr, nodes.Const):
                side.expr = _call("compared", [side.expr])
        return node


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its body."""

    tags = frozenset(("generation",))  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """One environment, one rendering at a time: `start` gives it a new budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=self._written,
        )
        self.start(None)
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise_exception, strftime_now=strftime_now)
        self.filters["tojson"] = _tojson
        self.filters = {name: self._metered(name, call) for name, call in self.filters.items()}

    def start(self, given: Any) -> None:
        """Begins a rendering of what the caller gives, which enlarges the budget."""
        self._left, self._deadline = float("inf"), float("inf")
        size = self._charge_text(given)
        self._left, self._deadline = MAX_MADE + 64 * size, time.thread_time() + MAX_SECONDS

    def charge(self, amount: int) -> None:
        """Takes `amount` characters or items from the budget. Raises TooMuch."""
        self._left -= amount
        if self._left < 0:
            raise TooMuch("it makes too much text")
        if time.thread_time() > self._deadline:
            raise TooMuch(f"it runs for more than {MAX_SECONDS:g} s")

    def join_texts(self, *parts: Any) -> str:
        """The `~` operator."""
        return self._written("".join(map(str, map(self._written, parts))))

    def compared(self, value: Any) -> Any:
        """One side of a comparison; lists within lists can take for ever."""
        if isinstance(value, list | tuple | dict):
            self._charge_text(value)
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`+`, `*`, `**` and `%`."""
        if operator == "%" and isinstance(left, str):
            self._weigh_format(left, right)
        if operator == "**":
            _check_number(right, MAX_EXPONENT)
        if operator in ("*", "**"):
            _check_number(left, MAX_FACTOR)
            _check_number(right, MAX_FACTOR)
            if isinstance(left, Sized) or isinstance(right, Sized):
                _check_product(_factor(left), _factor(right))
        return self._made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Functions, macros and methods; those of texts and numbers are weighed."""
        owner = getattr(called, "__self__", None)
        if owner is self:  # a call that _Meter has put there
            return called(*args)
        if isinstance(owner, str | bytes | int):
            self._weigh(owner, args, kwargs, makes_text=True)
        return self._made(super().call(context, called, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`text.format`, which jinja2 replaces by a safe one, weighed too."""
        if (wrapper := super().wrap_str_format(value)) is None:
            return None

        @wraps(wrapper)
        def weighed(*args: Any, **kwargs: Any) -> str:
            self._weigh_format(value.__self__, (*args, *kwargs.values()))
            return wrapper(*args, **kwargs)

        return weighed

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Meter().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            subject, *arguments = args[skip:]
            if name == "format":
                self._weigh_format(str(subject), (*arguments, *kwargs.values()))
            else:
                self._weigh(subject, tuple(arguments), kwargs, makes_text=name not in _ON_ITEMS)
            return self._made(function(*args, **kwargs))

        return metered

    def _weigh(
        self, subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any], makes_text: bool
    ) -> None:
        """Refuses what could make very much in one go, such as text.center(10**9)."""
        size = self._charge_text(subject) if makes_text else _size(subject)
        for value in (*args, *kwargs.values()):
            _check_number(value, MAX_NUMBER)
            is_number = isinstance(value, int) or not makes_text
            _check_product(size, _factor(value) if is_number else self._charge_text(value))

    def _weigh_format(self, form: str, values: Any) -> None:
        if _WIDE_FORMAT.search(form) or len(form) * self._charge_text(values) > MAX_PRODUCT:
            raise TooMuch("one of its formats makes too much text")

    def _charge_text(self, value: Any) -> int:
        """Charges about the length of the value's text, lists within lists counted each time."""
        if not isinstance(value, list | tuple | dict):
            return self._charged(value)
        items = (*value, *value.values()) if isinstance(value, dict) else value
        return self._charged(value) + sum(map(self._charge_text, items))

    def _charged(self, value: Any) -> int:
        size = _size(value)
        self.charge(size)
        return size

    def _made(self, value: Any) -> Any:
        self._charged(value)
        return value

    def _written(self, value: Any) -> Any:
        self._charge_text(value)
        return value


def _size(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 1


def _check_number(value: Any, limit: int) -> None:
    if isinstance(value, int) and abs(value) > limit:
        raise TooMuch("it computes with a number that is too large")


def _factor(value: Any) -> int:
    return abs(value) if isinstance(value, int) else _size(value)


def _check_product(left: int, right: int) -> None:
    if left * right > MAX_PRODUCT:
        raise TooMuch("one of its operations makes too much text")


def _raise_exception(message: Any) -> None:
    raise Refused(message if isinstance(message, str) else "it refuses the messages")


def strftime_now(form: str) -> str:
    """Today's date, or the time, in the given form."""
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
