"""Finds the JSON types that a schema allows for the arguments of a tool call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    Types = frozenset[str]

ALL_TYPES: Final = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
STRING_ONLY: Final = frozenset(("string",))
_MAX_SCHEMAS: Final = 2000  # a schema that repeats others more often allows all types
_MAX_DEPTH: Final = 50
_UNKNOWN: Final = object()


class ArgumentTypes:
    """The JSON types that a function's schema allows for each of its arguments.

    In some notations of tool calls, text such as `5` may be a string or a number: the types decide.
    They may include types that other keywords of the schema exclude. The grammar and the reader of
    calls use the same types, so a call that the grammar allows is read as it was meant.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Prepare for the arguments of a function with this JSON schema."""
        self._schema = schema
        self._types: dict[str, Types] = {}
        self._num_left = 0

    def of(self, name: str) -> Types:
        """Return the types that the argument with this name may have."""
        types = self._types.get(name)
        if types is None:
            self._num_left = _MAX_SCHEMAS
            types = self._types[name] = self._member_types(self._schema, name, _MAX_DEPTH)
        return types

    def _member_types(self, schema: object, name: str, depth: int) -> Types:
        """Return the types that an object's schema allows for the member with this name.

        `depth` is how many more levels of nested schemas may be followed; below, all types are
        returned.
        """
        if not isinstance(schema, dict) or not self._may_look(depth):
            return ALL_TYPES
        types = self._own_member_types(schema, name, depth)
        for inner in _list(schema, "allOf"):
            types &= self._member_types(inner, name, depth - 1)
        for keyword in ("anyOf", "oneOf"):
            choices = _list(schema, keyword)
            if choices:
                types &= frozenset[str]().union(
                    *(self._member_types(inner, name, depth - 1) for inner in choices)
                )
        if "$ref" in schema:
            types &= self._member_types(self._resolve(schema["$ref"]), name, depth - 1)
        return types

    def _own_member_types(self, schema: dict[str, Any], name: str, depth: int) -> Types:
        properties = schema.get("properties")
        if isinstance(properties, dict) and name in properties:
            return self._value_types(properties[name], depth - 1)
        if "patternProperties" in schema:
            return ALL_TYPES
        return self._value_types(schema.get("additionalProperties", True), depth - 1)

    def _value_types(self, schema: object, depth: int) -> Types:
        """Return the types of the values that a schema allows.

        `depth` is as in `_member_types`.
        """
        if not isinstance(schema, dict) or not self._may_look(depth):
            return ALL_TYPES
        types = _named_types(schema)
        if "const" in schema:
            types &= {_type(schema["const"])}
        if isinstance(schema.get("enum"), list):
            types &= {_type(value) for value in schema["enum"]}
        for inner in _list(schema, "allOf"):
            types &= self._value_types(inner, depth - 1)
        for keyword in ("anyOf", "oneOf"):
            choices = _list(schema, keyword)
            if choices:
                types &= frozenset[str]().union(
                    *(self._value_types(inner, depth - 1) for inner in choices)
                )
        if "$ref" in schema:
            types &= self._value_types(self._resolve(schema["$ref"]), depth - 1)
        return types

    def _may_look(self, depth: int) -> bool:
        """Count a schema that is looked at, and return whether the limits allow it."""
        self._num_left -= 1
        return self._num_left > 0 and depth > 0

    def _resolve(self, reference: object) -> object:
        """Return the schema at a local reference, such as `#/$defs/city`; True if unknown."""
        if reference == "#":
            return self._schema
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return True
        value: object = self._schema
        for step in reference[2:].split("/"):
            key = step.replace("~1", "/").replace("~0", "~")
            value = value.get(key, _UNKNOWN) if isinstance(value, dict) else _UNKNOWN
        return True if value is _UNKNOWN else value


def _named_types(schema: Mapping[str, Any]) -> Types:
    """Return the types that the keyword `type` of a schema names; all types without it."""
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list):
        return ALL_TYPES
    types = frozenset(name for name in names if isinstance(name, str)) & ALL_TYPES
    return types | {"integer"} if "number" in types else types


def _type(value: object) -> str:
    """Return the type of a JSON value; "integer" for whole numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "array" if isinstance(value, list) else "object"


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """Return the list of schemas of a keyword; empty if it is missing or not a list."""
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
