"""Bounds on what a grammar forces: never too low, and small for what people ask."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.byte_tokenizer import byte_tokenizer
from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError
from twostroke.sample.forcing import (
    MOST_FORCED,
    of_lark,
    of_regex,
    of_schema,
    without_long_forcing,
)
from twostroke.sample.grammar import Grammars

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
    ("regex", "((a{1000}){1000}){1000}"),
    ("regex", "[bc](a{1000}){1000}"),
    ("regex", "a{1000000,}"),
    ("lark", 'start: A\nA: B{1000}\nB: C{1000}\nC: "a"{1000}'),
    ("lark", "start: A\nA: /a+/ & /.{1000000}/"),
    ("lark", 'start: a~1000\na: b~1000\nb: "c"~1000'),
    ("lark", DOUBLING),
    ("lark", '%llguidance {"no_forcing": false}\n' + DOUBLING),
    ("lark", "".join(f"  {line}\n" for line in DOUBLING.splitlines())),
    ("lark", "start: r0  # /\n" + DOUBLING.partition("\n")[2] + "  # /"),
    ("lark", 'start: ["-" // %json [\ntrue\n]\n' + DOUBLING.replace("start", "true")),
    ("lark", f'start: a~1000\na: %lark {{\nstart: "{"x" * 1000}"\n}}'),
    ("lark", 'start: a[stop=":"]\na[stop=":"]: "x"'),
    ("grammar", 'root ::= "a"{1000000}'),
    ("json_schema", json.dumps({"type": "array", "items": {"const": 1}, "minItems": 10**6})),
    ("json_schema", json.dumps({"type": "string", "pattern": "^a+$", "minLength": 10**6})),
    ("json_schema", json.dumps(TWICE)),
    ("json_schema", json.dumps(ENDLESS)),
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = byte_tokenizer()
    return Grammars(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize(("notation", "text"), HOSTILE)
def test_what_may_force_much_is_not_followed(grammars: Grammars, notation: str, text: str) -> None:
    """Followed, each of these takes seconds, hours or for ever."""
    try:
        matcher = grammars.matcher(Constraint(notation, text))
    except RequestError:
        return  # by a limit of llguidance's own
    assert list(matcher.forced([])) == []


def test_what_people_ask_for_is_followed(grammars: Grammars) -> None:
    schema = Constraint("json_schema", json.dumps(PERSON))
    assert of_schema(PERSON) < MOST_FORCED
    tokens = grammars.matcher(schema).forced([])
    assert byte_tokenizer().decode(list(tokens)).startswith('{"name":')
    for notation, text in (
        ("regex", "Born in [0-9]{4}"),
        ("lark", 'start: "Born in " YEAR\nYEAR: /[0-9]{4}/'),
        ("lark", '\n    start: "Born in " YEAR\n    YEAR: /[0-9]{4}/\n'),
        ("grammar", 'root ::= "Born in " [0-9]{4}'),
        ("choice", '["Born in 1990", "Born in 1991"]'),
    ):
        tokens = grammars.matcher(Constraint(notation, text)).forced([])
        assert byte_tokenizer().decode(list(tokens)).startswith("Born"), notation


def test_grammars_that_force_little_stay_as_they_are() -> None:
    for grammar in ('start: "a"', json.dumps({"grammars": [{"json_schema": PERSON}]})):
        assert without_long_forcing(grammar) is grammar


PIECES = st.recursive(
    st.sampled_from(
        ["a", "b", "[ab]", ".", r"\(", "[(]", "[)a]", "[]b]", r"[\]a]", "[[a](]", r"\x61", "a{2}"]
    ),
    lambda inner: st.one_of(
        st.builds("({}){{{}}}".format, inner, st.integers(0, 5)),
        st.builds("({}){{{},}}".format, inner, st.integers(0, 5)),
        st.builds("({})+{{{}}}".format, inner, st.integers(0, 5)),
        st.builds("({}){{2}}{{{}}}".format, inner, st.integers(0, 5)),
        st.builds("({})?".format, inner),
        st.builds("({})*".format, inner),
        st.builds("({}|{})".format, inner, inner),
        st.builds("{}{}".format, inner, inner),
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(pattern=PIECES)
def test_no_regular_expression_forces_more_than_its_bound(grammars: Grammars, pattern: str) -> None:
    matcher = grammars.matcher(Constraint("regex", pattern))
    tokenizer = byte_tokenizer()
    output: list[int] = []
    for _ in range(6):
        forced = list(matcher.forced(output))
        assert len(tokenizer.decode(forced)) <= of_regex(pattern)
        for text in "ab":
            step = tokenizer.encode(text)
            if matcher.count_allowed(output, step) == len(step):
                output = [*output, *step]
                break
        else:
            break


def test_bounds_multiply_along_repetitions_and_references() -> None:
    assert of_regex("(a{10}){20}") >= 200
    assert of_regex("a{1,200}") < 20
    assert of_regex("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}") < 1000
    assert of_regex("[(]{10}[)]{20}") < 200
    assert of_regex("(?x)(a #(\n){1000}#)") >= 1000  # comments hide a sign
    assert of_regex("(abcdefghij[[[[a]]])(]b){1000}") >= 10_000  # a class, four deep
    assert of_regex("(a") == math.inf
    assert of_schema({"type": "array", "items": {"const": "abc"}, "minItems": 50}) >= 150
    assert of_schema({"properties": {"pattern": {"const": 1}, "minItems": {"const": 2}}}) < 400
    assert of_schema(TWICE) > 2**60
    assert of_schema(ENDLESS) == math.inf
    assert of_schema({"const": "lorem ipsum " * 500}) < MOST_FORCED
    assert of_schema({"type": "array", "items": {"const": 1}, "minItems": 10**400}) > MOST_FORCED
    assert of_schema({"$ref": "#/$defs/none"}) == math.inf
    assert of_schema({"$ref": "elsewhere"}) == math.inf
    assert of_lark(DOUBLING) > 2**60
    assert of_lark('start: "x" | "(" start ")"') == math.inf
    assert of_lark("start: %json {not json") == math.inf
    assert of_lark("start: %json " + str(10**400)) < 100
    assert of_lark('start: "{9999}" // {9999}\n') < 100
    assert of_lark('start: rest ~ 30\nrest: %json {"const": "hello"} "y"') >= 150


@pytest.mark.parametrize(
    "text",
    ['start: "' + '\\"' * 100_000, "start: " + '"a\\' * 60_000, "a" * 250_000, "a[" * 120_000],
)
def test_a_grammar_that_nothing_closes_is_looked_at_once(grammars: Grammars, text: str) -> None:
    """Looked at anew from each of its signs, it would stop the whole program for minutes."""
    with pytest.raises(RequestError, match="The grammar cannot be used"):
        grammars.matcher(Constraint("lark", text))
