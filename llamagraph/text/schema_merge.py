"""Combinations of JSON schemas as a list of flat ones: a value fits where it fits one of them.

`allOf` and what stands beside `$ref`, `anyOf` and `oneOf` is merged, keyword by keyword. Does not
know grammars (json_schema.py).
"""

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

Schema = dict[str, Any]
MAX_ALTERNATIVES = 256
COMBINERS = ("$ref", "allOf", "anyOf", "oneOf")
NOTHING = object()
REFUSED = {  # but for a value that says nothing
    "not": False, "uniqueItems": False, "minProperties": 0, "patternProperties": {},
    "propertyNames": {}, "dependentSchemas": {}, "dependentRequired": {}, "dependencies": {},
    **dict.fromkeys(("if", "maxProperties", "contains", "multipleOf", "$dynamicRef",
                     "$recursiveRef"), NOTHING),
}
OF_TYPE = {  # the keywords that say something of one type only
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}
COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
KEYWORDS = {"type", "enum", *itertools.chain(*OF_TYPE.values())}


class Resolver(Protocol):
    """Follows references and reports what is wrong."""

    def resolve(self, ref: Any, path: str) -> tuple[Any, str]: ...
    def fail(self, path: str, problem: str) -> NoReturn: ...


def just_ref(schema: Schema) -> bool:
    return "$ref" in schema


def flatten(schema: Any, path: str, resolver: Resolver, seen: tuple[str, ...] = ()) -> list[Schema]:
    """Schemas without combiners; a reference that stands alone stays, as {"$ref": ...}."""
    if isinstance(schema, bool):
        return [{}] if schema else []
    if not isinstance(schema, Mapping):
        resolver.fail(path, "a schema is an object, true or false")
    base, groups = _own(schema, path, resolver), []
    if "$ref" in schema:
        groups.append([{"$ref": schema["$ref"]}])
    for part in schema.get("allOf", []):
        groups.append(flatten(part, path, resolver, seen))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            groups.append([f for part in schema[key]
                           for f in flatten(part, path, resolver, seen)])
    if not groups:
        return [base]
    if not base and len(groups) == 1:
        return groups[0]
    solid = [_solid(group, path, resolver, seen) for group in groups]
    merged = [base]
    for group in solid:
        pairs = [_merge(a, b) for a in merged for b in group]
        merged = [m for m in pairs if m is not None]
        if len(merged) > MAX_ALTERNATIVES:
            resolver.fail(path, f"more than {MAX_ALTERNATIVES} combinations of anyOf and oneOf")
    return merged


def _solid(group: list[Schema], path: str, resolver: Resolver,
           seen: tuple[str, ...]) -> list[Schema]:
    """The same with references replaced by what they name."""
    out = []
    for schema in group:
        if not just_ref(schema):
            out.append(schema)
            continue
        target, where = resolver.resolve(schema["$ref"], path)
        if where in seen:
            resolver.fail(path, f"$ref {where} leads back to itself with nothing in between")
        inner = flatten(target, where, resolver, (*seen, where))
        out += _solid(inner, where, resolver, (*seen, where))
    return out


def _own(schema: Mapping[str, Any], path: str, resolver: Resolver) -> Schema:
    """The keywords that count, in the words of the 2020-12 draft; refuses what cannot be kept."""
    for key, harmless in REFUSED.items():
        if schema.get(key, harmless) != harmless:
            resolver.fail(path, f"{key} cannot be turned into a grammar; leave it away, and check "
                                f"the answer yourself")
    own = {key: value for key, value in schema.items() if key in KEYWORDS}
    if "const" in schema:
        own["enum"] = [v for v in schema.get("enum", [schema["const"]])
                       if _same(v, schema["const"])]
    if isinstance(own.get("items"), list):
        own["prefixItems"] = own.pop("items")
        if "additionalItems" in schema:
            own["items"] = schema["additionalItems"]
    for side in ("minimum", "maximum"):  # draft 4: true makes the other bound an open one
        exclusive = "exclusive" + side.capitalize()
        if isinstance(own.get(exclusive), bool) and own.pop(exclusive) and side in own:
            own[exclusive] = own.pop(side)
    _check(own, path, resolver)
    return own


def _check(own: Schema, path: str, resolver: Resolver) -> None:
    kinds: dict[str, tuple[type, ...]] = {
        "pattern": (str,), "format": (str,), "properties": (Mapping,), "required": (list,),
        "prefixItems": (list,), "enum": (list,), "type": (str, list),
        **dict.fromkeys(COUNTS, (int,)), **dict.fromkeys(OF_TYPE["number"], (int, float)),
    }
    for key, value in own.items():
        wrong = key in kinds and (not isinstance(value, kinds[key]) or isinstance(value, bool))
        if wrong or (key in COUNTS and value < 0):
            resolver.fail(path, f"{key} is {json.dumps(value)[:40]}, which it must not be")


def types_of(schema: Schema) -> list[str] | None:
    """The types that a value may have: what is said, or what the keywords speak of; None: all."""
    if "type" in schema:
        types = schema["type"]
        return [types] if isinstance(types, str) else types
    return [kind for kind, keys in OF_TYPE.items() if any(k in schema for k in keys)] or None


def fits(value: Any, schema: Schema) -> bool:
    """Whether a value of an enum fits the schema's type and bounds; inside it nobody looks."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
             dict: "object", type(None): "null"}
    kind, types = names[type(value)], schema.get("type", list(names.values()))
    whole = kind == "number" and value == int(value)
    if kind not in types and not (kind == "integer" and "number" in types) and not (
            whole and "integer" in types):
        return False
    if kind in ("integer", "number"):
        return (value >= schema.get("minimum", value) and value <= schema.get("maximum", value)
                and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
                and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"]))
    if kind in ("string", "array"):
        unit = "Length" if kind == "string" else "Items"
        n = len(value)
        return schema.get(f"min{unit}", 0) <= n <= schema.get(f"max{unit}", n) and (
            kind == "array" or _matches(value, schema.get("pattern", "")))
    return True


def _matches(text: str, pattern: str | tuple[str, ...]) -> bool:
    patterns = (pattern,) if isinstance(pattern, str) else pattern
    try:
        return all(re.search(p, text) for p in patterns)
    except re.error:  # JavaScript's, which Python reads otherwise
        return True


def _same(a: Any, b: Any) -> bool:
    """Equal as JSON: 1 is 1.0 but not true."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _merge(a: Schema, b: Schema) -> Schema | None:
    """What fits both; None where nothing can."""
    out = {**a, **b}
    for key in a.keys() & b.keys():
        x, y = a[key], b[key]
        if key == "type":
            out[key] = _both_types(types_of(a) or [], types_of(b) or [])
        elif key == "enum":
            out[key] = [v for v in x if any(_same(v, w) for w in y)]
        elif key.startswith(("min", "exclusiveMin")):
            out[key] = max(x, y)
        elif key.startswith(("max", "exclusiveMax")):
            out[key] = min(x, y)
        elif key == "required":
            out[key] = list(dict.fromkeys([*x, *y]))
        elif key in ("items", "additionalProperties"):
            out[key] = _all(x, y)
        elif key in ("pattern", "format") and x != y:
            out[key] = (x, y)  # refused where strings are written
    if "properties" in out:
        out["properties"] = _properties(a, b)
    if "prefixItems" in out:
        n = max(len(s.get("prefixItems", [])) for s in (a, b))
        out["prefixItems"] = [_all(_item(a, i), _item(b, i)) for i in range(n)]
    properties, others = out.get("properties", {}), out.get("additionalProperties")
    missing = any(properties.get(name, others) is False for name in out.get("required", []))
    return None if missing or [] in (out.get("type"), out.get("enum")) else out


def _both_types(a: list[str], b: list[str]) -> list[str]:
    both = [t for t in a if t in b]
    whole = "integer" in {*a, *b} and {"integer", "number"} & {*a} and {"integer", "number"} & {*b}
    return both + ["integer"] * (bool(whole) and not {"integer", "number"} & {*both})


def _all(x: Any, y: Any) -> Any:
    """Both of two schemas."""
    if x is True or x == y:
        return y
    return x if y is True else False if False in (x, y) else {"allOf": [x, y]}


def _properties(a: Schema, b: Schema) -> Schema:
    """Each property as both want it; what only one names is for the other an additional one."""
    names = [*a.get("properties", {}), *b.get("properties", {})]
    return {name: _all(*(s.get("properties", {}).get(name, s.get("additionalProperties", True))
                         for s in (a, b)))
            for name in dict.fromkeys(names)}


def _item(schema: Schema, i: int) -> Any:
    first = schema.get("prefixItems", [])
    return first[i] if i < len(first) else schema.get("items", True)
