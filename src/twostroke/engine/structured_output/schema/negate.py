"""Negates schemas: a value does not fit a schema if it breaks one of its keywords."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from twostroke.engine.structured_output.schema.automata import opposite_pattern
from twostroke.engine.structured_output.schema.branch import SchemaItem
from twostroke.engine.structured_output.schema.document import SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.engine.structured_output.schema.document import Document, Node

# Internal keywords for values, types and patterns that are not allowed.
NOT_ENUM: Final = "not enum"
NOT_TYPE: Final = "not type"
NOT_PATTERN: Final = "not pattern"


class Negation(NamedTuple):
    """A schema for the values that break one keyword of a negated JSON schema.

    If `is_exact` is false, the schema also allows some values that do not break the keyword.
    """

    item: SchemaItem
    keyword: str
    is_exact: bool


def negations(document: Document, node: Node) -> Iterator[Negation]:
    """Yield a schema for each way in which a value can break a node's JSON schema.

    A value fits `not` if it fits one of the yielded schemas.
    """
    schema = node.schema
    is_hidden = node.resource.is_old and "$ref" in schema
    for keyword, value in schema.items():
        if is_hidden and keyword != "$ref":
            continue
        if keyword == "$ref":
            value = document.resolve(node, value)  # noqa: PLW2901 - the schema in place of its reference
        schemas = _OPPOSITES[keyword](value) if keyword in _OPPOSITES else None
        is_exact = schemas is not None
        if schemas is None or (keyword in _PARTIAL and not _PARTIAL[keyword].isdisjoint(schema)):
            if keyword not in _ONLY_TYPE and keyword not in SCHEMAS - {"then", "else"}:
                continue
            schemas = [{"type": _ONLY_TYPE[keyword]} if keyword in _ONLY_TYPE else {}]
            is_exact = False
        for number, opposite_schema in enumerate(schemas):
            key = ("denied", id(node), keyword, number)
            item = SchemaItem(document.derived(opposite_schema, node, key))
            yield Negation(item, keyword, is_exact)


def _limits(value: Any, typ: str, keyword: str) -> list[dict[str, Any]] | None:
    return None if isinstance(value, bool) else [{"type": typ, keyword: value}]


def _unmatched(value: str) -> list[dict[str, Any]] | None:
    return None if opposite_pattern(value) is None else [{"type": "string", NOT_PATTERN: value}]


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


# For each keyword, the schemas of the values that break it; None if no schema describes them.
_OPPOSITES: Final[dict[str, Callable[[Any], list[dict[str, Any]] | None]]] = {
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
    "allOf": lambda value: [{"not": schema} for schema in value],
    "anyOf": lambda value: [{"allOf": [{"not": schema} for schema in value]}],
    "not": lambda value: [{"allOf": [value]}],
}
# Neighbours with which a keyword has another meaning.
_PARTIAL: Final = {
    "items": frozenset(("prefixItems",)),
    "contains": frozenset(("minContains", "maxContains")),
}
# Keywords without an exact opposite: only the type of the values that can break them is known.
_ONLY_TYPE: Final = {
    **dict.fromkeys(("pattern", "format"), "string"),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum", "multipleOf"), "number"),
    **dict.fromkeys(("additionalItems", "uniqueItems", "unevaluatedItems"), "array"),
    **dict.fromkeys(("contains", "items", "prefixItems"), "array"),
    **dict.fromkeys(("patternProperties", "additionalProperties", "propertyNames"), "object"),
    **dict.fromkeys(("unevaluatedProperties", "dependentSchemas", "dependencies"), "object"),
}
