"""Text that a grammar forces is drafted if it is short, and not followed if it is long."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.byte_tokenizer import byte_tokenizer
from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError
from twostroke.engine.structured_output.grammar import Grammars
from twostroke.engine.structured_output.schema.size import forces_little

PERSON = {
    "type": "object",
    "description": "x" * 100_000,
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 400},
        "born": {"type": "string", "pattern": "[0-9]{4}-[0-9]{2}-[0-9]{2}"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 900},
    },
    "required": ["name", "born"],
}
DOUBLING = "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60: "a"'
TWICE: dict[str, Any] = {
    "$defs": {
        **{
            f"d{i}": {
                "type": "array",
                "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2,
                "minItems": 2,
            }
            for i in range(60)
        },
        "d60": {"const": 1},
    },
    "$ref": "#/$defs/d0",
}
ENDLESS = {"type": "array", "minItems": 1, "items": {"$ref": "#"}}


HOSTILE = [
    ("regex", "(a{1000}){1000}"),
    ("grammar", 'root ::= "a"{1000000}'),
    ("grammar", DOUBLING),
    ("json_schema", json.dumps({"type": "array", "items": {"const": 1}, "minItems": 10**6})),
    ("json_schema", json.dumps({"type": "string", "pattern": "^a+$", "minLength": 10**6})),
    ("json_schema", json.dumps({"type": "string", "pattern": "^(a{1000}){1000}$"})),
    ("json_schema", json.dumps(TWICE)),
    ("json_schema", json.dumps(ENDLESS)),
    ("choice", json.dumps(["a" * 100_000])),
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = byte_tokenizer()
    return Grammars(tokenizer, tokenizer.vocab_size)


def test_long_forced_text_is_not_followed(grammars: Grammars) -> None:
    """Following it would take seconds, hours or for ever with most of these grammars."""
    for notation, text in HOSTILE:
        try:
            matcher = grammars.matcher(Constraint(notation, text))
        except RequestError:
            continue  # by a limit of llguidance
        assert list(matcher.forced([])) == [], (notation, text)


def test_short_forced_text_is_followed(grammars: Grammars) -> None:
    tokenizer = byte_tokenizer()
    for notation, text, expected in (
        ("json_schema", json.dumps(PERSON), '{"name":'),
        ("choice", '["Born in 1990", "Born in 1991"]', "Born"),
        ("regex", "Born in [0-9]{4}", "Born"),
        ("lark", 'start: "Born in " YEAR\nYEAR: /[0-9]{4}/', "Born"),
    ):
        tokens = grammars.matcher(Constraint(notation, text)).forced([])
        assert tokenizer.decode(list(tokens)).startswith(expected), notation


def test_references_count_as_often_as_they_are_used() -> None:
    name = {"type": "object", "properties": {"first": {"type": "string"}}, "required": ["first"]}
    nested: dict[str, Any] = {
        "$defs": {"name": name},
        "type": "object",
        "properties": {"by": {"$ref": "#/$defs/name"}, "to": {"$ref": "#/$defs/name"}},
    }
    assert forces_little(nested)
    nested["properties"] = {
        "by": {"type": "array", "minItems": 900, "items": {"$ref": "#/$defs/name"}}
    }
    assert not forces_little(nested)
    for member in ("$defs", "$ref", "pattern"):  # a name, not a keyword
        long = {"type": "array", "minItems": 9000, "items": {"type": "integer"}}
        assert not forces_little({"type": "object", "properties": {member: long}})
    assert forces_little({"$ref": "#/$defs/none"})
    assert not forces_little({"type": "array", "minItems": 10**400})
