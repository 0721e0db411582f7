"""JSON schemas as grammars: texts from random logits, checked by the jsonschema package."""

import datetime
import json
import random
import re
from decimal import Decimal

import jsonschema
import pytest
from stub_model import StubModel, allows, matcher

from llamagraph.errors import LlamaGraphError
from llamagraph.text.json_numbers import Decimals, integers
from llamagraph.text.json_schema import schema_to_gbnf

N = 200
OBJECT = {"type": "object"}
NODE = {"type": "object", "required": ["v", "next"], "properties": {
    "v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}

CASES = {
    "empty": {},
    "true": True,
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "array": {"type": "array"},
    "object": OBJECT,
    "types": {"type": ["string", "integer", "null"], "maxLength": 4, "minimum": 3},
    "enum": {"enum": ["red", 1, None, True, 2.5, [1, "x"], {"a": {}}, "日本\n\"\\"]},
    "enum and type": {"type": ["integer", "string"], "enum": ["red", 1, 7, None], "maximum": 5},
    "const": {"const": {"é": [None, 1.5]}},
    "minimum": {"type": "integer", "minimum": 37},
    "maximum": {"type": "integer", "maximum": -12},
    "integer range": {"type": "integer", "minimum": -15, "maximum": 1234},
    "exclusive": {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 111.5},
    "decimals": {"type": "number", "minimum": -0.25, "maximum": 10.75},
    "open decimals": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "one-sided decimals": {"type": "number", "exclusiveMaximum": 99.5},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "least length": {"type": "string", "minLength": 3},
    "pattern": {"type": "string", "pattern": r"^(\([0-9]{3}\) )?[0-9]{3}-[0-9]{4}$"},
    "search pattern": {"pattern": r"^a[^\"x]|[\d_]b$|日", "type": "string"},
    "lazy pattern": {"type": "string", "pattern": r"^(?:\w+?\s){1,2}([A-C\]\\-]*)\.\x41$"},
    "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "most items": {"items": {"enum": [1, 2]}, "maxItems": 2, "type": "array"},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "x"}]},
    "tuple and rest": {"type": "array", "prefixItems": [{"type": "null"}], "minItems": 3,
                       "items": {"type": "integer", "minimum": 0, "maximum": 9}},
    "old tuple": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array",
                  "items": [{"type": "null"}, {"type": "boolean"}], "additionalItems": False},
    "properties": {"type": "object", "properties": {
        "a": {"type": "integer"}, "b c": {"type": "string"}, "\"d\n": {"type": "null"}}},
    "required": {"type": "object", "required": ["b", "d"], "additionalProperties": False,
                 "properties": {k: {"type": "boolean"} for k in "abcde"}},
    "required alone": {"type": "object", "required": ["name", "true"]},
    "additional": {"type": "object", "properties": {"a": {"type": "null"}, "ab": {"const": 1}},
                   "additionalProperties": {"type": "boolean"}, "required": ["ab"]},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "anyOf": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "maximum": 0},
                        {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}]},
    "oneOf": {"oneOf": [{"type": "boolean"}, {"enum": ["x", "y"]}]},
    "allOf": {"allOf": [
        {"properties": {"a": {"type": "number", "minimum": 1}}, "required": ["a"]},
        {"properties": {"a": {"type": "integer", "maximum": 9}, "b": {"type": "null"}}},
        {"type": "object", "required": ["b"]}]},
    "allOf and anyOf": {"type": "object", "properties": {"x": {"type": "integer"}}, "anyOf": [
        {"required": ["x"]}, {"properties": {"y": {"type": "null"}}, "required": ["y"]}],
        "allOf": [{"properties": {"x": {"minimum": 5}}}]},
    "ref": {"definitions": {"a/b~": {"type": "string", "maxLength": 2}}, "type": "object",
            "properties": {"p": {"$ref": "#/definitions/a~1b~0"}}, "required": ["p"]},
    "recursive ref": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "ref to the root": {"type": "object", "required": ["children"], "properties": {
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}}},
    "ref and more": {"$defs": {"n": {"type": "integer", "minimum": 2}}, "maximum": 5,
                     "$ref": "#/$defs/n"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
}
TOWARD = {"search pattern": '"ab_', "lazy pattern": ' .A"'}

formats = jsonschema.FormatChecker()
for name, check in {"time": datetime.time, "date-time": datetime.datetime}.items():
    formats.checks(name, raises=ValueError)(check.fromisoformat)


@pytest.mark.parametrize("name", CASES)
def test_what_random_logits_write_fits_the_schema(name):
    schema = CASES[name]
    m, stub = matcher(schema_to_gbnf(schema)), StubModel(3, TOWARD.get(name, '"]}0'), "[{,")
    validator = jsonschema.validators.validator_for(schema)(schema, format_checker=formats)
    for text in {stub.generate(m) for _ in range(N)}:
        validator.validate(json.loads(text))


@pytest.mark.parametrize("schema, yes, no", [
    ({"type": "integer"}, ["0", "-7", "1234567890123456"], ["01", "-", "1.0", "true", '"1"', ""]),
    ({"type": "number"}, ["0", "-0.5", "1e5", "12.25E-3"], [".5", "1.", "+1", "0x1", "NaN"]),
    ({"type": "string"}, ['""', r'"\u00e9\n日"'], ['"\n"', r'"\ud800"', '"', "'a'"]),
    ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2000-02-29"', '"1999-12-31"'],
     ['"2023-02-29"', '"1900-02-29"', '"2024-04-31"', '"2024-13-01"', '"24-01-01"']),
    ({"type": "string", "format": "email"}, ['"anything"'], ["1"]),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]},
     ['{"b":1}', '{ "a": [1, {}] , "b": null }', '{\n  "a": 1,\n  "b": 2\n}'],
     ["{}", '{"a":1}', '{"b":1,"a":1}', '{"b":1,}', '{"b":1,"c":1}']),
    ({"properties": {"a": {}, "b": {}}}, ["{}", '{"a":1}', '{"b":1}', '{"a":1,"b":2}'],
     ['{,"b":1}', '{"c":1}', "[]"]),
    ({"properties": {"ab": {"type": "null"}}, "additionalProperties": True},
     ['{"ab":null}', '{"a":1}', '{"abc":1}', '{"":1, "日":2}', '{"ab":null,"x":1}'],
     ['{"ab":1}', '{"a":1,"ab":2}', '{"\\u0061b":1}']),
    ({"properties": {"a": False, "b": {}}}, ["{}", '{"b":1}'], ['{"a":1}']),
    ({"prefixItems": [{}, {}], "items": False}, ["[1,2]"], ["[]", "[1]", "[1,2,3]"]),
    ({"maxItems": 0, "items": {}}, ["[]", "[ ]"], ["[1]"]),
    ({"enum": [1, "1"]}, ["1", '"1"'], ["2", ""]),
    ({"pattern": "^a.b$"}, ['"axb"', r'"a\"b"', r'"a\\b"'], [r'"a\nb"', '"ab"', '"xaxb"']),
    ({"pattern": "b+"}, ['"abbc"', '"b"'], ['"ac"', '""']),
    ({"pattern": r"^(?<x>\u{1F408}|\D)$"}, ['"🐈"', '"a"'], ['"1"', '""']),
    ({"pattern": ""}, ['""', '"x"'], ["x"]),
    ({"exclusiveMinimum": True, "minimum": 3, "type": "integer"}, ["4"], ["3"]),
    ({"allOf": [{"type": ["integer", "string"]}, {"type": "number"}]}, ["3"], ["3.5", '"a"']),
    ({"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}, {"const": 3}]}, ["3"], ["2", "4"]),
    ({"allOf": [{"additionalProperties": False, "properties": {"a": {}}},
                {"properties": {"a": {"const": 1}, "b": {}}}]},
     ["{}", '{"a":1}'], ['{"b":1}', '{"a":2}']),
    ({"oneOf": [{"const": "a"}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"const": "b"}}},
     ['"a"', '"b"'], ['"c"']),
    ({"items": {"enum": ["a"]}, "minItems": 1}, ['["a"]', '["a", "a","a"]'], ["[]", '["b"]']),
])
def test_what_fits(schema, yes, no):
    m = matcher(schema_to_gbnf(json.dumps(schema)))
    assert [text for text in yes if not allows(m, text)] == []
    assert [text for text in no if allows(m, text)] == []


@pytest.mark.parametrize("schema, said", [
    ("{", "this is no JSON"),
    (False, "#: no value fits this"),
    ([], "#: a schema is an object, true or false"),
    ({"$ref": "https://example.com/s"}, "nothing is fetched; put it under $defs"),
    ({"$ref": "other.json#/a"}, "nothing is fetched"),
    ({"$ref": "#/$defs/x"}, "$ref #/$defs/x: there is no $defs in the schema"),
    ({"allOf": [{"$ref": "#"}, {"type": "null"}]}, "leads back to itself"),
    ({"type": "text"}, "type 'text' is unknown"),
    ({"not": {"type": "string"}}, "#: not cannot be turned into a grammar"),
    ({"not": {}}, "#: not cannot be turned into a grammar"),
    ({"properties": {"t": {"items": {}, "uniqueItems": True}}}, "#/properties/t: uniqueItems"),
    ({"type": "integer", "multipleOf": 5}, "multipleOf cannot"),
    ({"if": {}, "then": {}}, "if cannot"),
    ({"pattern": "(?=a)b"}, "character 1: only groups"),
    ({"pattern": r"^\bx$"}, r"character 2: \b cannot"),
    ({"pattern": "(a"}, "a parenthesis is never closed"),
    ({"pattern": "[a"}, "a bracket is never closed"),
    ({"pattern": "a)"}, "character 2: ) does not fit"),
    ({"pattern": "[b-a]"}, "no range of characters"),
    ({"pattern": "*"}, "nothing stands before *"),
    ({"pattern": "x", "maxLength": 3}, "only one of pattern, format and length"),
    ({"minLength": -1}, "minLength is -1"),
    ({"minLength": "1"}, 'minLength is "1"'),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "no value fits these bounds"),
    ({"type": "number", "exclusiveMinimum": 5, "maximum": 5}, "no value fits these bounds"),
    ({"type": "string", "minLength": 5, "maxLength": 4}, "no value fits these bounds"),
    ({"items": {}, "minItems": 5, "maxItems": 4}, "no value fits these bounds"),
    ({"enum": [1], "type": "string"}, "no value of enum or const fits"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "contradict each other"),
    ({"required": ["a"], "additionalProperties": False}, "no value fits this"),
])
def test_what_cannot_be_done_is_one_line(schema, said):
    with pytest.raises(LlamaGraphError) as caught:
        schema_to_gbnf(schema, "s.json")
    assert said in str(caught.value) and str(caught.value).startswith("s.json: ")
    assert "\n" not in str(caught.value)


def expression(alternatives):
    """Digits, classes, groups and counts of GBNF as a regular expression."""
    text = " | ".join(alternatives).replace(" ", "")
    return re.compile(re.sub(r'"([^"]*)"', lambda m: f"(?:{re.escape(m[1])})", text))


def test_integers_are_exactly_those_between():
    rng = random.Random(4)
    for _ in range(400):
        bounds = [rng.randint(-(10 ** rng.randint(0, 6)), 10 ** rng.randint(0, 6)) for _ in "ab"]
        low, high = [rng.choice([b, b, None]) for b in bounds]
        parts = integers(low, high)
        near = [b + d for b in (*bounds, 0, 10, 100) for d in (-1, 0, 1)]
        for n in [*near, *(rng.randint(-(10**6), 10**6) for _ in range(10))]:
            fits = (low is None or n >= low) and (high is None or n <= high)
            assert fits == bool(parts and expression(parts).fullmatch(str(n))), (low, high, n)


def test_decimals_are_exactly_those_between():
    rng = random.Random(5)
    for _ in range(400):
        bounds = [Decimal(rng.randint(-(10**5), 10**5)).scaleb(-rng.randint(0, 5)) for _ in "ab"]
        low, high = [rng.choice([b, b, None]) for b in bounds]
        opened = rng.random() < 0.5, rng.random() < 0.5
        parts = Decimals(low, high, *opened).alternatives()
        near = [b + d * Decimal(1).scaleb(-k) for b in bounds for d in (-1, 0, 1) for k in range(4)]
        for n in near:
            fits = (low is None or n > low or (n == low and not opened[0])) and (
                high is None or n < high or (n == high and not opened[1]))
            for text in (f"{n:f}", f"{n:f}" + ("0" if "." in f"{n:f}" else ".0")):
                found = bool(parts and expression(parts).fullmatch(text))
                assert fits == found, (low, high, opened, text)
