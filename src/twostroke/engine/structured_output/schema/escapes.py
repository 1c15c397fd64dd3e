r"""Allows escaped control characters, such as `\u0007`, only in strings whose schema needs them.

llguidance has one switch for a whole grammar: escapes of control characters are allowed in all
strings, or in none. They are allowed if the schema of one string needs them. The other strings then
get a pattern without control characters.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from twostroke.engine.structured_output.schema.patterns import (
    ANY_CHARACTER,
    UNMENTIONED_CONTROLS,
    pattern_without,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Schema = dict[str, Any]

_NO_CONTROLS: Final = r"^[^\x00-\x07\x0b\x0e-\x1f\x7f]*$"
# Names get no control characters: a tab, for example, can be written in two ways, and the grammar
# would count these as two names.
_ALL_CONTROLS: Final = r"\x00-\x1f\x7f"
_CONTROLS: Final = frozenset(map(chr, (*range(8), 0x0B, *range(0x0E, 0x20), 0x7F)))
_ESCAPE: Final = re.compile(r"\\u\{[0-9a-f]+\}")  # the spelling of control characters in `patterns`


def needs_escapes(schema: Schema) -> bool:
    """Whether answers for a rewritten JSON schema may need escaped control characters in strings.

    They do if an `enum` or a pattern contains such characters. The grammar then allows escapes in
    strings.
    """
    return any(map(_names_control, _schemas(schema)))


def with_plain_strings(schema: Schema) -> bool:
    """Forbid control characters in all strings and names whose schema does not mention them.

    The schema is changed in place. Returns whether this also forbids some unnamed members that the
    original schema allows. Used if some strings of the schema need escaped control characters.
    """
    has_excluded_members = False
    for part in _schemas(schema):
        if part.get("type") == "string" and "pattern" not in part:
            part["pattern"] = _NO_CONTROLS
        if part.get("type") == "object" and part.get("additionalProperties", False) is not False:
            pattern = None
            if "patternProperties" not in part:
                pattern = _other_names(part.get("properties", {}))
            has_excluded_members = has_excluded_members or pattern is None
            if pattern is not None:
                part["patternProperties"] = {pattern: part["additionalProperties"]}
            part["additionalProperties"] = False
    return has_excluded_members


def _other_names(names: Iterable[str]) -> str | None:
    """Return a pattern for member names other than these, without control characters.

    None if the pattern would be too large.
    """
    pattern = pattern_without(list(names))
    return pattern and pattern.replace(ANY_CHARACTER, f"[^{_ALL_CONTROLS}]").replace(
        UNMENTIONED_CONTROLS, _ALL_CONTROLS
    )


def _names_control(schema: Schema) -> bool:
    """Whether a schema's `enum` or patterns (not its subschemas) contain control characters."""
    texts = [value for value in schema.get("enum", ()) if isinstance(value, str)]
    if any(not _CONTROLS.isdisjoint(text) for text in texts):
        return True
    patterns = [schema.get("pattern", ""), *schema.get("patternProperties", ())]
    return any(map(_ESCAPE.search, patterns))


def _schemas(schema: Any) -> Iterator[Schema]:
    """Yield a rewritten JSON schema and all its subschemas."""
    if isinstance(schema, dict):
        yield schema
        for keyword in ("anyOf", "allOf", "prefixItems"):
            for inner in schema.get(keyword, ()):
                yield from _schemas(inner)
        for keyword in ("properties", "patternProperties", "$defs"):
            for inner in schema.get(keyword, {}).values():
                yield from _schemas(inner)
        for keyword in ("items", "additionalProperties"):
            yield from _schemas(schema.get(keyword))
