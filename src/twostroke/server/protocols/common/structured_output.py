"""The request fields of OpenAI and vLLM that set an answer's format, as one constraint."""

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

    # A notation, a format in this notation or None, and the name of its field in the request.
    NotatedFormat = tuple[str, object, str]

# The notations of vLLM's fields: `guided_*`, and the fields of `structured_outputs`.
_VLLM_NOTATIONS: Final = {
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
    """The `response_format` of a JSON object, which llama-server's `schema` may restrict."""

    schema: dict[str, Any] | None = None


class NamedSchema(field.RequestObject):
    """The JSON schema of a `response_format`.

    An answer that breaks the schema is generated again. If the new answer breaks it, too, the
    request fails if `strict` is set.
    """

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchema(field.TaggedObject, tag="json_schema"):
    """The `response_format` of JSON that fits a schema.

    OpenAI's clients send the schema in `json_schema`, llama-server's clients in `schema`.
    """

    json_schema: NamedSchema | None = None
    schema: dict[str, Any] | None = None


ResponseFormat = Text | JsonObject | JsonSchema


class StructuredOutputs(field.RequestObject):
    """vLLM's field `structured_outputs`: the answer's format, set by one of these fields."""

    json: JsonForm = None
    json_object: bool | None = None
    regex: RegexForm = None
    choice: ChoiceForm = None
    grammar: GrammarForm = None


class AnswerFormatFields(Protocol):
    """All request fields that can set the format of an answer; at most one of them may be set."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: JsonForm
    guided_regex: RegexForm
    guided_choice: ChoiceForm
    guided_grammar: GrammarForm
    grammar: GrammarForm
    json_schema: JsonForm
    allowed_token_ids: list[int] | None


def to_constraint(request: AnswerFormatFields) -> Constraint | None:
    """Return the constraint on the answer that a request's format fields set; None for free text.

    Raises:
        RequestError: more than one field sets a format, or a format is not valid.
    """
    constraint = single_constraint(_requested_formats(request))
    response_format = request.response_format
    json_schema = response_format.json_schema if isinstance(response_format, JsonSchema) else None
    if constraint is None or json_schema is None or not json_schema.strict:
        return constraint
    return replace(constraint, is_strict=True)


def single_constraint(formats: Iterable[NotatedFormat]) -> Constraint | None:
    """Check that a request sets at most one answer format, and return it as a constraint.

    `formats` has an entry for each field of the request that could set a format: its notation, such
    as "json_schema", its value or None, and its name. Returns None if no field sets a format.

    Raises:
        RequestError: several formats are set, or the format is not valid.
    """
    constraints = [
        _make_constraint(notation, value, param)
        for notation, value, param in formats
        if value is not None
    ]
    if len(constraints) > 1:
        reason = f"cannot be combined with {constraints[0].param}: leave one of them out."
        raise RequestError(reason, field=constraints[1].param)
    return constraints[0] if constraints else None


def to_schema(schema: str | dict[str, Any], param: str, *, is_strict: bool = False) -> Constraint:
    """Return the constraint that an answer must be JSON of a schema.

    `param` is the name of the schema's field in the request. With `is_strict`, the request fails if
    the answer breaks a rule of the schema.
    """
    return replace(_make_constraint("json_schema", schema, param), is_strict=is_strict)


def _requested_formats(request: AnswerFormatFields) -> Iterator[NotatedFormat]:
    """Yield an entry for each request field that could set the answer's format.

    An entry has the notation, such as "json_schema", the format or None, and the field's name.

    Raises:
        RequestError: `structured_outputs` or `response_format` is set, but contains no format.
    """
    response_format = request.response_format
    if isinstance(response_format, JsonObject):
        param = "response_format.schema" if response_format.schema else "response_format"
        yield "json_schema", response_format.schema or ANY_OBJECT, param
    elif isinstance(response_format, JsonSchema):
        json_schema = response_format.json_schema
        if json_schema is None and response_format.schema is None:
            raise MissingFieldError("is missing.", field="response_format.json_schema")
        yield "json_schema", response_format.schema, "response_format.schema"
        yield (
            "json_schema",
            json_schema and json_schema.schema,
            "response_format.json_schema.schema",
        )
    vllm_fields = request.structured_outputs or StructuredOutputs()
    if request.structured_outputs == StructuredOutputs():  # perhaps its only field is misspelled
        reason = f"has no form: give one of {', '.join(StructuredOutputs.__struct_fields__)}."
        raise RequestError(reason, field="structured_outputs")
    if vllm_fields.json_object:
        yield "json_schema", ANY_OBJECT, "structured_outputs.json_object"
    for name, notation in _VLLM_NOTATIONS.items():
        yield notation, getattr(request, f"guided_{name}"), f"guided_{name}"
        yield notation, getattr(vllm_fields, name), f"structured_outputs.{name}"
    yield "grammar", request.grammar or None, "grammar"
    yield "json_schema", request.json_schema, "json_schema"
    if request.allowed_token_ids is not None:
        yield "lark", _grammar_of_tokens(request.allowed_token_ids), "allowed_token_ids"


def _grammar_of_tokens(ids: list[int]) -> str:
    """Return a Lark grammar that allows only these token ids, for the field `allowed_token_ids`.

    Raises:
        RequestError: there are no ids, or an id is negative.
    """
    if not ids or min(ids) < 0:
        reason = "must have at least one token id, and none below 0."
        raise RequestError(reason, field="allowed_token_ids")
    distinct = ",".join(map(str, sorted(set(ids))))
    return f"start: allowed*\nallowed: <[{distinct}]>"


def _make_constraint(notation: str, value: object, param: str) -> Constraint:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Constraint(notation, text, param)
