"""Writes the parts of a grammar that depend on JSON schemas, when the grammar is compiled.

These parts are JSON values, and tool call arguments in other notations than JSON.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.frozen import Frozen
from twostroke.engine.structured_output.argument_rules import PreparedSchema, RuleList
from twostroke.engine.structured_output.lark import NO_FORCING
from twostroke.engine.structured_output.literal_grammar import LiteralWriter
from twostroke.engine.structured_output.notations import JsonNotation, Notation, TagNotation
from twostroke.engine.structured_output.schema.argument_types import ArgumentTypes
from twostroke.engine.structured_output.schema.prepare import JSON_FORM, prepare, with_escapes
from twostroke.engine.structured_output.schema.size import forces_little
from twostroke.engine.structured_output.tag_grammar import TagWriter

if TYPE_CHECKING:
    from twostroke.engine.structured_output.schema.document import Deadline

_SCHEMA_RULE: Final = re.compile(
    r"^(?P<name>\w+) *: *%(?P<kind>json|arguments) +(?=\{)", re.MULTILINE
)


def with_prepared_schemas(rules: str, deadline: Deadline) -> tuple[str, tuple[str, ...]]:
    """Rewrite the JSON schemas inside a grammar's rules into a form that llguidance compiles.

    Returns the rewritten rules, and the schemas' keywords that the grammar does not enforce. In
    `rules`, each schema is the whole body of a rule. It is either `%json` and the schema, whose
    `x-guidance` has options for how JSON is written, or `%arguments` and an `ArgumentsRule`, for
    tool call arguments in another notation.

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


class ArgumentsRule(Frozen):
    """A placeholder for the grammar rules of a function's arguments, until they are compiled.

    Attributes:
        notation: how the model writes the arguments.
        schema: the JSON schema of the arguments.
        special_ids: token ids of the notation's marks that are special tokens, by mark.
    """

    notation: Notation
    schema: dict[str, Any]
    special_ids: dict[str, int]

    def to_text(self) -> str:
        """Return the rule as JSON, which follows `%arguments` in a grammar."""
        return msgspec.json.encode(self).decode()


class WrittenRules(Frozen):
    """Grammar rules for the arguments of one function.

    Attributes:
        rules: the rules in Lark's notation.
        unenforced_keywords: the schema's keywords that the rules do not enforce.
        is_short: whether the rules force only little text; forced text is text without a choice.
    """

    rules: str
    unenforced_keywords: tuple[str, ...]
    is_short: bool


def write_arguments_rule(name: str, text: str, deadline: Deadline) -> WrittenRules:
    """Return the grammar rules for a function's arguments; the first rule is called `name`.

    `text` is an `ArgumentsRule` as JSON.

    Raises:
        ValueError: the schema cannot be used, or the notation cannot hold it.
        TimeoutError: the deadline is over.
    """
    try:
        return _written_rules(name, text, deadline)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _written_rules(name: str, text: str, deadline: Deadline) -> WrittenRules:
    rule = msgspec.json.decode(text, type=ArgumentsRule)
    prepared = prepare(json.dumps({"type": "object", **rule.schema}), deadline)
    json_form = with_escapes(JSON_FORM) if prepared.escapes else JSON_FORM
    schema = PreparedSchema(json.loads(prepared.text), json_form)
    rules = RuleList(name, rule.special_ids)
    match rule.notation:
        case TagNotation():
            TagWriter(rule.notation, schema, ArgumentTypes(rule.schema), rules).write()
        case JsonNotation():
            rules.begin(schema.to_json_rule(schema.branches(schema.root)))
        case _:
            LiteralWriter(rule.notation, schema, rules).write()
    is_short = forces_little(json.loads(prepared.text))
    return WrittenRules("\n".join(rules.rules), prepared.unenforced_keywords, is_short)
