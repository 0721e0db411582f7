"""JSON schemas as GBNF: the answer is then JSON that fits the schema.

A schema is first brought into a list of flat ones (schema_merge.py), then each becomes a rule.
Objects have their properties in the schema's order, and no others unless `additionalProperties`
allows them, as in llama.cpp. What no grammar can promise (`not`, `if`, `uniqueItems`, ...) is
refused; `oneOf` is taken as `anyOf`, and formats other than date, time, date-time and uuid say
nothing. Does not know models.
"""

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NoReturn
from urllib.parse import unquote

from ..errors import LlamaGraphError
from .json_numbers import Decimals, integers
from .json_pattern import gbnf_class, gbnf_literal, pattern_to_gbnf
from .schema_merge import Schema, fits, flatten, just_ref, types_of

_TWO = "[0-5] [0-9]"
BUILTIN = {
    "space": r'| " " | "\n" [ \t]{0,20}',
    "value": "object | array | string | number | boolean | null",
    "object": '"{" space (pair ("," space pair)*)? "}"',
    "pair": 'string space ":" space value space',
    "array": '"[" space (value space ("," space value space)*)? "]"',
    "string": r'"\"" char* "\""',
    "char": r'[^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" unit)',
    "unit": "[0-9a-cA-Ce-fE-F] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2}",
    "plain": r'[^"\\\x00-\x1F]',
    "number": 'integer ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?',
    "integer": '"-"? ("0" | [1-9] [0-9]{0,15})',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "date": '[1-9] [0-9]{3} "-" (("0" [13578] | "1" [02]) "-" ("0" [1-9] | [12] [0-9] | "3" [01])'
            ' | ("0" [469] | "11") "-" ("0" [1-9] | [12] [0-9] | "30")'
            ' | "02-" ("0" [1-9] | "1" [0-9] | "2" [0-8])) | leap "-02-29"',
    "leap": '[1-9] [0-9] ("0" [48] | [2468] [048] | [13579] [26])'
            ' | ([2468] [048] | [13579] [26]) "00"',
    "time": f'hour ":" {_TWO} ":" {_TWO} ("." [0-9]{{3}})? ("Z" | [+-] hour ":" {_TWO})',
    "hour": '[01] [0-9] | "2" [0-3]',
    "date-time": 'date "T" time',
    "uuid": '[0-9a-fA-F]{8} ("-" [0-9a-fA-F]{4}){3} "-" [0-9a-fA-F]{12}',
}
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
FORMATS = ("date", "time", "date-time", "uuid")


def schema_to_gbnf(schema: Any, source: str = "JSON schema") -> str:
    """The grammar of a schema, which is a text or its data; {} is any object, as in llama.cpp.

    Raises LlamaGraphError with source, the place in the schema and the fix.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise LlamaGraphError(f"{source}: this is no JSON: {error}") from None
    return _Converter({"type": "object"} if schema == {} else schema, source).grammar()


class _Converter:
    """Collects rules; a method gives an expression for the part of the schema at `path`."""

    def __init__(self, schema: Any, source: str):
        self.schema, self.source = schema, source
        self.rules: dict[str, str] = {"root": ""}
        self.refs = {"#": "root"}

    def fail(self, path: str, problem: str) -> NoReturn:
        raise LlamaGraphError(f"{self.source}: {path}: {problem}")

    def grammar(self) -> str:
        try:
            self.rules["root"] = self.value(self.schema, "#", "root")
        except RecursionError:
            self.fail("#", "the schema is nested too deep")
        self._add_builtins(self.rules["root"])
        return "".join(f"{name} ::= {body}\n" for name, body in self.rules.items())

    def _add_builtins(self, body: str) -> None:
        """The built-in rules that the text of all others names."""
        todo = list(self.rules.values())
        while todo:
            outside = re.sub(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]', " ", todo.pop())
            for name in re.findall(r"[A-Za-z0-9-]+", outside):
                if name in BUILTIN and name not in self.rules:
                    self.rules[name] = BUILTIN[name]
                    todo.append(BUILTIN[name])

    def rule(self, name: str, body: str) -> str:
        """A new rule, under a name that is free."""
        name = base = re.sub(r"[^A-Za-z0-9]+", "-", name)
        n = 2
        while name in self.rules or name in BUILTIN:
            name, n = f"{base}-{n}", n + 1
        self.rules[name] = body
        return name

    def value(self, schema: Any, path: str, name: str) -> str:
        """An expression for the values that fit; no space around them."""
        parts = [self.flat(flat, path, name + f"-{i}" * (i > 0))
                 for i, flat in enumerate(flatten(schema, path, self))]
        if not parts:
            self.fail(path, "no value fits this; its parts contradict each other")
        return " | ".join(dict.fromkeys(parts))

    def single(self, schema: Any, path: str, name: str) -> str:
        """The same as one word: the name of a rule."""
        body = self.value(schema, path, name)
        return body if body in BUILTIN or body in self.rules else self.rule(name, body)

    def resolve(self, ref: Any, path: str) -> tuple[Any, str]:
        """The schema that a $ref names, and its path."""
        if not isinstance(ref, str) or not re.match("#(/|$)", ref):
            self.fail(path, f"$ref {ref!r}: nothing is fetched; put it under $defs and write "
                            f"#/$defs/...")
        found = self.schema
        for part in unquote(ref).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                self.fail(path, f"$ref {ref}: there is no {key} in the schema")
        return found, unquote(ref)

    def _ref(self, ref: str, path: str) -> str:
        schema, target = self.resolve(ref, path)
        if target not in self.refs:
            self.refs[target] = self.rule("ref" + target.removeprefix("#"), "")
            self.rules[self.refs[target]] = self.value(schema, target, self.refs[target])
        return self.refs[target]

    def flat(self, s: Schema, path: str, name: str) -> str:
        """An expression for a schema without combinations."""
        if just_ref(s):
            return self._ref(s["$ref"], path)
        if "enum" in s:
            texts = [_json(v) for v in s["enum"] if fits(v, s)]
            if not texts:
                self.fail(path, "no value of enum or const fits the rest of the schema")
            return " | ".join(map(gbnf_literal, texts))
        types = types_of(s)
        if types is None:
            return "value"
        parts = []
        for kind in types:
            if kind not in TYPES:
                self.fail(path, f"type {kind!r} is unknown; there are {', '.join(TYPES)}")
            make = getattr(self, f"_{kind}", lambda *_, kind=kind: kind)
            part = make(s, path, name + f"-{kind}" * (len(types) > 1))
            parts += [part] if part else []
        if not parts:
            self.fail(path, "no value fits these bounds")
        return " | ".join(parts)

    def _string(self, s: Schema, path: str, name: str) -> str:
        low, high = s.get("minLength", 0), s.get("maxLength")
        limited = bool(low) or high is not None
        if high is not None and low > high:
            return ""
        known = s.get("format") if s.get("format") in FORMATS else None
        two = any(isinstance(s.get(key), tuple) for key in ("pattern", "format"))
        if two or limited + (known is not None) + ("pattern" in s) > 1:
            self.fail(path, "only one of pattern, format and length can be kept; put the length "
                            "into the pattern")
        if "pattern" in s:
            body = pattern_to_gbnf(s["pattern"], lambda problem: self.fail(path, problem))
            return rf'"\"" ({body}) "\""'
        if known:
            return rf'"\"" {known} "\""'
        return rf'"\"" char{_times(low, high)} "\""' if limited else "string"

    def _integer(self, s: Schema, path: str, name: str) -> str:
        d = _bounds(s)
        if d.low is None and d.high is None:
            return "integer"
        low = None if d.low is None else int(d.low.to_integral_value("ROUND_CEILING"))
        high = None if d.high is None else int(d.high.to_integral_value("ROUND_FLOOR"))
        low = None if low is None else low + (d.low_open and low == d.low)
        high = None if high is None else high - (d.high_open and high == d.high)
        return " | ".join(integers(low, high))

    def _number(self, s: Schema, path: str, name: str) -> str:
        bounds = _bounds(s)
        free = bounds.low is None and bounds.high is None
        return "number" if free else " | ".join(bounds.alternatives())

    def _array(self, s: Schema, path: str, name: str) -> str:
        low, high = s.get("minItems", 0), s.get("maxItems")
        first, others = s.get("prefixItems", []), s.get("items", True)
        if high is not None and low > high:
            return ""
        if not first and others is True and not low and high is None:
            return "array"
        n = len(first) if high is None else min(len(first), high)
        parts = [self.single(f, f"{path}/prefixItems/{i}", f"{name}-{i}") + " space"
                 for i, f in enumerate(first[:n])]
        if first and "items" not in s:  # a tuple has its own items, and others only where it must
            high = max(n, low) if high is None else min(high, max(n, low))
        if others is not False and (high is None or high > n):
            item = self.single(others, f"{path}/items", f"{name}-item") + " space"
            least, most = max(low - n, 0), None if high is None else high - n
            if parts:
                parts.append(f'("," space {item}){_times(least, most)}')
                return '"[" space ' + ' "," space '.join(parts[:-1]) + f' {parts[-1]} "]"'
            more = f'("," space {item}){_times(max(least - 1, 0), most and most - 1)}'
            return f'"[" space ({item} {more})' + "?" * (least == 0) + ' "]"'
        return '"[" space ' + ' "," space '.join(parts) + ' "]"' if low <= n else ""

    def _object(self, s: Schema, path: str, name: str) -> str:
        properties, required = dict(s.get("properties", {})), s.get("required", [])
        open_by_default = not properties
        additional = s.get("additionalProperties", open_by_default)
        for key in required:
            missing = additional if "additionalProperties" in s else True
            properties.setdefault(key, missing)
        if not properties and additional is True:
            return "object"
        members = []
        for key, schema in properties.items():
            if schema is False and key not in required:
                continue
            where = f"{path}/properties/{key}"
            value = self.single(schema, where, f"{name}-{key}")
            pair = f'{gbnf_literal(_json(key))} space ":" space {value} space'
            members.append((self.rule(f"{name}-{key}-pair", pair), key in required))
        more = None
        if additional is not False:
            value = self.single(additional, f"{path}/additionalProperties", f"{name}-other")
            key = _other_keys(list(properties)) if properties else "string"
            more = self.rule(f"{name}-other-pair", f'({key}) space ":" space {value} space')
        return f'"{{" space {_members(members, more)} "}}"'


def _members(members: list[tuple[str, bool]], more: str | None) -> str:
    """The pairs of an object with commas between those that are there. (rule, required) each."""
    many = f'("," space {more})*' if more else ""
    first = next((i for i, (_, required) in enumerate(members) if required), None)

    def rest(start: int) -> list[str]:
        return [f'"," space {rule}' if required else f'("," space {rule})?'
                for rule, required in members[start:]] + [many] * bool(many)

    if first is not None:
        before = [f'({rule} "," space)?' for rule, _ in members[:first]]
        return " ".join([*before, members[first][0], *rest(first + 1)])
    starts = [" ".join([rule, *rest(i + 1)]) for i, (rule, _) in enumerate(members)]
    starts += [f"{more} {many}"] if more else []
    return f"({' | '.join(starts)})?" if starts else ""


def _other_keys(names: list[str]) -> str:
    """A string that is none of the names; without escapes, which could spell one of them."""
    following: dict[str, set[str]] = {}
    for name in names:
        for i, c in enumerate(name):
            following.setdefault(name[:i], set()).add(c)
        following.setdefault(name, set())
    parts = []
    for start, chars in following.items():
        not_these = sorted({*chars, '"', "\\"})
        outside = gbnf_class(tuple((ord(c), ord(c)) for c in not_these)).removeprefix("[")
        text = gbnf_literal(_json(start)[1:-1])
        parts.append(rf"{text} [^\x00-\x1F{outside} plain*")
        parts += [] if start in names else [text]
    return rf'"\"" ({" | ".join(parts)}) "\""'


def _bounds(s: Schema) -> Decimals:
    """The tighter ones of the bounds of both kinds."""
    low, low_open = _tighter(s.get("minimum"), s.get("exclusiveMinimum"), max)
    high, high_open = _tighter(s.get("maximum"), s.get("exclusiveMaximum"), min)
    return Decimals(low, high, low_open, high_open)


def _tighter(closed: Any, opened: Any, pick: Any) -> tuple[Decimal | None, bool]:
    if opened is None:
        return (None if closed is None else Decimal(repr(closed))), False
    is_open = closed is None or pick(closed, opened) == opened
    return Decimal(repr(opened if is_open else closed)), is_open


def _times(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


def _json(value: Any) -> str:
    """As JSON; with escapes where there are halves of surrogate pairs."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)
