"""Reads the values of tool call arguments that a model writes as literals, without quotes."""

from __future__ import annotations

import json
from typing import Any, Final

import regex

from twostroke.engine.structured_output.notations import BLANKS

# The literals of words, and Python's spelling of them, with their types.
_WORDS: Final = {
    "true": ("true", "boolean"),
    "false": ("false", "boolean"),
    "null": ("null", "null"),
    "True": ("true", "boolean"),
    "False": ("false", "boolean"),
    "None": ("null", "null"),
}
_NUMBER: Final = regex.compile(
    r"-?+(?:0|[1-9][0-9]*+)(?<fraction>(?:\.[0-9]++)?+(?:[eE][+-]?+[0-9]++)?+)"
)
_TYPES_BY_SIGN: Final = {"[": "array", "{": "object", '"': "string"}


def to_json_literal(text: str, types: frozenset[str]) -> str | None:
    """Return the JSON of a text that is a JSON literal of one of some types; None if it is not.

    Blanks may surround the literal. `True`, `False` and `None` count as literals, too.
    """
    text = text.strip(BLANKS)
    if not text:
        return None
    if (sign_type := _TYPES_BY_SIGN.get(text[0])) is not None:
        return text if sign_type in types and _is_json(text) else None
    if text in _WORDS:
        literal, word_type = _WORDS[text]
        return literal if word_type in types else None
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    is_number = "number" in types or ("integer" in types and not match["fraction"])
    return text if is_number else None


def _is_json(text: str) -> bool:
    """Whether a text is JSON; numbers may have any number of digits."""
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> Any:
    raise ValueError(name)
