"""Patterns that were rewritten without look-around match the same texts."""

from __future__ import annotations

import random
import time
from functools import cache

import jsonschema_rs
import pytest
import regex

from twostroke.engine.structured_output.schema.automata import opposite_pattern, without_look_around

PATTERNS = [
    *("^(?!secret).*$", "^(?=.*[A-Z])(?=.*[0-9]).{4,}$", "^(?!.*(foo|bar)).*$", "^(?:(?!foo).)*$"),
    *("(?<!a)b", "(?<=a)b$", "^(?!a)b", "^(?!(?:admin|root)$)[a-z]{3,8}$", "a(?!b)c*$", "(^a|b)c"),
    *(
        r"\bword\b",
        r"^\b\w+\b$",
        r"\Bx\B",
        r"^[^\d](?=x)",
        r"^(?!\s)(?!.*\s$).+$",
        "x$|^y",
        "(?=a)b",
    ),
    *(r"^(?!000|9\d\d)\d{3}-(?!00)\d{2}$", "^(?!-)[a-z0-9-]{1,20}(?<!-)$", "^(?!(?!a)b)..$", "^$"),
    *("(a|b(?=c))*d", "^(a(?!aa))+$", "^(?=(?=ab)a)", r"^\u0061[^\u0000-\u001f]?$"),
]
WORDS = [
    "123-45",
    "secret",
    "foo",
    "bar",
    "word",
    "admin",
    "root",
    "a",
    "b",
    "c",
    "x",
    " ",
    "-",
    "A1",
    "000",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_text_matches_as_before(pattern: str) -> None:
    random_texts = random.Random(pattern)
    texts = without_look_around(pattern)
    other = opposite_pattern(pattern)
    validator = jsonschema_rs.validator_for({"pattern": pattern})
    matched = 0
    for _ in range(200):
        words = random_texts.choices([*WORDS, *"abcfox-B09 d\n"], k=random_texts.randint(0, 5))
        text = "".join(words)
        is_right = validator.is_valid(text)
        matched += is_right
        if texts is None:  # nothing matches it
            assert not is_right
        else:
            assert all(_compiled(part).fullmatch(text) for part in texts) is is_right, text
        if other is not None:
            assert bool(_compiled(other).fullmatch(text)) is not is_right, text
    assert 0 < matched < 200 or pattern in {"(?=a)b", "^$", "^(?!a)b"}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_text_that_engines_read_in_several_ways_is_not_written(pattern: str) -> None:
    random_texts = random.Random(pattern)
    texts, other = without_look_around(pattern), opposite_pattern(pattern)
    validator = jsonschema_rs.validator_for({"pattern": pattern})
    for _ in range(200):
        words = random_texts.choices([*WORDS, *"é\r\u2028\u2029ß"], k=random_texts.randint(1, 5))
        text = "".join(words)
        if texts is not None and all(_compiled(part).fullmatch(text) for part in texts):
            assert validator.is_valid(text), ascii(text)
        if other is not None and _compiled(other).fullmatch(text):
            assert not validator.is_valid(text), ascii(text)


@cache
def _compiled(text: str) -> regex.Pattern[str]:
    """Compile an expression in llguidance's notation with the module `regex`."""
    return regex.compile(
        regex.sub(r"\\x\{([0-9a-f]+)\}", lambda m: f"\\U{int(m[1], 16):08x}", text)
    )


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"(a)\1", r"\p{L}(?=a)", "(?=", "[", "a{200}(?=b)", "(?=(a|b)*a(a|b){30}$)", "*(?=a)"),
        *("(?<!^)x", "(?=a" * 2000, "((((a{90}){90}){90}){90})(?=b)", "(?=" + "(a|b|" * 300),
    ],
)
def test_other_patterns_are_given_up_at_once(pattern: str) -> None:
    begun_s = time.process_time()
    assert without_look_around(pattern) is None
    assert time.process_time() - begun_s < 20
