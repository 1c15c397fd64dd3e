"""Prepares a JSON schema for llguidance, which makes grammars of schemas."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.errors import nearest
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Keywords by their contents: one schema (or a list of them), or schemas under names.
SCHEMAS: Final = frozenset(
    ("additionalItems", "additionalProperties", "allOf", "anyOf", "items", "oneOf", "prefixItems")
)
NAMED_SCHEMAS: Final = frozenset(("$defs", "definitions", "patternProperties", "properties"))
VALUES: Final = frozenset(
    (
        *("$anchor", "$id", "$ref", "$schema", "const", "enum", "exclusiveMaximum"),
        *("exclusiveMinimum", "format", "maxItems", "maxLength", "maxProperties", "maximum"),
        *("minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern"),
        *("required", "type"),
    )
)
# These say nothing about which values are valid.
ANNOTATIONS: Final = frozenset(
    ("$comment", "default", "deprecated", "description", "examples", "readOnly", "title")
) | {"writeOnly"}

ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}

# JSON is written as json.dumps does. A schema allows any number of blanks, and a weak model
# would fill its answer with them.
JSON_FORM: Final[Mapping[str, Any]] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    # A name written with escapes would not be recognized: `{"r\\u006fle": 1}` has a `role`.
    "json_allowed_escapes": 'nrbtf\\"',
}

_MOST_SHOWN: Final = 80  # characters of a keyword, and of the end of its path
_KNOWN: Final = SCHEMAS | NAMED_SCHEMAS | VALUES | ANNOTATIONS


class Prepared(Frozen):
    """A schema as llguidance reads it, and what of it the grammar does not hold.

    Each of `gaps` is a keyword with its place, such as `uniqueItems (/properties/tags)`. A finished
    answer must be checked against the whole schema if there are any; without them, each value that
    the grammar allows is valid.
    """

    text: str
    gaps: tuple[str, ...] = ()


def prepare(text: str) -> Prepared:
    """Return a JSON schema, rewritten for llguidance.

    Raises:
        ValueError: it is not a schema, cannot be followed, or no value fits; the sentence says why.
    """
    check_keywords(text)
    return Prepared(text)


def check_keywords(text: str) -> None:
    """Check that a JSON schema asks for nothing that would be ignored.

    Raises:
        ValueError: it is not JSON, or has a keyword that is not known; the sentence names it.
    """
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(schema, dict):
        raise ValueError("it must be an object")  # noqa: TRY004 - a wrong value, as others are
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        path, part = waiting.pop()
        if isinstance(part, dict):
            waiting += _inside(part, path)


def _inside(schema: dict[str, Any], outer: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas in a schema, each with the end of its path."""
    for keyword, value in schema.items():
        path = _joined(outer, keyword)
        if keyword not in _KNOWN:
            word = keyword[:_MOST_SHOWN]
            where = path if len(path) <= _MOST_SHOWN else f"…{path[-_MOST_SHOWN:]}"
            raise ValueError(f"'{word}' ({where}) is not supported.{nearest(word, _KNOWN)}")
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            yield from ((_joined(path, name), inner) for name, inner in value.items())
        elif keyword in SCHEMAS:
            many = value if isinstance(value, list) else [value]
            yield from ((path, inner) for inner in many)


def _joined(path: str, step: str) -> str:
    """Return a JSON pointer, or of a long one the end: names may be long, and schemas many."""
    return f"{path}/{step}"[-_MOST_SHOWN - 1 :]
