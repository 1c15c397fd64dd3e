"""The fields that set the form of an answer, OpenAI's and vLLM's, as one constraint."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

from msgspec import Meta

from twostroke.core.constraint import MAX_CONSTRAINT, Constraint
from twostroke.core.errors import RequestError
from twostroke.engine.structured_output.grammar import MAX_CHOICES
from twostroke.engine.structured_output.schema.prepare import ANY_OBJECT
from twostroke.server.body import field
from twostroke.server.http.errors import MissingFieldError
from twostroke.server.protocols.common.tools import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Notated = tuple[str, object, str]  # a notation, a form in it or None, and the field that has it

# By the fields of vLLM: `guided_*` and those of `structured_outputs`.
_NOTATIONS: Final = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}

JsonForm = Annotated[
    str | dict[str, Any] | None,
    field.doc("A JSON schema for the answer, or its text.", maxLength=MAX_CONSTRAINT),
]
RegexForm = Annotated[
    str | None,
    field.doc("A regular expression for the whole answer.", maxLength=MAX_CONSTRAINT),
]
ChoiceForm = Annotated[
    list[Annotated[str, Meta(extra_json_schema={"minLength": 1})]] | None,
    field.doc("Texts, one of which is the answer.", minItems=1, maxItems=MAX_CHOICES),
]
GrammarForm = Annotated[
    str | None,
    field.doc("A grammar in Lark's notation or in GBNF.", maxLength=MAX_CONSTRAINT),
]


class JsonObject(field.TaggedObject, tag="json_object"):
    """Any JSON object, or those that llama-server's `schema` allows."""

    schema: dict[str, Any] | None = None


class NamedSchema(field.RequestObject):
    """A JSON schema; an answer that breaks it is generated again, then refused if `strict`."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchema(field.TaggedObject, tag="json_schema"):
    """JSON that a schema allows; `schema` is llama-server's place for it."""

    json_schema: NamedSchema | None = None
    schema: dict[str, Any] | None = None


ResponseFormat = Text | JsonObject | JsonSchema


class StructuredOutputs(field.RequestObject):
    """vLLM's field for the form of an answer; one of its own fields may be set."""

    json: JsonForm = None
    json_object: bool | None = None
    regex: RegexForm = None
    choice: ChoiceForm = None
    grammar: GrammarForm = None


class FormFields(Protocol):
    """The fields of a request that `to_constraint` reads."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: JsonForm
    guided_regex: RegexForm
    guided_choice: ChoiceForm
    guided_grammar: GrammarForm
    grammar: GrammarForm
    json_schema: JsonForm
    allowed_token_ids: list[int] | None


def to_constraint(asked: FormFields) -> Constraint | None:
    """Return the form of the answer, or None for any text.

    Raises:
        RequestError: more than one field sets a form, or a form cannot be used.
    """
    constraint, form = one_constraint(_constraints(asked)), asked.response_format
    named = form.json_schema if isinstance(form, JsonSchema) else None
    if constraint is None or named is None or not named.strict:
        return constraint
    return replace(constraint, is_strict=True)


def one_constraint(forms: Iterable[Notated]) -> Constraint | None:
    """Return the form that is not None, as a constraint.

    Raises:
        RequestError: there are several, or the form cannot be used.
    """
    found = [_constraint(*form) for form in forms if form[1] is not None]
    if len(found) > 1:
        reason = f"cannot be combined with {found[0].param}: leave one of them out."
        raise RequestError(reason, field=found[1].param)
    return found[0] if found else None


def to_schema(schema: str | dict[str, Any], param: str, *, is_strict: bool = False) -> Constraint:
    """Return the constraint of a JSON schema; `param` is the field that holds it."""
    return replace(_constraint("json_schema", schema, param), is_strict=is_strict)


def _constraints(asked: FormFields) -> Iterator[Notated]:
    form = asked.response_format
    if isinstance(form, JsonObject):
        param = "response_format.schema" if form.schema else "response_format"
        yield "json_schema", form.schema or ANY_OBJECT, param
    elif isinstance(form, JsonSchema):
        named = form.json_schema
        if named is None and form.schema is None:
            raise MissingFieldError("is missing.", field="response_format.json_schema")
        yield "json_schema", form.schema, "response_format.schema"
        yield "json_schema", named and named.schema, "response_format.json_schema.schema"
    vllms = asked.structured_outputs or StructuredOutputs()
    if asked.structured_outputs == StructuredOutputs():  # perhaps its field was misspelt
        reason = f"has no form: give one of {', '.join(StructuredOutputs.__struct_fields__)}."
        raise RequestError(reason, field="structured_outputs")
    if vllms.json_object:
        yield "json_schema", ANY_OBJECT, "structured_outputs.json_object"
    for name, notation in _NOTATIONS.items():
        yield notation, getattr(asked, f"guided_{name}"), f"guided_{name}"
        yield notation, getattr(vllms, name), f"structured_outputs.{name}"
    yield "grammar", asked.grammar or None, "grammar"
    yield "json_schema", asked.json_schema, "json_schema"
    if asked.allowed_token_ids is not None:
        yield "lark", _any_of_tokens(asked.allowed_token_ids), "allowed_token_ids"


def _any_of_tokens(ids: list[int]) -> str:
    """Return the grammar of any number of these tokens.

    Raises:
        RequestError: there are no ids, or one is negative.
    """
    if not ids or min(ids) < 0:
        reason = "must have at least one token id, and none below 0."
        raise RequestError(reason, field="allowed_token_ids")
    distinct = ",".join(map(str, sorted(set(ids))))
    return f"start: allowed*\nallowed: <[{distinct}]>"


def _constraint(notation: str, value: object, param: str) -> Constraint:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Constraint(notation, text, param)
