"""Tools that an answer may call."""

from __future__ import annotations

import json
from typing import Any, Final

from msgspec.structs import replace

from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError
from twostroke.core.frozen import Frozen
from twostroke.schema.prepare import ANY_OBJECT

# With one of these, `properties` need not list all arguments.
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
        """Return a function whose arguments follow a JSON schema, None for any object.

        Many tools have schemas written for other readers: where one cannot be followed, only an
        `is_strict` function is refused, and the arguments of others are any object. Whether a
        schema can be followed shows when it is compiled.

        Raises:
            RequestError: the arguments of an `is_strict` function are no object.
        """
        schema = _closed(parameters or {})
        function = cls(name, schema, param, is_strict)
        if schema.get("type", "object") == "object":
            return function
        if is_strict:
            raise RequestError("cannot be followed: arguments are an object.", field=param)
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
    """Return a schema that allows only the arguments in its `properties`, if it lists them there.

    Other arguments would make most functions fail, although JSON Schema allows them by default.
    A schema that does not mention arguments means a function without any.
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
