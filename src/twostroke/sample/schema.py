"""Which keywords of JSON Schema are enforced; every other one is refused, never ignored."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.errors import nearest

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
}

_MOST_SHOWN: Final = 80  # characters of a keyword, and of the end of its path
MOST_FORCED: Final = 8000  # bytes, which llguidance follows in some 50 ms
_DEFINITIONS: Final = frozenset(("$defs", "definitions"))
_MINIMA: Final = ("minItems", "minProperties", "minLength")
_COUNT: Final = re.compile(r"\{\s*(\d+)")  # in a pattern

_KNOWN: Final = SCHEMAS | NAMED_SCHEMAS | VALUES | ANNOTATIONS


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


def forces_little(schema: object) -> bool:
    """Return whether a schema can force at most about `MOST_FORCED` bytes of text in a row.

    Where text can go on in one way only, llguidance follows it to its end without a limit, in the
    middle of a step. This walks over the schema as often as its references and minimum counts
    repeat it, and gives up after as many bytes; so cycles end, too.
    """
    left = float(MOST_FORCED)
    waiting: list[tuple[Any, float]] = [(schema, 1.0)]
    while waiting and left > 0:
        part, times = waiting.pop()
        if isinstance(part, dict):
            counts = (part[name] for name in _MINIMA if isinstance(part.get(name), (int, float)))
            times *= math.prod(max(1.0, min(count, MOST_FORCED)) for count in counts)
            left -= 2 * times
            for name, value in part.items():
                if name in _DEFINITIONS or (name in ANNOTATIONS and isinstance(value, str)):
                    continue
                left -= (4 + len(name)) * times
                if name == "$ref":
                    waiting.append((_referred(schema, value), times))
                elif name in {"pattern", "patternProperties"}:
                    left -= pattern_size(json.dumps(value)) * times
                else:
                    waiting.append((value, times))
        elif isinstance(part, list):
            waiting += [(one, times) for one in part]
            left -= 2 * times
        else:
            left -= len(json.dumps(part)) * times if isinstance(part, str) else 24 * times
    return left > 0


def pattern_size(pattern: str) -> float:
    """Return a bound on the bytes that a regular expression forces: its size by its counts."""
    counts = (float(count[:9]) for count in _COUNT.findall(pattern))
    return len(pattern.encode()) * math.prod(max(1.0, count) for count in counts)


def _referred(root: object, pointer: object) -> object:
    """Return the part of a schema that a JSON pointer names; None if there is none."""
    here = root
    for step in str(pointer).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(here, list) and key.isdecimal() and int(key) < len(here):
            here = here[int(key)]
        else:
            here = here.get(key) if isinstance(here, dict) else None
    return here


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
