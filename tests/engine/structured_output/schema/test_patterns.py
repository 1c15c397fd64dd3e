"""Patterns with sets and look-around: the grammar enforces the part that it can."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import TYPE_CHECKING, Any

import pytest

from support.byte_tokenizer import byte_tokenizer
from twostroke.core.constraint import Constraint
from twostroke.engine.structured_output.grammar import Grammars
from twostroke.engine.structured_output.schema.patterns import relax_pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    Allows = Callable[[dict[str, Any], str], bool]


@pytest.fixture(scope="module")
def allows() -> Allows:
    """Return a function that tells whether the grammar of a schema allows a string as its value."""
    tokenizer = byte_tokenizer()
    grammars = Grammars(tokenizer, tokenizer.vocab_size)

    def is_allowed(schema: dict[str, Any], text: str) -> bool:
        matcher = grammars.matcher(Constraint("json_schema", json.dumps(schema)))
        tokens = [*tokenizer.encode(json.dumps(text)), min(tokenizer.eos_ids)]
        return matcher.count_allowed((), tokens) == len(tokens)

    return is_allowed


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^(?!admin)[a-z]{3,10}$", "adam", "Admin42"),
        (r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{8,12}$", "Abcdefg1", "Abc-efg1"),
        (r"^\b\w+\b$", "ABC", "A C"),
        (r"^(?:(?!\)[)]).)[a](?<=[)(]|\)|(a))$", "ba", "bb"),
    ],
)
def test_the_rest_of_a_pattern_is_enforced(
    allows: Allows, pattern: str, good: str, bad: str
) -> None:
    schema = {"type": "string", "pattern": pattern}
    for variant in (schema, {"not": {"not": schema}}):
        assert allows(variant, good)
    assert not allows(schema, bad)


def test_a_pattern_that_must_not_match_is_left_whole(allows: Allows) -> None:
    for schema in ({"not": {"pattern": "^(?!b)a?$"}}, {"if": {"pattern": "(?!b)a"}, "else": {}}):
        assert allows({"type": "string", **schema}, "b")


def test_patterns_that_cannot_be_relaxed_are_left_out() -> None:
    for source in ("(?=[[])a", "(?=[])])a", r"(?=a)(b)\1", "(?=(a)b", "(?=a", "a(?=b)^c"):
        assert relax_pattern(source) is None
    for hostile in ("(?=", "(?=a)", "[a", "[", "(?=a"):
        assert relax_pattern(hostile * 50_000) is None


def test_the_rest_of_a_pattern_matches_each_text_that_the_pattern_matches(allows: Allows) -> None:
    draw = random.Random(7)
    texts = [
        "".join(characters)
        for size in range(5)
        for characters in itertools.product("ab( ", repeat=size)
    ]
    num_accepted = 0
    for _ in range(150):
        source = _asserting(draw)
        if relax_pattern(source) is None:
            continue
        compiled_pattern = re.compile(source)
        accepted = [text for text in texts if compiled_pattern.search(text)]
        for text in draw.sample(accepted, min(5, len(accepted))):
            assert allows({"type": "string", "pattern": source}, text), (source, text)
            num_accepted += 1
    assert num_accepted > 200


def test_sets_may_exclude_quotes(allows: Allows) -> None:
    for pattern in ('^[^"]+$', r"^[\x00-!]+$", r'^([^"]|\x00)+$', "^[!]+$"):
        assert allows({"type": "string", "pattern": pattern}, "!")
        assert not allows({"type": "string", "pattern": pattern}, '!"'), pattern
    assert not allows({"type": "string", "pattern": r"^[^\\]+$"}, "!\\")
    for pattern in (r"^a(\x01b|c)$", r"^a([\x7f]b|c)$"):
        assert not allows({"type": "string", "pattern": pattern}, "ab")
    assert not allows({"type": "string", "not": {"const": '"'}}, '"')


def _asserting(draw: random.Random, depth: int = 0) -> str:
    """Return a random regular expression, often with look-around or word boundaries."""
    atoms = ["a", "b", r"\(", ".", r"\w", "[ab]", "[^a(]", r"[)\]b]", r"\b", r"\B", "(?<=a)"]
    atoms += ["(?<![)])"]
    if depth < 3:
        atoms += ["({})", "(?:{}|b)", "(?={})", "(?!{})", "(?:b?{}a)*", "(?:{}.){{1,2}}"]
    chosen_forms = draw.choices(atoms, k=draw.randint(1, 3))
    parts = [
        form.format(_asserting(draw, depth + 1)) if "{}" in form else form for form in chosen_forms
    ]
    text = "".join(parts)
    return text if depth else draw.choice(("", "^")) + text + draw.choice(("", "$"))
