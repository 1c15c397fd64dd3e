"""Which keywords of JSON Schema are kept to: every other one is refused, never passed over."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from twostroke.core.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Keywords by what stands in them: one schema (or a list of them), or schemas under names.
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

# JSON is written as Python's json.dumps does: a weak model would otherwise fill its answer with
# blanks, of which a schema allows any number.
JSON_FORM: Final[Mapping[str, Any]] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}

# What is around something, and its name there. Written out for all, the paths in a schema with one
# long name would take its length times its size.
_Place: TypeAlias = tuple[Any, str] | None

_MOST_SHOWN: Final = 80  # characters of a keyword, and of the end of its path

_KNOWN: Final = SCHEMAS | NAMED_SCHEMAS | VALUES | ANNOTATIONS


def check_keywords(text: str) -> None:
    """Check that a JSON schema asks for nothing that would be passed over.

    Raises:
        ValueError: it is not JSON, or has a keyword that is not known; the sentence names it.
    """
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(schema, dict):
        raise ValueError("it must be an object")  # noqa: TRY004 - a wrong value, as others are
    waiting: list[tuple[_Place, Any]] = [(None, schema)]
    while waiting:
        place, part = waiting.pop()
        if isinstance(part, dict):
            waiting += _inside(part, place)


def _inside(schema: dict[str, Any], outer: _Place) -> Iterator[tuple[_Place, Any]]:
    """Yield the schemas in a schema, with their places."""
    for keyword, value in schema.items():
        place = (outer, keyword)
        if keyword not in _KNOWN:
            word, path = keyword[:_MOST_SHOWN], _path(place)
            raise ValueError(f"'{word}' ({path}) is not supported.{nearest(word, _KNOWN)}")
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            yield from (((place, name), inner) for name, inner in value.items())
        elif keyword in SCHEMAS:
            many = value if isinstance(value, list) else [value]
            yield from ((place, inner) for inner in many)


def _path(place: _Place) -> str:
    """Return where something is as a JSON pointer, of a long one the end."""
    steps = []
    while place is not None:
        place, step = place
        steps.append(f"/{step}")
    path = "".join(reversed(steps))
    return path if len(path) <= _MOST_SHOWN else f"…{path[-_MOST_SHOWN:]}"
