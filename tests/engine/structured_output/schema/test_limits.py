"""Schemas within the limits of docs/guide/structured-output.md are enforced, others refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest

from support.byte_tokenizer import byte_tokenizer
from twostroke.core.constraint import MAX_CONSTRAINT, Constraint
from twostroke.core.errors import RequestError
from twostroke.engine.structured_output.grammar import MAX_CHOICES, Grammars
from twostroke.engine.structured_output.schema.prepare import prepare

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.engine.structured_output.schema.prepare import Prepared

    Schema = dict[str, Any]

P: Final = {"type": "integer"}
ARRAY: Final = {"type": "array"}
_REPEATED: Final = "additionalProperties (names that repeat)"


def members(count: int, **limits: int) -> Schema:
    """Return the schema of an object with `count` optional members."""
    names = {f"m{i}": P for i in range(count)}
    return {"type": "object", "properties": names, "additionalProperties": False, **limits}


def distinct(count: int, **limits: int) -> Schema:
    """Return the schema of an array of distinct values from a list of `count` values."""
    return {**ARRAY, "items": {"enum": [*range(count)]}, "uniqueItems": True, **limits}


def contained(count: int) -> Schema:
    """Return the schema of an array that must contain each of `count` values."""
    return {**ARRAY, "allOf": [{"contains": {"const": i}} for i in range(count)]}


def multiplied(count: int) -> Schema:
    """Return a schema whose `anyOf` pairs combine to 2^`count` alternatives."""
    pairs = [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(count)]
    names = {f"{letter}{i}": P for i in range(count) for letter in "ab"}
    return {"type": "object", "properties": names, "allOf": pairs}


# The keyword, what makes the schema of a size, the largest size that is held, and the next.
ENFORCED_SIZES: list[tuple[str, Callable[[int], Schema], int, int]] = [
    ("minProperties", lambda n: members(n, minProperties=1, maxProperties=n - 1), 6, 7),
    ("minProperties", lambda n: members(n, minProperties=2), 11, 12),
    ("maxProperties", lambda n: members(n, maxProperties=1), 63, 64),
    ("maxProperties", lambda n: members(n, maxProperties=2), 10, 11),
    ("uniqueItems", distinct, 5, 6),
    ("uniqueItems", lambda n: distinct(n, maxItems=2), 19, 20),
    ("contains", contained, 3, 4),
    ("anyOf", multiplied, 6, 7),
    ("multipleOf", lambda n: {"type": "integer", "multipleOf": n}, 20_000, 20_001),
    ("multipleOf", lambda n: {"type": "integer", "multipleOf": n * 10}, 5_000, 5_001),
    ("pattern", lambda n: {"type": "string", "pattern": rf"^(?=.{{{n}}}$)a*b"}, 92, 93),
]
# What makes a form of a size, the largest that is taken, the next, and the sentence about it.
COMPILED_SIZES: list[tuple[Callable[[int], Constraint], int, str]] = [
    (
        lambda n: Constraint.json_schema('{"title": "' + "x" * (n - 13) + '"}'),
        MAX_CONSTRAINT,
        "json_schema takes at most 262,144 characters",
    ),
    (
        lambda n: Constraint.choice([f"text {i}" for i in range(n)]),
        MAX_CHOICES,
        "must have 1 to 1,024 texts",
    ),
    (
        lambda n: Constraint.json_schema({"const": n}),
        9 * 10**18,
        "const",
    ),
    (
        lambda n: Constraint.json_schema(
            {**members(n), "patternProperties": {f"^{i}": P for i in range(10)}}
        ),
        2_000,
        "product must be at most 20,000",
    ),
]


def unenforced_keywords(schema: Schema) -> set[str]:
    """Return a schema's keywords that the grammar does not enforce, without repeated names."""
    prepared: Prepared = prepare(json.dumps(schema))
    return {gap for gap in prepared.unenforced_keywords if gap != _REPEATED}


@pytest.mark.parametrize(("keyword", "make", "limit", "excess"), ENFORCED_SIZES)
def test_a_keyword_is_enforced_up_to_its_limit_and_checked_beyond(
    keyword: str, make: Callable[[int], Schema], limit: int, excess: int
) -> None:
    assert not unenforced_keywords(make(limit))
    assert [gap for gap in unenforced_keywords(make(excess)) if keyword in gap], (
        unenforced_keywords(make(excess))
    )


@pytest.mark.parametrize(("make", "limit", "why"), COMPILED_SIZES)
def test_a_schema_is_compiled_up_to_its_limit_and_refused_beyond(
    make: Callable[[int], Constraint], limit: int, why: str
) -> None:
    tokenizer = byte_tokenizer()
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    grammars.matcher(make(limit))
    with pytest.raises(RequestError, match=why):
        grammars.matcher(make(limit + 1))
