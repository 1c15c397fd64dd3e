"""Adds keywords that limit values of one type, such as `minimum` or `pattern`, to a branch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from twostroke.engine.structured_output.schema.automata import opposite_pattern
from twostroke.engine.structured_output.schema.branch import SchemaBranch, kinds_of
from twostroke.engine.structured_output.schema.formats import FORMATS
from twostroke.engine.structured_output.schema.negate import NOT_ENUM, NOT_PATTERN, NOT_TYPE
from twostroke.engine.structured_output.schema.patterns import (
    RegexPattern,
    relax_pattern,
    translate_pattern,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.engine.structured_output.schema.document import Node


def _type(branch: SchemaBranch, value: Any) -> None:
    branch.kinds &= kinds_of(value)


def _not_type(branch: SchemaBranch, value: Any) -> None:
    branch.kinds -= kinds_of(value)


def _above(branch: SchemaBranch, value: Any) -> None:
    if not isinstance(value, bool):  # in draft 4, a boolean next to `minimum` or `maximum`
        branch.limit_low(value, is_open=True)


def _below(branch: SchemaBranch, value: Any) -> None:
    if not isinstance(value, bool):
        branch.limit_high(value, is_open=True)


def _required(branch: SchemaBranch, value: Any) -> None:
    if isinstance(value, list):
        branch.required |= dict.fromkeys(value)


def _at_least(name: str) -> Callable[[SchemaBranch, Any], None]:
    return lambda branch, value: setattr(branch, name, getattr(branch, name).narrowed(value))


def _at_most(name: str) -> Callable[[SchemaBranch, Any], None]:
    return lambda branch, value: setattr(branch, name, getattr(branch, name).narrowed(0, value))


# Each adds the value of its keyword to a branch.
LIMITS: Final[dict[str, Callable[[SchemaBranch, Any], None]]] = {
    "type": _type,
    NOT_TYPE: _not_type,
    NOT_ENUM: SchemaBranch.exclude,
    "exclusiveMinimum": _above,
    "exclusiveMaximum": _below,
    "multipleOf": SchemaBranch.limit_multiple,
    "required": _required,
    "minLength": _at_least("lengths"),
    "maxLength": _at_most("lengths"),
    "minItems": _at_least("num_items"),
    "maxItems": _at_most("num_items"),
    "minProperties": _at_least("num_members"),
    "maxProperties": _at_most("num_members"),
}


def _low(branch: SchemaBranch, node: Node) -> None:
    is_open = node.schema.get("exclusiveMinimum") is True
    branch.limit_low(node.schema["minimum"], is_open=is_open)


def _high(branch: SchemaBranch, node: Node) -> None:
    is_open = node.schema.get("exclusiveMaximum") is True
    branch.limit_high(node.schema["maximum"], is_open=is_open)


def _pattern(branch: SchemaBranch, node: Node) -> None:
    pattern = translate_pattern(node.schema["pattern"])
    if pattern is None:
        branch.add_gap(node.location("pattern"), "string")
        pattern = relax_pattern(node.schema["pattern"])
    if pattern is not None:
        branch.patterns[pattern] = None


def _not_pattern(branch: SchemaBranch, node: Node) -> None:
    """Add the pattern of all strings that the schema's excluded pattern does not match."""
    source = node.schema[NOT_PATTERN]
    text = opposite_pattern(source)
    assert text is not None
    branch.patterns[RegexPattern(text, text)] = None


def _format(branch: SchemaBranch, node: Node) -> None:
    name = node.schema["format"]
    pattern = FORMATS.get(name) if isinstance(name, str) else None
    if pattern is not None:
        branch.patterns[RegexPattern(pattern, pattern)] = None
    elif name == "regex":  # not a regular language
        branch.add_gap(node.location("format"), "string")


def _unique(branch: SchemaBranch, node: Node) -> None:
    if node.schema["uniqueItems"] is True:
        branch.unique = node.location("uniqueItems")


# Keywords that also depend on their neighbours in the schema, or need its location.
PLACED_LIMITS: Final[dict[str, Callable[[SchemaBranch, Node], None]]] = {
    "minimum": _low,
    "maximum": _high,
    "pattern": _pattern,
    NOT_PATTERN: _not_pattern,
    "format": _format,
    "uniqueItems": _unique,
}
