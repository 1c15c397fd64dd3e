r"""Control characters in strings: written as escapes where a schema asks for them, and only there.

llguidance allows `\u0007` for each control character that a string may have, or for none. It has
them allowed only if a schema needs them; the other strings then get a pattern without them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from twostroke.schema.patterns import ANY_ONE, UNWRITTEN, without

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Schema = dict[str, Any]

_WITHOUT: Final = r"^[^\x00-\x07\x0b\x0e-\x1f\x7f]*$"
_EACH: Final = r"\x00-\x1f\x7f"  # of names all: a tab could be written in two ways, as two names
_CONTROLS: Final = frozenset(map(chr, (*range(8), 0x0B, *range(0x0E, 0x20), 0x7F)))
_ESCAPE: Final = re.compile(r"\\u\{[0-9a-f]+\}")  # the spelling of control characters in `patterns`


def needs_escapes(schema: Schema) -> bool:
    """Return whether a prepared schema has strings that need escapes of control characters."""
    return any(map(_asks, _schemas(schema)))


def with_plain_strings(schema: Schema) -> bool:
    """Keep control characters out of the strings and names that do not ask for them.

    Return whether some members that have no name in the schema are left out because of that.
    """
    is_less = False
    for part in _schemas(schema):
        if part.get("type") == "string" and "pattern" not in part:
            part["pattern"] = _WITHOUT
        if part.get("type") == "object" and part.get("additionalProperties", False) is not False:
            pattern = None if "patternProperties" in part else _but(part.get("properties", {}))
            is_less = is_less or pattern is None
            if pattern is not None:
                part["patternProperties"] = {pattern: part["additionalProperties"]}
            part["additionalProperties"] = False
    return is_less


def _but(names: Iterable[str]) -> str | None:
    """Return a pattern of other names without control characters; None if it would be too large."""
    pattern = without(list(names))
    return pattern and pattern.replace(ANY_ONE, f"[^{_EACH}]").replace(UNWRITTEN, _EACH)


def _asks(schema: Schema) -> bool:
    texts = [value for value in schema.get("enum", ()) if isinstance(value, str)]
    if any(not _CONTROLS.isdisjoint(text) for text in texts):
        return True
    patterns = [schema.get("pattern", ""), *schema.get("patternProperties", ())]
    return any(map(_ESCAPE.search, patterns))


def _schemas(schema: Any) -> Iterator[Schema]:
    """Yield all schemas in a prepared one."""
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
