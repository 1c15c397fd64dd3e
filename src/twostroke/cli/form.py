"""Options that say what an answer has to look like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from twostroke.cli.files import read_text
from twostroke.cli.options import add_options
from twostroke.core.constraint import Constraint
from twostroke.core.errors import Field, UsageError

if TYPE_CHECKING:
    from twostroke.cli.options import F

_FILE = click.Path(path_type=Path)


def form_options(function: F) -> F:
    """Add the options of a `Constraint`."""
    return add_options(
        function,
        "The answer's form",
        (("--json-schema",), {"type": _FILE, "help": "JSON that the schema in this file allows."}),
        (("--regex",), {"help": "A text that this regular expression matches as a whole."}),
        (("--choice",), {"multiple": True, "help": "This text or another one; repeatable."}),
        (("--grammar",), {"type": _FILE, "help": "A text of this file's grammar, Lark or GBNF."}),
    )


def constraint(given: dict[str, Any]) -> Constraint | None:
    """Take the options out of `given` and return what they ask for, or None.

    Raises:
        UsageError: more than one was given, or a file cannot be read.
    """
    schema, pattern = given.pop("json_schema"), given.pop("regex")
    choices, grammar = given.pop("choice"), given.pop("grammar")
    found: list[tuple[str, str, str]] = []
    if schema is not None:
        found.append(("json_schema", read_text(schema), "json_schema"))
    if pattern is not None:
        found.append(("regex", pattern, "regex"))
    if choices:
        found.append(("choice", json.dumps(choices, ensure_ascii=False), "choice"))
    if grammar is not None:
        found.append(("grammar", read_text(grammar), "grammar"))
    if len(found) > 1:
        reason = "cannot be combined with {other}: leave one of them out."
        raise UsageError(reason, field=found[0][2], other=Field(found[1][2]))
    return Constraint(*found[0]) if found else None
