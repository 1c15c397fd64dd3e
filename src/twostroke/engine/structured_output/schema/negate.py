"""What it means that a value does not fit a schema: one of its keywords does not hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from twostroke.engine.structured_output.schema.automata import opposite
from twostroke.engine.structured_output.schema.branch import SchemaItem
from twostroke.engine.structured_output.schema.document import SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.engine.structured_output.schema.document import Document, Node

# Keywords for use in here: values that are not allowed, and types.
NOT_ENUM: Final = "not enum"
NOT_TYPE: Final = "not type"
NOT_PATTERN: Final = "not pattern"


class Negation(NamedTuple):
    """A schema that fits if a keyword does not hold; if it is not exact, also some other values."""

    item: SchemaItem
    keyword: str
    is_exact: bool


def denials(document: Document, node: Node) -> Iterator[Negation]:
    """Yield the ways in which a value can fail to fit a schema."""
    schema = node.schema
    is_hidden = node.resource.is_old and "$ref" in schema
    for keyword, value in schema.items():
        if is_hidden and keyword != "$ref":
            continue
        if keyword == "$ref":
            value = document.referred(node, value)  # noqa: PLW2901 - the same, found
        ways = _WAYS[keyword](value) if keyword in _WAYS else None
        is_exact = ways is not None
        if ways is None or (keyword in _PARTIAL and not _PARTIAL[keyword].isdisjoint(schema)):
            if keyword not in _WEAK and keyword not in SCHEMAS - {"then", "else"}:
                continue
            ways, is_exact = [{"type": _WEAK[keyword]} if keyword in _WEAK else {}], False
        for number, made in enumerate(ways):
            item = SchemaItem(document.made(made, node, ("denied", id(node), keyword, number)))
            yield Negation(item, keyword, is_exact)


def _limits(value: Any, typ: str, keyword: str) -> list[dict[str, Any]] | None:
    return None if isinstance(value, bool) else [{"type": typ, keyword: value}]


def _unmatched(value: str) -> list[dict[str, Any]] | None:
    return None if opposite(value) is None else [{"type": "string", NOT_PATTERN: value}]


def _absent(names: Any) -> list[dict[str, Any]]:
    listed = names if isinstance(names, list) else []
    return [{"type": "object", "properties": {name: False}} for name in listed]


def _undepended(value: dict[str, list[str]]) -> list[dict[str, Any]]:
    return [
        {"type": "object", "required": [name], "properties": {other: False}}
        for name, others in value.items()
        for other in others
    ]


def _unfit_members(value: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "object", "required": [name], "properties": {name: {"not": inner}}}
        for name, inner in value.items()
    ]


def _unfit_item(value: Any) -> list[dict[str, Any]] | None:
    return None if isinstance(value, list) else [{"type": "array", "contains": {"not": value}}]


def _counts(typ: str, keyword: str, change: int) -> Callable[[Any], list[dict[str, Any]]]:
    return lambda value: [{"type": typ, keyword: value + change}] if value + change >= 0 else []


# Keywords to schemas of the values for which they do not hold; None if those cannot be described.
_WAYS: Final[dict[str, Callable[[Any], list[dict[str, Any]] | None]]] = {
    "type": lambda value: [{NOT_TYPE: value}],
    NOT_TYPE: lambda value: [{"type": value}],
    "enum": lambda value: [{NOT_ENUM: value}],
    "const": lambda value: [{NOT_ENUM: [value]}],
    NOT_ENUM: lambda value: [{"enum": value}],
    "minimum": lambda value: _limits(value, "number", "exclusiveMaximum"),
    "maximum": lambda value: _limits(value, "number", "exclusiveMinimum"),
    "exclusiveMinimum": lambda value: _limits(value, "number", "maximum"),
    "exclusiveMaximum": lambda value: _limits(value, "number", "minimum"),
    "minLength": _counts("string", "maxLength", -1),
    "maxLength": _counts("string", "minLength", 1),
    "minItems": _counts("array", "maxItems", -1),
    "maxItems": _counts("array", "minItems", 1),
    "minProperties": _counts("object", "maxProperties", -1),
    "maxProperties": _counts("object", "minProperties", 1),
    "pattern": _unmatched,
    NOT_PATTERN: lambda value: [{"type": "string", "pattern": value}],
    "required": _absent,
    "dependentRequired": _undepended,
    "properties": _unfit_members,
    "items": _unfit_item,
    "contains": lambda value: [{"type": "array", "items": {"not": value}}],
    "$ref": lambda value: [{"not": value}],
    "allOf": lambda value: [{"not": one} for one in value],
    "anyOf": lambda value: [{"allOf": [{"not": one} for one in value]}],
    "not": lambda value: [{"allOf": [value]}],
}
# Beside one of these, a keyword means something else.
_PARTIAL: Final = {
    "items": frozenset(("prefixItems",)),
    "contains": frozenset(("minContains", "maxContains")),
}
# These cannot be denied in full: only the type of the values that could fail is known.
_WEAK: Final = {
    **dict.fromkeys(("pattern", "format"), "string"),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum", "multipleOf"), "number"),
    **dict.fromkeys(("additionalItems", "uniqueItems", "unevaluatedItems"), "array"),
    **dict.fromkeys(("contains", "items", "prefixItems"), "array"),
    **dict.fromkeys(("patternProperties", "additionalProperties", "propertyNames"), "object"),
    **dict.fromkeys(("unevaluatedProperties", "dependentSchemas", "dependencies"), "object"),
}
