"""The fields that set the form of an answer, OpenAI's and vLLM's, as one constraint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

from msgspec import Meta

from twostroke.core.constraint import MAX_CONSTRAINT, Constraint
from twostroke.core.errors import RequestError
from twostroke.sample.grammar import MAX_CHOICES
from twostroke.schema.prepare import ANY_OBJECT
from twostroke.serve.describe import field

if TYPE_CHECKING:
    from collections.abc import Iterator

_ANY_OBJECT: Final = json.dumps(ANY_OBJECT)
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


class Text(field.TaggedObject, tag="text"):
    """Any text."""


class JsonObject(field.TaggedObject, tag="json_object"):
    """Any JSON object."""


class NamedSchema(field.RequestObject):
    """A JSON schema; it is always enforced, whatever `strict` says."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchema(field.TaggedObject, tag="json_schema"):
    """JSON that a schema allows."""

    json_schema: NamedSchema


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


def to_constraint(asked: FormFields) -> Constraint | None:
    """Return the form of the answer, or None for any text.

    Raises:
        RequestError: more than one field sets a form, or a form cannot be used.
    """
    found = list(_constraints(asked))
    if len(found) > 1:
        reason = f"cannot be combined with {found[0].param}: leave one of them out."
        raise RequestError(reason, field=found[1].param)
    return found[0] if found else None


def to_schema(schema: str | dict[str, Any], param: str) -> Constraint:
    """Return the constraint of a JSON schema; `param` is the field that holds it."""
    return _constraint("json_schema", schema, param)


def _constraints(asked: FormFields) -> Iterator[Constraint]:
    form = asked.response_format
    if isinstance(form, JsonObject):
        yield Constraint("json_schema", _ANY_OBJECT, "response_format")
    elif isinstance(form, JsonSchema):
        yield to_schema(form.json_schema.schema, "response_format.json_schema.schema")
    vllms = asked.structured_outputs or StructuredOutputs()
    if vllms.json_object:
        yield Constraint("json_schema", _ANY_OBJECT, "structured_outputs.json_object")
    for name, notation in _NOTATIONS.items():
        values = {
            f"guided_{name}": getattr(asked, f"guided_{name}"),
            f"structured_outputs.{name}": getattr(vllms, name),
        }
        for param, value in values.items():
            if value is not None:
                yield _constraint(notation, value, param)


def _constraint(notation: str, value: object, param: str) -> Constraint:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Constraint(notation, text, param)
