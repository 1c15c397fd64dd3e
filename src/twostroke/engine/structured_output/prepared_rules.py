"""Writes the parts of a grammar that depend on JSON schemas, when the grammar is compiled."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from twostroke.engine.structured_output.argument_grammar import write_arguments_rule
from twostroke.engine.structured_output.lark import NO_FORCING
from twostroke.engine.structured_output.schema.prepare import prepare, with_escapes
from twostroke.engine.structured_output.schema.size import forces_little

if TYPE_CHECKING:
    from twostroke.engine.structured_output.schema.document import Deadline

_SCHEMA_RULE: Final = re.compile(
    r"^(?P<name>\w+) *: *%(?P<kind>json|arguments) +(?=\{)", re.MULTILINE
)


def with_prepared_schemas(rules: str, deadline: Deadline) -> tuple[str, tuple[str, ...]]:
    """Rewrite the JSON schemas inside a grammar's rules into a form that llguidance compiles.

    Returns the rules, and the schemas' keywords that the grammar does not enforce. Each schema is a
    separate rule: `%json` and a schema, whose `x-guidance` has options for the form of the JSON, or
    `%arguments` and an `ArgumentsRule`, for arguments in another notation.

    Raises:
        ValueError: a schema cannot be used.
        TimeoutError: the deadline is over.
    """
    parts: list[str] = []
    unenforced_keywords: list[str] = []
    end = 0
    has_forcing = False
    for match in _SCHEMA_RULE.finditer(rules):
        value, value_end = json.JSONDecoder().raw_decode(rules, match.end())
        if match["kind"] == "arguments":
            written = write_arguments_rule(match["name"], rules[match.end() : value_end], deadline)
            has_forcing = has_forcing or not written.is_short
            parts += [rules[end : match.start()], written.rules]
            unenforced_keywords += written.unenforced_keywords
        else:
            prepared = prepare(json.dumps(value), deadline)
            text = json.loads(prepared.text)
            has_forcing = has_forcing or not forces_little(text)
            json_form = {"x-guidance": value["x-guidance"]} if "x-guidance" in value else {}
            if prepared.escapes:
                json_form = {"x-guidance": dict(with_escapes(json_form.get("x-guidance", {})))}
            parts += [rules[end : match.end()], json.dumps({**text, **json_form})]
            unenforced_keywords += prepared.unenforced_keywords
        end = value_end
    forcing = [f"\n{NO_FORCING}\n"] if has_forcing else []
    return "".join([*parts, rules[end:], *forcing]), tuple(unenforced_keywords)
