"""Tools that an answer may call."""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import replace

from twostroke.core.constraint import Constraint
from twostroke.core.frozen import Frozen
from twostroke.schema.prepare import ANY_OBJECT


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
