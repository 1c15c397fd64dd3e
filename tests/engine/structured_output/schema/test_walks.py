"""Answers drawn at random from grammars of random schemas are valid for another validator."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest

from support.byte_tokenizer import byte_tokenizer
from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError
from twostroke.engine.structured_output.grammar import Grammars

if TYPE_CHECKING:
    from twostroke.model.tokenizer import Tokenizer

_CLOSING = {b'"', b"]", b"}"}
ATOMS: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 3},
    {"type": "string", "pattern": "^a"},
    {"type": ["integer", "null"]},
    {"minimum": 3, "maximum": 9, "multipleOf": 2},
    {"enum": ["a", "ab", 4, None, ["a"], {"a": 4}]},
    {"const": "ab"},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"maxLength": 2}}},
    {"required": ["b"], "properties": {"b": {"enum": ["x", 5]}}, "maxProperties": 2},
    {"additionalProperties": {"type": "integer"}, "minProperties": 1},
    {"patternProperties": {"^a": {"maximum": 5}}, "propertyNames": {"maxLength": 2}},
    {"dependentRequired": {"a": ["b"]}, "unevaluatedProperties": False},
    {"type": "array", "items": {"enum": [1, 2, "a"]}, "uniqueItems": True, "maxItems": 3},
    {"prefixItems": [{"type": "string"}], "unevaluatedItems": False},
    {"contains": {"const": 1}, "maxContains": 1, "maxItems": 3},
]


def random_schema(draw: random.Random, depth: int) -> dict[str, Any]:
    """Return a random JSON schema: a combination of `ATOMS`, nested to a depth."""
    if not depth:
        return draw.choice(ATOMS)
    first_schema, other = random_schema(draw, depth - 1), random_schema(draw, depth - 1)
    match draw.randrange(7):
        case 0:
            return {"allOf": [first_schema, other]}
        case 1:
            return {"anyOf": [first_schema, other]}
        case 2:
            return {"oneOf": [first_schema, other]}
        case 3:
            return {"not": first_schema, **other}
        case 4:
            return {"if": first_schema, "then": other, "else": random_schema(draw, depth - 1)}
        case 5:
            return {
                "type": "object",
                "properties": {"a": first_schema, "c": other},
                "required": ["c"],
            }
    return {**first_schema, **other}


def walk(grammars: Grammars, tokenizer: Tokenizer, schema: str, draw: random.Random) -> str | None:
    """Return an answer of random tokens that the grammar allows; None if it does not end."""
    matcher, output = grammars.matcher(Constraint("json_schema", schema)), list[int]()
    mask = np.zeros((1, matcher.num_words), np.uint32)
    for count in range(160):
        matcher.masks(output, (), (), mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        others = [token for token in allowed if token not in matcher.ends]
        if not others or (len(others) < len(allowed) and draw.random() < 0.5):
            return b"".join(map(tokenizer.token_bytes, output)).decode()
        closing = [token for token in others if tokenizer.token_bytes(token) in _CLOSING]
        output.append(draw.choice((closing if count > 10 else []) or others))
    return None


@pytest.mark.rounds
def test_answers_of_a_grammar_without_gaps_are_valid(rounds: int) -> None:
    draw, tokenizer = random.Random(4), byte_tokenizer()
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    num_judged = 0
    for number in range(rounds * 60):
        schema = random_schema(draw, 1 + number % 3)
        constraint = Constraint("json_schema", json.dumps(schema))
        try:
            unenforced_keywords = set(grammars.compile(constraint).unenforced_keywords)
        except RequestError as refusal:
            assert "no value fits" in str(refusal)  # noqa: PT017 - most are not refused
            continue
        if unenforced_keywords - {"additionalProperties (names that repeat)"}:
            continue
        for _ in range(3):
            text = walk(grammars, tokenizer, constraint.text, draw)
            if text is None:
                continue
            value = json.loads(text)
            if json.dumps(value, ensure_ascii=False).count(":") < text.count(":"):
                continue  # a name is repeated
            num_judged += 1
            assert jsonschema.Draft202012Validator(schema).is_valid(value), (schema, text)
    assert num_judged > 40
