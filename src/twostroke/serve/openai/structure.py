"""The fields that say what an answer has to look like, OpenAI's and vLLM's, as one constraint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError
from twostroke.sample.schema import ANY_OBJECT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.serve.openai.fields import CommonFields

_ANY_OBJECT: Final = json.dumps(ANY_OBJECT)


class Text(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObject(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"
):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema; it is always kept to, whatever `strict` says."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchema(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """JSON that a schema allows."""

    json_schema: NamedSchema


ResponseFormat = Text | JsonObject | JsonSchema


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's field: one of its own."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def to_constraint(asked: CommonFields) -> Constraint | None:
    """Return what the answer has to look like, or None for any text.

    Raises:
        RequestError: more than one field says so, or one is not as it should be.
    """
    found = list(_constraints(asked))
    if len(found) > 1:
        reason = f"cannot be combined with {found[0].param}: leave one of them out."
        raise RequestError(reason, field=found[1].param)
    return found[0] if found else None


def to_schema(schema: str | dict[str, Any], param: str) -> Constraint:
    """Return what keeps an answer to a JSON schema; `param` is the field that holds it."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Constraint("json_schema", text, param)


def _constraints(asked: CommonFields) -> Iterator[Constraint]:
    form = asked.response_format
    if isinstance(form, JsonObject):
        yield Constraint("json_schema", _ANY_OBJECT, "response_format")
    elif isinstance(form, JsonSchema):
        param = "response_format.json_schema.schema"
        yield to_schema(form.json_schema.schema, param)
    if asked.guided_json is not None:
        yield to_schema(asked.guided_json, "guided_json")
    if asked.guided_regex is not None:
        yield Constraint("regex", asked.guided_regex, "guided_regex")
    if asked.guided_choice is not None:
        yield _choice(asked.guided_choice, "guided_choice")
    if asked.guided_grammar is not None:
        yield Constraint("grammar", asked.guided_grammar, "guided_grammar")
    if asked.structured_outputs is not None:
        yield from _structured(asked.structured_outputs)


def _structured(asked: StructuredOutputs) -> Iterator[Constraint]:
    where = "structured_outputs"
    if asked.json is not None:
        yield to_schema(asked.json, f"{where}.json")
    if asked.json_object:
        yield Constraint("json_schema", _ANY_OBJECT, f"{where}.json_object")
    if asked.regex is not None:
        yield Constraint("regex", asked.regex, f"{where}.regex")
    if asked.choice is not None:
        yield _choice(asked.choice, f"{where}.choice")
    if asked.grammar is not None:
        yield Constraint("grammar", asked.grammar, f"{where}.grammar")


def _choice(texts: list[str], param: str) -> Constraint:
    return Constraint("choice", json.dumps(texts, ensure_ascii=False), param)
