"""Tools that an answer may call."""

from __future__ import annotations

import json
from typing import Any, Final

from msgspec.structs import replace

from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError
from twostroke.core.frozen import Frozen
from twostroke.engine.structured_output.schema.prepare import ANY_OBJECT

# A schema with one of these keywords may allow arguments that `properties` does not list.
_MORE_ARGUMENTS: Final = frozenset(
    ("$ref", "additionalProperties", "allOf", "anyOf", "minProperties", "oneOf")
) | {"patternProperties"}
_SAY_NOTHING: Final = frozenset(("$schema", "description", "title", "type"))


class Function(Frozen):
    """A function that may be called, with a schema of its arguments.

    `param` is the request's field with the schema. If the schema cannot be enforced, the request is
    refused for an `is_strict` function, else any object is allowed. Clients see the argument
    `input` of an `is_custom` one as text, not JSON.
    """

    name: str
    schema: dict[str, Any]
    param: str
    is_strict: bool
    is_custom: bool = False

    @classmethod
    def described(
        cls, name: str, parameters: dict[str, Any] | None, param: str, *, is_strict: bool = False
    ) -> Function:
        """Return a function whose arguments follow the JSON schema `parameters`.

        Many tools have schemas that no grammar can enforce. Such a schema is an error only if the
        function `is_strict`; otherwise its arguments may be any object. A schema that is not for
        an object is found here, all others when the schema is compiled.

        Raises:
            RequestError: the schema of an `is_strict` function is not for an object.
        """
        schema = _closed(parameters or {})
        function = cls(name, schema, param, is_strict)
        if schema.get("type", "object") == "object":
            return function
        if is_strict:
            raise RequestError("cannot be followed: its type must be object.", field=param)
        return function.freed()

    def constraint(self) -> Constraint:
        """Return the form of its arguments alone."""
        return Constraint("json_schema", json.dumps(self.schema), self.param)

    def freed(self) -> Function:
        """Return it with any object for its arguments."""
        return replace(self, schema=dict(ANY_OBJECT))


class Tools(Frozen):
    """The tools of a request.

    `shown` are the tools for the prompt, as the client sent them; `functions` are those that may be
    called: one must be if `is_forced`, several may be if `is_parallel`.
    """

    shown: tuple[dict[str, Any], ...]
    functions: tuple[Function, ...]
    is_forced: bool
    is_parallel: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The functions' names."""
        return tuple(function.name for function in self.functions)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that allows no arguments besides those in its `properties`.

    JSON Schema allows other arguments by default, but most functions would fail with them. If a
    schema mentions no arguments, the function has none. If a schema can describe arguments outside
    `properties`, it is returned unchanged.
    """
    if schema.keys() <= _SAY_NOTHING and schema.get("type", "object") == "object":
        return {"type": "object", "properties": {}, "additionalProperties": False}
    names = schema.get("properties")
    if not isinstance(names, dict) or not _MORE_ARGUMENTS.isdisjoint(schema):
        return schema
    required = schema.get("required", [])
    if not isinstance(required, list) or any(name not in names for name in map(str, required)):
        return schema
    return schema | {"additionalProperties": False}
