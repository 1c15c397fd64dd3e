"""Keywords of JSON Schema: each is enforced or refused, as docs/structured-output.md says."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.byte_tokenizer import byte_tokenizer
from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError
from twostroke.sample.grammar import Grammars
from twostroke.schema.prepare import ANNOTATIONS, NAMED_SCHEMAS, SCHEMAS, VALUES, check_keywords

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.tokenize import Tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "structured-output.md"
P = {"type": "integer"}
S = {"type": "string"}
# Keyword, schema, values that it allows, values that it does not.
KEPT: list[tuple[str, dict[str, Any], list[Any], list[Any]]] = [
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
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("contains", {"type": "array", "contains": P}),
    ("minContains", {"type": "array", "minContains": 1}),
    ("maxContains", {"type": "array", "maxContains": 1}),
    ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {}}}),
    ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ("not", {"not": P}),
    *((word, {word: P}) for word in ("if", "then", "else")),
    ("$dynamicRef", {"$dynamicRef": "#x"}),
    ("$dynamicAnchor", {"$dynamicAnchor": "x"}),
    ("$vocabulary", {"$vocabulary": {}}),
    ("contentEncoding", {**S, "contentEncoding": "base64"}),
    ("contentMediaType", {**S, "contentMediaType": "application/json"}),
    ("contentSchema", {**S, "contentSchema": {}}),
    ("nullable", {**S, "nullable": True}),
    ("discriminator", {"type": "object", "discriminator": {"propertyName": "a"}}),
    ("x-guidance", {"x-guidance": {"lenient": True}}),
    ("oneOf", {"oneOf": [P, {"type": "number", "minimum": 5}]}),
    ("format", {**S, "format": "regex"}),
    ("patternProperties", {"patternProperties": {"^a": P, "a$": S}}),
    ("$ref", {"$ref": "http://127.0.0.1:1/x"}),
    ("$ref", {"$ref": "#/$defs/nobody"}),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size)


def allows(grammars: Grammars, tokenizer: Tokenizer, schema: object, value: object) -> bool:
    matcher = grammars.matcher(Constraint("json_schema", json.dumps(schema)))
    end = min(tokenizer.eos_ids)
    text = [*tokenizer.encode(json.dumps(value, ensure_ascii=False)), end]
    return matcher.count_allowed((), text) == len(text)


@pytest.mark.parametrize(("keyword", "schema", "good", "bad"), KEPT, ids=str)
def test_a_keyword_is_enforced(
    grammars: Grammars,
    tokenizer: Tokenizer,
    keyword: str,
    schema: dict[str, Any],
    good: Sequence[Any],
    bad: Sequence[Any],
) -> None:
    assert f'"{keyword}"' in json.dumps(schema)
    for value in good:
        assert allows(grammars, tokenizer, schema, value), value
    for value in bad:
        assert not allows(grammars, tokenizer, schema, value), value


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("keyword", "schema"), REFUSED, ids=str)
def test_a_keyword_is_refused(
    grammars: Grammars, keyword: str, schema: dict[str, Any], depth: int
) -> None:
    whole = {"type": "object", "properties": {"a": {"anyOf": [schema]}}} if depth else schema
    with pytest.raises(RequestError, match="cannot be used") as refusal:
        grammars.matcher(Constraint("json_schema", json.dumps(whole)))
    if keyword not in SCHEMAS | NAMED_SCHEMAS | VALUES:
        assert f"'{keyword}'" in str(refusal.value)


def test_names_and_values_are_not_keywords(grammars: Grammars, tokenizer: Tokenizer) -> None:
    value = {"not": 1, "uniqueItems": {"if": 2}}
    properties = {"not": P, "uniqueItems": {"const": {"if": 2}}}
    schema = {"type": "object", "properties": properties, "default": {"else": 1}}
    assert allows(grammars, tokenizer, schema, value)


def test_a_misspelt_keyword_is_refused_with_the_nearest_one(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"maximun": 1}}}
    with pytest.raises(
        RequestError, match=r"/properties/a/maximun\) is not supported\. Did you mean 'maximum'\?$"
    ):
        grammars.matcher(Constraint("json_schema", json.dumps(schema)))


def test_a_long_name_is_not_copied_for_each_schema_in_it() -> None:
    inner = {f"a{i}": {} for i in range(2000)}
    schema = {"properties": {"x" * 50_000: {"properties": inner}}}
    text = json.dumps(schema)
    tracemalloc.start()
    try:
        check_keywords(text)
        assert tracemalloc.get_traced_memory()[1] < 20 * len(text)
    finally:
        tracemalloc.stop()
    inner["a7"] = {"maximun": 1}
    with pytest.raises(ValueError, match=r"'maximun' \(…x+/properties/a7/maximun\) is not") as told:
        check_keywords(json.dumps(schema))
    assert len(str(told.value)) < 300


def test_a_schema_deeper_than_the_stack_is_refused(grammars: Grammars) -> None:
    for text in ('{"items": ' * 20_000 + "{}" + "}" * 20_000, '{"items": ' * 20_000):
        with pytest.raises(RequestError, match="cannot be used"):
            grammars.matcher(Constraint("json_schema", text))


def test_the_page_lists_what_the_code_does() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    said = {
        word: verdict
        for cell, verdict in rows
        for word in re.findall(r"`(\$?[a-zA-Z]+)`", cell)
        if verdict.startswith(("enforced", "refused", "no effect"))
    }
    for keyword, verdict in said.items():
        if verdict == "refused":
            assert keyword in {word for word, _ in REFUSED}, keyword
        else:
            assert keyword in {word for word, *_ in KEPT}, keyword
            assert (keyword in ANNOTATIONS) is (
                verdict.startswith("no effect") and keyword != "$schema"
            )
    assert set(said) >= SCHEMAS | NAMED_SCHEMAS | VALUES | ANNOTATIONS
    formats = re.findall(r"`([a-z0-9-]+)`", said["format"])
    assert formats == [schema["format"] for word, schema, *_ in KEPT if word == "format"]
