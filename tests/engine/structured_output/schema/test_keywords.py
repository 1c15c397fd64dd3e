"""Each JSON Schema keyword is enforced as docs/guide/structured-output.md lists."""

from __future__ import annotations

import json
import re
import tracemalloc
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.byte_tokenizer import byte_tokenizer
from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError
from twostroke.engine.structured_output.grammar import Grammars
from twostroke.engine.structured_output.schema.formats import FORMATS
from twostroke.engine.structured_output.schema.prepare import prepare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.model.tokenizer import Tokenizer

PAGE = Path(__file__).parents[4] / "docs" / "guide" / "structured-output.md"
P = {"type": "integer"}
N = {"type": "number"}
S = {"type": "string"}
OBJECT = {"type": "object"}
ARRAY = {"type": "array"}
AB = {**OBJECT, "properties": {"a": P, "b": S}}
MANY_AB = {**OBJECT, "properties": {f"m{i}": P for i in range(10)}, "additionalProperties": False}
ALL_AB = {f"m{i}": 1 for i in range(10)}
OLD = "http://json-schema.org/draft-07/schema#"
TREE = {
    "$id": "http://x/tree",
    "$dynamicAnchor": "node",
    "type": "object",
    "properties": {"next": {"$dynamicRef": "#node"}},
}
CONDITION = {
    "type": "object",
    "properties": {"k": {"enum": ["x", "y"]}, "a": P},
    "if": {"properties": {"k": {"const": "x"}}, "required": ["k"]},
    "then": {"required": ["a"]},
    "else": {"properties": {"a": False}},
}
# Keyword, schema, values that it allows, values that it does not.
ENFORCED: list[tuple[str, dict[str, Any], list[Any], list[Any]]] = [
    ("type", {"type": ["string", "null"]}, ["a", None], [1, {}, [], True]),
    ("enum", {"enum": [1, "a", None, {"x": [1]}]}, [1, "a", None, {"x": [1]}], [2, "b", {}]),
    ("const", {"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}, 1]),
    ("anyOf", {"anyOf": [P, S]}, [1, "a"], [None, [1]]),
    ("oneOf", {"oneOf": [P, S]}, [1, "a"], [None]),
    ("allOf", {"allOf": [{**P, "minimum": 3}, {"maximum": 5}]}, [3, 5], [2, 6, "a"]),
    ("$ref", {"$defs": {"p": P}, "items": {"$ref": "#/$defs/p"}, "type": "array"}, [[1]], [["a"]]),
    ("$ref", {"$defs": {"p": P}, "$ref": "#/$defs/p", "minimum": 5}, [5], [4, "a"]),
    ("$ref", {"type": "array", "items": {"$ref": "#"}}, [[], [[[]]]], [[1]]),
    ("$defs", {"$defs": {"p": P}, "$ref": "#/$defs/p"}, [1], ["a"]),
    ("definitions", {"definitions": {"p": P}, "$ref": "#/definitions/p"}, [1], ["a"]),
    ("$anchor", {"$defs": {"p": {"$anchor": "q", **P}}, "$ref": "#q"}, [1], ["a"]),
    ("$id", {"$id": "http://x/y", "$defs": {"p": P}, "$ref": "http://x/y#/$defs/p"}, [1], ["a"]),
    ("properties", {"type": "object", "properties": {"a": P}}, [{"a": 1}, {}], [{"a": "x"}]),
    ("required", {"type": "object", "required": ["z"]}, [{"z": 1}], [{}, {"a": 1}]),
    (
        "additionalProperties",
        {"type": "object", "properties": {"a": P}, "additionalProperties": False},
        [{"a": 1}, {}],
        [{"b": 1}],
    ),
    (
        "additionalProperties",
        {"type": "object", "additionalProperties": P},
        [{"a": 1}],
        [{"a": ""}],
    ),
    (
        "patternProperties",
        {"type": "object", "patternProperties": {"^x": P}, "additionalProperties": False},
        [{"x1": 1}],
        [{"y": 1}, {"x": "a"}],
    ),
    ("minProperties", {"type": "object", "minProperties": 2}, [{"a": 1, "b": 2}], [{"a": 1}]),
    ("maxProperties", {"type": "object", "maxProperties": 1}, [{"a": 1}], [{"a": 1, "b": 2}]),
    ("items", {"type": "array", "items": P}, [[1, 2], []], [["a"]]),
    ("prefixItems", {"type": "array", "prefixItems": [P, S]}, [[1, "a"], [1]], [["a", 1]]),
    (
        "additionalItems",
        {"type": "array", "items": [P], "additionalItems": False},
        [[1]],
        [["a"], [1, 2]],
    ),
    ("minItems", {"type": "array", "minItems": 2}, [[1, 2]], [[1]]),
    ("maxItems", {"type": "array", "maxItems": 1}, [[1], []], [[1, 2]]),
    ("minLength", {**S, "minLength": 2}, ["ab", "éé"], ["a"]),
    ("maxLength", {**S, "maxLength": 2}, ["ab", "éé", ""], ["abc"]),
    ("pattern", {**S, "pattern": "^a+$"}, ["aa"], ["b", "ab", ""]),
    ("pattern", {**S, "pattern": "b"}, ["abc"], ["ac"]),
    ("pattern", {**S, "pattern": "^(?!secret).*$"}, ["", "secre", "a secret"], ["secret1"]),
    ("pattern", {**S, "pattern": "^(?=.*[A-Z])(?=.*[0-9]).{4,}$"}, ["aB3d"], ["abcd", "aB3"]),
    ("pattern", {**S, "pattern": r"\bcat\b"}, ["a cat!", "cat"], ["cats", "concat"]),
    ("pattern", {**S, "pattern": "^(?:(?!foo).)*$"}, ["fo", "bar"], ["a foo"]),
    ("pattern", {**S, "pattern": "^[a-z-]+(?<!-)$"}, ["a-b"], ["a-"]),
    ("pattern", {**S, "pattern": "(^a|b)c"}, ["ac", "xbc"], ["xac"]),
    ("not", {**S, "not": {"pattern": "a"}}, ["", "b"], ["a", "bab"]),
    (
        "oneOf",
        {**S, "oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]},
        ["ac", "cb"],
        ["ab", "c"],
    ),
    ("format", {**S, "format": "date"}, ["2020-01-31"], ["2020-13-01", "x"]),
    ("format", {**S, "format": "time"}, ["10:00:00Z"], ["25:00:00Z", "x"]),
    ("format", {**S, "format": "date-time"}, ["2020-01-31T10:00:00Z"], ["2020-01-31"]),
    ("format", {**S, "format": "duration"}, ["P1D"], ["x"]),
    ("format", {**S, "format": "email"}, ["a@b.co"], ["x"]),
    ("format", {**S, "format": "hostname"}, ["a.b"], ["-"]),
    ("format", {**S, "format": "ipv4"}, ["1.2.3.4"], ["1.2.3.400"]),
    ("format", {**S, "format": "ipv6"}, ["::1"], ["x"]),
    ("format", {**S, "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["x"]),
    ("format", {**S, "format": "uri"}, ["http://a.b/c"], ["x y"]),
    ("minimum", {**P, "minimum": 5}, [5, 100], [4, -7]),
    ("maximum", {"type": "number", "maximum": 5.5}, [5.5, -100], [5.6, 100]),
    ("exclusiveMinimum", {**P, "exclusiveMinimum": 5}, [6], [5]),
    ("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 5}, [4.9], [5]),
    ("multipleOf", {**P, "multipleOf": 3}, [3, 9], [4]),
    ("multipleOf", {"type": "number", "multipleOf": 0.5}, [1.5], [1.3]),
    *((word, {**P, word: "x"}, [1], ["a"]) for word in ("title", "description", "$comment")),
    ("default", {**P, "default": 1}, [1, 2], ["a"]),
    ("examples", {**P, "examples": [1]}, [1, 2], ["a"]),
    ("$schema", {**P, "$schema": "https://json-schema.org/draft/2020-12/schema"}, [1], ["a"]),
    *((word, {**P, word: True}, [1], ["a"]) for word in ("deprecated", "readOnly", "writeOnly")),
    ("format", {**S, "format": "date"}, ["2020-02-29", "2000-02-29"], ["2021-02-29", "1900-02-29"]),
    ("format", {**S, "format": "time"}, ["23:59:60Z"], ["22:59:60Z", "23:59:60+01:00"]),
    (
        "format",
        {**S, "format": "date-time"},
        ["2020-02-29T10:00:00+01:00"],
        ["2021-02-29T10:00:00Z"],
    ),
    ("format", {**S, "format": "zip"}, ["anything"], [1]),
    ("pattern", {**S, "pattern": r"^\S$"}, ["x"], ["\ufeff", " ", "xx"]),
    ("pattern", {**S, "pattern": r"^[\w-]+?\.$"}, ["a-b."], ["é.", "a-b"]),
    ("const", {"const": {"a": [1.0]}}, [{"a": [1]}], [{"a": [2]}]),
    ("enum", {"enum": [5, "ab", [1], {"x": 1}], "minLength": 3, "maximum": 4}, [[1]], [5, "ab"]),
    ("maxItems", {**ARRAY, "maxItems": 2.0}, [[1, 2]], [[1, 2, 3]]),
    ("allOf", {"allOf": [AB, {"required": ["c"]}]}, [{"a": 1, "c": 2}], [{}, {"a": "", "c": 1}]),
    ("oneOf", {"oneOf": [{**P, "minimum": 3}, {**P, "maximum": 5}]}, [2, 6], [3, 4, 5]),
    (
        "oneOf",
        {**AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": ""}],
        [{}, {"a": 1, "b": ""}],
    ),
    ("not", {"not": {"type": ["string", "object"]}}, [1, None, [1]], ["a", {}]),
    ("not", {**S, "not": {"enum": ["ab", "b"]}}, ["", "a", "abc", "c"], ["ab", "b"]),
    ("not", {**P, "not": {"const": 5}}, [4, 6, -5], [5]),
    ("not", {**OBJECT, "not": {"required": ["a"]}}, [{"b": 1}], [{"a": 1}]),
    *(
        (word, CONDITION, [{"k": "x", "a": 1}, {"k": "y"}, {}], [{"k": "x"}, {"k": "y", "a": 1}])
        for word in ("if", "then", "else")
    ),
    ("contains", {**ARRAY, "contains": S}, [["a"], [1, "a", 2]], [[], [1]]),
    ("minContains", {**ARRAY, "contains": S, "minContains": 2}, [["a", "b"]], [["a"], [1, "a"]]),
    ("maxContains", {**ARRAY, "contains": S, "maxContains": 1}, [["a", 1]], [["a", "b"]]),
    (
        "uniqueItems",
        {**ARRAY, "items": {"enum": ["a", 1]}, "uniqueItems": True},
        [["a", 1]],
        [[1, 1]],
    ),
    ("propertyNames", {**OBJECT, "propertyNames": {"pattern": "^a"}}, [{"ab": 1}], [{"b": 1}]),
    ("propertyNames", {**OBJECT, "propertyNames": {"enum": ["a"]}}, [{"a": 1}], [{"b": 1}]),
    ("propertyNames", {**OBJECT, "propertyNames": {"maxLength": 1}}, [{"b": 1}], [{"ab": 1}]),
    ("propertyNames", {**OBJECT, "propertyNames": {"not": {"const": "x"}}}, [{"y": 1}], [{"x": 1}]),
    ("exclusiveMinimum", {**N, "exclusiveMinimum": 0, "maximum": 0.5}, [0.25, 0.5], [0, 0.6]),
    ("exclusiveMaximum", {**N, "minimum": -1.5, "exclusiveMaximum": -1}, [-1.5, -1.25], [-1]),
    (
        "patternProperties",
        {**AB, "patternProperties": {"^a": {"minimum": 5}, "c$": S}, "required": ["a"]},
        [{"a": 5}, {"a": 5, "b": ""}],
        [{"a": 4}],
    ),
    (
        "patternProperties",
        {**OBJECT, "patternProperties": {"^(c|d)$": P}, "additionalProperties": False},
        [{"c": 1}, {"c": 1, "d": 2}],
        [{"c": "x"}, {"cd": 1}],
    ),
    ("dependentRequired", {**AB, "dependentRequired": {"a": ["b"]}}, [{"b": ""}], [{"a": 1}]),
    ("dependentSchemas", {**AB, "dependentSchemas": {"a": {"required": ["b"]}}}, [{}], [{"a": 1}]),
    ("dependencies", {**AB, "dependencies": {"a": ["b"]}}, [{"a": 1, "b": ""}], [{"a": 1}]),
    (
        "unevaluatedProperties",
        {"allOf": [AB], "properties": {"c": P}, "unevaluatedProperties": False},
        [{"a": 1, "c": 1}],
        [{"d": 1}],
    ),
    (
        "unevaluatedItems",
        {**ARRAY, "anyOf": [{"prefixItems": [P]}], "unevaluatedItems": False},
        [[1], []],
        [[1, 2], ["a"]],
    ),
    ("minProperties", {**AB, "minProperties": 1}, [{"a": 1}, {"b": ""}], [{}]),
    ("minProperties", {**MANY_AB, "minProperties": 1}, [{"m0": 1}, {"m9": 1}, ALL_AB], [{}]),
    (
        "minProperties",
        {**MANY_AB, "minProperties": 2},
        [{"m0": 1, "m9": 1}, {"m8": 1, "m9": 1}, ALL_AB],
        [{}, {"m0": 1}, {"m9": 1}],
    ),
    (
        "minProperties",
        {**MANY_AB, "minProperties": 2, "additionalProperties": P},
        [{"m0": 1, "x": 1}, {"x": 1, "y": 1}, {"m8": 1, "m9": 1, "x": 1}],
        [{}, {"m9": 1}, {"x": 1}],
    ),
    (
        "minProperties",
        {**MANY_AB, "minProperties": 2, "required": ["m4"]},
        [{"m4": 1, "m9": 1}, {"m0": 1, "m4": 1}, ALL_AB],
        [{"m4": 1}, {"m0": 1, "m9": 1}],
    ),
    (
        "maxProperties",
        {**MANY_AB, "maxProperties": 2},
        [{}, {"m0": 1}, {"m3": 1, "m9": 1}],
        [{"m0": 1, "m3": 1, "m9": 1}, ALL_AB],
    ),
    (
        "uniqueItems",
        {**ARRAY, "items": {"enum": [*"abcde"]}, "uniqueItems": True},
        [[], ["e", "a"], [*"edcba"]],
        [["a", "b", "a"], [*"edcba", "a"]],
    ),
    (
        "uniqueItems",
        {**ARRAY, "items": {"enum": [*"abcdefghij"]}, "uniqueItems": True, "maxItems": 2},
        [[], ["j"], ["j", "a"]],
        [["a", "a"], ["a", "b", "c"]],
    ),
    (
        "uniqueItems",
        {
            **ARRAY,
            "prefixItems": [{"enum": [1, 2]}],
            "items": {"type": "boolean"},
            "uniqueItems": True,
            "minItems": 2,
        },
        [[1, True], [2, False, True]],
        [[1], [1, True, True], [3, True]],
    ),
    (
        "contains",
        {**ARRAY, "allOf": [{"contains": {"const": 1}}, {"contains": S}]},
        [[1, "a"], ["a", 1], [None, "a", 1, 2]],
        [[], [1], ["a"], [1, 2]],
    ),
    (
        "contains",
        {**ARRAY, "maxItems": 1, "allOf": [{"contains": {"minimum": 3}}, {"contains": P}]},
        [[3], [4]],
        [[], [2], ["a"], [3, 3]],
    ),
    ("maxProperties", {**AB, "maxProperties": 1}, [{"a": 1}, {}], [{"a": 1, "b": ""}]),
    (
        "patternProperties",
        {**OBJECT, "patternProperties": {"^a": {"minimum": 3}, "x$": P}},
        [{"ax": 3}],
        [{"ax": 2}, {"bx": "a"}],
    ),
    ("$dynamicRef", TREE, [{"next": {"next": {}}}], [{"next": 1}]),
    ("$dynamicAnchor", TREE, [{"next": {}}], [{"next": {"next": 1}}]),
    ("$ref", {"$schema": OLD, "$defs": {"p": P}, "$ref": "#/$defs/p", "minimum": 5}, [4], ["a"]),
    ("$id", {"$id": "http://x/y", "$ref": "#/$defs/p", "$defs": {"p": P}}, [1], ["a"]),
    ("exclusiveMaximum", {**P, "maximum": 5, "exclusiveMaximum": True}, [4], [5]),
    ("enum", {"$schema": OLD, "enum": [[1], [True]]}, [[1], [True]], [[2], []]),
    ("minContains", {"$schema": OLD, **ARRAY, "contains": S, "minContains": 0}, [["a"]], [[1]]),
    (
        "unevaluatedItems",
        {"allOf": [{"prefixItems": [S], "unevaluatedItems": False}, {"contains": P}]},
        [1],
        [["a", 1]],
    ),
    *(
        (word, {**S, word: {"type": "integer"}}, ["a"], [1, None])
        for word in ("nullable", "discriminator", "contentEncoding", "contentMediaType")
    ),
    *((word, {**S, word: {"lenient": True}}, ["a"], [1]) for word in ("x-guidance", "kind")),
]
# Schemas of which the grammar holds a part, and what it does not.
GAPS: list[tuple[dict[str, Any], str]] = [
    ({**ARRAY, "uniqueItems": True}, "uniqueItems (#)"),
    ({**S, "pattern": r"^(a+)-\1$"}, "pattern (#)"),
    ({"enum": ["aa", "b"], "pattern": r"^(a)\1"}, "pattern (#)"),
    ({**S, "format": "regex"}, "format (#)"),
    ({**S, "not": {"pattern": r"(a)\1"}}, "not (/not)"),
    ({"oneOf": [AB, {**AB, "title": "other"}]}, "oneOf (#)"),
    ({**OBJECT, "minProperties": 2}, "additionalProperties (names that repeat)"),
    (
        {**OBJECT, "propertyNames": {"pattern": "^a", "maxLength": 2}, "minProperties": 1},
        "propertyNames (of several limits)",
    ),
    ({"const": 2**60}, "enum (of numbers beyond 2^53)"),
]
MANY = {f"^{i}": P for i in range(5)}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"$ref": "http://127.0.0.1:1/x"}, "names nothing in the schema: 'http://127.0.0.1:1/x'"),
    ({"$ref": "#/$defs/nobody"}, "names nothing"),
    ({"type": "strnig"}, "strnig"),
    ({"maxItems": -1}, "maxItems"),
    ({"properties": {"a": {"not": [{}]}}}, "'/properties/a/not' must be a schema"),
    ({"not": {"title": "anything"}}, "no value fits"),
    ({**S, "allOf": [P]}, "no value fits it: type ("),
    ({"type": "array", "minItems": 1, "items": {"enum": ["a"], "pattern": "^b"}}, "enum (/items"),
    ({**S, "const": "\ud800"}, "'\\ud800' in type ("),
    ({"const": 2**53 + 1}, "9,007,199,254,740,993 in const ("),
    ({"const": -(2**63)}, "has more digits than float64 can hold"),  # llguidance would not end
    (
        {"properties": {f"p{i}": {} for i in range(4001)}, "patternProperties": MANY},
        "4,001 names and 5 of patternProperties, whose product must be at most 20,000",
    ),
    ({**OBJECT, "required": ["a"], "properties": {"a": {"enum": []}}}, "no value fits"),
    (
        {"$id": "http://x/r", **OBJECT, "required": ["a"], "properties": {"a": {"$ref": "r"}}},
        "no value fits",
    ),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size)


def allows(grammars: Grammars, tokenizer: Tokenizer, schema: object, text: str) -> bool:
    matcher = grammars.matcher(Constraint("json_schema", json.dumps(schema)))
    tokens = [*tokenizer.encode(text), min(tokenizer.eos_ids)]
    return matcher.count_allowed((), tokens) == len(tokens)


@pytest.mark.parametrize(("keyword", "schema", "good", "bad"), ENFORCED, ids=str)
def test_a_keyword_is_enforced_by_the_grammar(
    grammars: Grammars,
    tokenizer: Tokenizer,
    keyword: str,
    schema: dict[str, Any],
    good: Sequence[Any],
    bad: Sequence[Any],
) -> None:
    assert f'"{keyword}"' in json.dumps(schema)
    for value in good:
        assert allows(grammars, tokenizer, schema, json.dumps(value, ensure_ascii=False)), value
    for value in bad:
        assert not allows(grammars, tokenizer, schema, json.dumps(value, ensure_ascii=False)), value


def test_gaps_name_the_keywords_that_the_grammar_does_not_enforce(grammars: Grammars) -> None:
    for schema, gap in GAPS:
        for variant in (schema, {"$defs": {"p": schema}, "anyOf": [{"$ref": "#/$defs/p"}]}):
            matcher = grammars.matcher(Constraint("json_schema", json.dumps(variant)))
            name = gap.partition(" ")[0]
            assert [
                unenforced_keyword
                for unenforced_keyword in matcher.unenforced_keywords
                if unenforced_keyword.startswith(name)
            ], (
                variant,
                matcher.unenforced_keywords,
            )
        assert gap in prepare(json.dumps(schema)).unenforced_keywords
    lark = 'start: "x" form\nform: %json {"type": "array", "uniqueItems": true}'
    assert "uniqueItems (#)" in grammars.matcher(Constraint("lark", lark)).unenforced_keywords
    for _, schema, *_ in ENFORCED:
        assert set(prepare(json.dumps(schema)).unenforced_keywords) <= {
            "additionalProperties (names that repeat)"
        }
    assert not prepare(json.dumps({**AB, "required": ["a"]})).unenforced_keywords


def test_schemas_that_cannot_be_followed_are_refused(grammars: Grammars) -> None:
    for schema, why in REFUSED:
        for variant in (schema, {"type": "array", "items": schema, "minItems": 1}):
            with pytest.raises(RequestError, match="cannot be used") as refusal:
                grammars.matcher(Constraint("json_schema", json.dumps(variant)))
            assert why.removeprefix("'/") in str(refusal.value)


CONTROLS = [*map(chr, range(0x20)), "\x7f", "\u0085", "\u2028", "\u2029", "\U0001f600", '"', "\\"]


@pytest.mark.parametrize("character", CONTROLS, ids=ascii)
def test_each_character_can_be_enforced(
    grammars: Grammars, tokenizer: Tokenizer, character: str
) -> None:
    written = "\\u007f" if character == "\x7f" else json.dumps(character, ensure_ascii=False)[1:-1]
    text, code = f"a{written}b", f"{ord(character):x}"
    escaped = f"\\u{{{code}}}" if len(code) > 4 else f"\\u{code:0>4}"
    for schema in (
        {"const": f"a{character}b"},
        {"enum": ["x", f"a{character}b"]},
        {**S, "pattern": f"^a{escaped}b$"},
        {**S, "pattern": f"^a[{escaped}]b$"},
    ):
        for constraint, before, after in (
            (schema, "", ""),
            ({**ARRAY, "items": schema}, "[", "]"),
            ({"properties": {"role": schema}, "additionalProperties": S}, '{"role": ', "}"),
        ):
            assert allows(grammars, tokenizer, constraint, f'{before}"{text}"{after}'), schema
            for other in ("ab", "aab", 'a\\"b' if character != '"' else "a", "a\\\\b"):
                if other != text:
                    assert not allows(grammars, tokenizer, constraint, f'{before}"{other}"{after}')
    name = f"a{character}b"
    key = json.dumps(name, ensure_ascii=False)
    schema = {**OBJECT, "properties": {name: P}, "required": [name]}
    assert allows(grammars, tokenizer, schema, f"{{{key}: 1}}")
    assert not allows(grammars, tokenizer, schema, '{"ab": 1}')


def test_control_characters_are_written_only_where_a_schema_asks_for_them(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    schema = {
        **OBJECT,
        "properties": {"role": {"enum": ["\x01"]}, "": S},
        "required": ["role", ""],
        "additionalProperties": S,
    }
    right = r'{"role": "\u0001", "": "x", "more": "y"}'
    assert allows(grammars, tokenizer, schema, right)
    for old, new in (
        ('"x"', r'"\u0001"'),
        ('"y"', r'"\u0001"'),
        ('"more"', r'"r\u006fle"'),
        ('"more"', r'"a\u0009"'),
        ('"more"', '"role"'),
        (r"\u0001", "a"),
    ):
        assert not allows(grammars, tokenizer, schema, right.replace(old, new)), new
    controls = {**S, "pattern": r"^[\x00-\x1f]$"}
    for text, is_right in ((r"\u0000", True), (r"\u001E", True), (r"\"", False), ("a", False)):
        assert allows(grammars, tokenizer, controls, f'"{text}"') is is_right


NUMBERS = [("1.0", "1"), ("-0", "0"), ("-0.0", "0"), ("1e3", "1000"), ("1e-7", "0.0000001")]


@pytest.mark.parametrize(("number", "written"), [*NUMBERS, ("0.1", "0.1"), ("12e-1", "1.2")])
def test_a_number_is_what_it_means_however_it_is_spelled(
    grammars: Grammars, tokenizer: Tokenizer, number: str, written: str
) -> None:
    for text in (f'{{"const": {number}}}', f'{{"enum": ["a", {number}]}}'):
        constraint = Constraint("json_schema", text)
        for value, is_right in ((written, True), ("2", False), ("0.3", False)):
            tokens = [*tokenizer.encode(value), min(tokenizer.eos_ids)]
            count = grammars.matcher(constraint).count_allowed((), tokens)
            assert (count == len(tokens)) is is_right


MULTIPLES = [
    *(997, 4999, 19_997, 20_000, 50_000),
    *(0.5, 0.01, 1.25, 0.0125, 1999.7),
]


@pytest.mark.parametrize("multiple", MULTIPLES)
def test_multiples_up_to_the_limit_are_enforced_beside_other_limits(
    grammars: Grammars, tokenizer: Tokenizer, multiple: float
) -> None:
    for typ in ("integer", "number"):
        if typ == "integer" and multiple % 1:
            continue
        for limits in ({}, {"minimum": 0, "maximum": 10**9}, {"exclusiveMinimum": -7}):
            number = {"type": typ, "multipleOf": multiple, **limits}
            schema = {**OBJECT, "properties": {"a": number, "b": number}, "required": ["a", "b"]}
            assert not prepare(json.dumps(schema)).unenforced_keywords
            for a, b in ((0, 1), (3, 7), (1, 5)):
                first, second = a * Decimal(str(multiple)), b * Decimal(str(multiple))
                text = f'{{"a": {first.normalize():f}, "b": {second.normalize():f}}}'
                assert allows(grammars, tokenizer, schema, text), text
            assert not allows(grammars, tokenizer, schema, f'{{"a": 0, "b": {multiple * 1.5}}}')


@pytest.mark.parametrize("multiple", [20_001, 60_000, 123_000, 19_997_000, 0.4999, 1e-9, 2**40 + 1])
def test_multiples_beyond_the_limit_are_checked_and_compiled_at_once(
    grammars: Grammars, multiple: float
) -> None:
    schema = json.dumps({**N, "multipleOf": multiple})
    [gap] = prepare(schema).unenforced_keywords
    assert gap.startswith("multipleOf (of ")
    assert grammars.matcher(Constraint("json_schema", schema)).unenforced_keywords == (gap,)


def test_a_name_is_written_without_escapes(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {"properties": {"role": {"enum": ["user"]}}, "additionalProperties": S}
    for text, is_right in (
        ('{"role": "user"}', True),
        ('{"rule": "admin"}', True),
        (r'{"r\u006fle": "admin"}', False),
        (r'{"\u0072ole": "user"}', False),
    ):
        assert allows(grammars, tokenizer, schema, text) is is_right
    schema = {"patternProperties": {"^r": P}, "additionalProperties": S}
    assert not allows(grammars, tokenizer, schema, r'{"\u0072": "x"}')


def test_members_that_the_schema_does_not_mention_are_not_written(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    assert not allows(grammars, tokenizer, AB, '{"a": 1, "c": 2}')
    for asking in ({"additionalProperties": True}, {"required": ["c"]}, {"minProperties": 3}):
        assert allows(grammars, tokenizer, {**AB, **asking}, '{"a": 1, "b": "", "c": 2}')
    for patterns, more_keywords, good, bad in (
        ({"^[a-z]+$": P}, {"minProperties": 1}, {"x": 1}, {"X": 1}),
        ({"^(x|y)$": P}, {"required": ["A"]}, {"x": 1, "A": ""}, {"A": 1, "b": 1}),
        ({"^x": False}, {}, {"b": 1}, {"x": 1}),
        ({"^x": P, "^y": False}, {"properties": {"a": P}}, {"a": 1, "x": 1}, {"z": 1}),
    ):
        schema = {**OBJECT, "patternProperties": patterns, **more_keywords}
        for value in (good, bad):
            assert allows(grammars, tokenizer, schema, json.dumps(value)) is (value is good), schema


def test_a_name_that_a_pattern_lists_is_written_once(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    schema = {"patternProperties": {"^a$": P}, "additionalProperties": False, "required": ["a"]}
    assert not allows(grammars, tokenizer, {**OBJECT, **schema}, '{"a": 1, "a": 2}')
    tokens = tokenizer.encode('{"a": 1, ')  # after which nothing could follow
    matcher = grammars.matcher(Constraint("json_schema", json.dumps({**OBJECT, **schema})))
    assert matcher.count_allowed((), tokens) < len(tokens) - 1


def test_whole_numbers_have_an_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for schema in (P, {**P, "minimum": 5}, {**P, "maximum": 2**63}, {"type": ["null", "integer"]}):
        for number in (2**60 + 1, 9 * 10**18, 10**19):
            assert allows(grammars, tokenizer, schema, str(number)) is (number < 10**19)
        assert not prepare(json.dumps(schema)).unenforced_keywords
    assert allows(grammars, tokenizer, {**P, "minimum": 10**20}, str(10**30))
    assert prepare(json.dumps({"prefixItems": [P] * 9})).text.count("maximum") == 1  # compiled once


def test_members_keep_the_order_of_the_schema(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {"allOf": [{"properties": {"z": P}}], "properties": {"y": P}, "required": ["y"]}
    assert allows(grammars, tokenizer, schema, '{"z": 1, "y": 1}')
    assert not allows(grammars, tokenizer, schema, '{"y": 1, "z": 1}')


def test_names_and_values_are_not_keywords(grammars: Grammars, tokenizer: Tokenizer) -> None:
    value = {"not": 1, "uniqueItems": {"if": 2}}
    properties = {"not": P, "uniqueItems": {"const": {"if": 2}}}
    schema = {"type": "object", "properties": properties, "default": {"else": 1}}
    assert allows(grammars, tokenizer, schema, json.dumps(value))


def test_a_long_name_is_not_copied_for_each_schema_in_it() -> None:
    inner: dict[str, Any] = {f"a{i}": {} for i in range(2000)}
    schema = {"properties": {"x" * 50_000: {"properties": inner}}}
    text = json.dumps(schema)
    tracemalloc.start()
    try:
        prepare(text)
        assert tracemalloc.get_traced_memory()[1] < 50 * len(text)
    finally:
        tracemalloc.stop()
    inner["a7"] = {"maximum": "1"}
    with pytest.raises(ValueError, match=r"maximum \(…x+/properties/a7\) has") as error_info:
        prepare(json.dumps(schema))
    assert len(str(error_info.value)) < 300


def test_a_schema_deeper_than_the_stack_is_refused(grammars: Grammars) -> None:
    for text in ('{"items": ' * 20_000 + "{}" + "}" * 20_000, '{"items": ' * 20_000):
        with pytest.raises(RequestError, match="cannot be used"):
            grammars.matcher(Constraint("json_schema", text))


def test_alternatives_that_multiply_are_bounded() -> None:
    parts = [{"required": [f"p{i}"]} for i in range(64)]
    both = [{"anyOf": parts[4 * i : 4 * i + 4]} for i in range(16)]
    prepared = prepare(json.dumps({"type": "object", "allOf": both}))
    assert "anyOf (/allOf/3)" in prepared.unenforced_keywords
    assert len(prepared.text) < 100_000


def test_the_page_lists_what_the_code_does() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    documented_keywords = [
        word for cell, _ in rows for word in re.findall(r"`(\$?[a-zA-Z]+)`", cell)
    ]
    unknown = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    assert {word for word, *_ in ENFORCED} - {"kind", "x-guidance"} <= {
        *documented_keywords,
        *unknown,
    }
    formats = re.findall(r"`([a-z0-9-]+)`", next(cell for word, cell in rows if word == "`format`"))
    assert set(FORMATS) <= set(formats)
