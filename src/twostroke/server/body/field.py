"""Annotations of request fields: their meaning, their bounds, and whether they have an effect."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta

from twostroke.core.sampling import BOUNDS

# Keywords of JSON Schemas made here; the OpenAPI document replaces or explains them.
NEUTRAL: Final = "x-neutral"
WRONG_IS_IGNORED: Final = "x-wrong-is-ignored"


class RequestObject(msgspec.Struct, forbid_unknown_fields=True):
    """The base of structs for JSON objects in requests.

    Unknown fields are ignored; a strict server refuses them.
    """


class TaggedObject(RequestObject, tag_field="type"):
    """The base of structs for JSON objects in requests that the field `type` tells apart.

    Attributes:
        other_types: advice for clients that send an object of another type, by type; `*` is for
            all types that are not listed.
    """

    other_types: ClassVar[Mapping[str, str]] = {}


class Effect(StrEnum):
    """How the server treats a request field that it does not implement.

    This only concerns values that would change the answer; neutral values are always accepted.
    """

    REFUSED = "refused"  # without it the answer would mean something else
    HINT = "hint"  # ignored, and refused by a strict server
    NONE = "none"  # ignored


class Fact(StrEnum):
    """A placeholder in JSON Schemas for a fact of the running server, such as a limit.

    When the OpenAPI document is built, the server's `ServerFacts.values` replace the placeholders.
    """

    LAST_ID = "{last token}"
    MODEL_NAMES = "{model names}"
    PROPOSERS = "{methods of speculation}"
    EMBEDDING_WIDTH = "{embedding width}"
    MAX_CHOICES = "{most answers}"
    MAX_INPUTS = "{most inputs}"


def doc(description: str, **keywords: object) -> Meta:
    """Return the annotation that describes a request field in the OpenAPI document.

    `keywords` are keywords of JSON Schema, for limits that are checked elsewhere.
    """
    return Meta(description=description, extra_json_schema=keywords)


def sampling(name: str, description: str = "", **keywords: object) -> Meta:
    """Return the annotation of a request field that sets a sampling parameter.

    `name` is the parameter's name. The annotation's JSON Schema has the bounds that
    `SamplingParams` checks; `keywords` replace keywords of this schema.
    """
    bounds = BOUNDS[name]
    low = "exclusiveMinimum" if bounds.above else "minimum"
    limits = {low: bounds.low, "maximum": bounds.high}
    return doc(description or bounds.description, **limits | keywords)


def limit(description: str) -> Meta:
    """Return the annotation of a request field that limits the number of generated tokens.

    -1 means no limit; larger numbers are lowered to the context's length.
    """
    return doc(description, minimum=-1, **{"not": {"const": 0}})


def unsupported(*neutral: object) -> Meta:
    """Return the annotation of a request field that the server refuses.

    Without the field, the answer would mean something else. Null and the `neutral` values, which
    mean the same as no field, are accepted.
    """
    return _mark(Effect.REFUSED, "Not supported: leave it out.", neutral, enum=[None, *neutral])


def hint(*neutral: object) -> Meta:
    """Return the annotation of a field that the server ignores, but that a strict server refuses.

    Null and the `neutral` values, which mean the same as no field, are always accepted.
    """
    text = "Ignored; refused with `--strict`."
    return _mark(Effect.HINT, text, neutral, **{NEUTRAL: [None, *neutral]})


def ignored(*neutral: object) -> Meta:
    """Return the annotation of a request field that the server always ignores.

    The response's header `twostroke-ignored` names the field, unless the value is null or
    `neutral`, which means the same as no field.
    """
    return _mark(Effect.NONE, "Ignored.", neutral)


def page_cache_only(value: str, *neutral: object) -> Meta:
    """Return the annotation of a field that matters only if KV pages are stored outside memory.

    `value` describes the field's values. A server without such storage ignores the field.
    """
    text = f"Keeps the prompt in a page cache: {value}. Ignored without one."
    return _mark(Effect.NONE, text, neutral)


def _mark(effect: Effect, text: str, neutral: tuple[object, ...], **keywords: object) -> Meta:
    # `shown`, because 1 and True would be one annotation.
    extra = {"effect": effect, "neutral": neutral, "shown": repr(neutral)}
    return Meta(description=text, extra=extra, extra_json_schema=keywords)


def renamed(name: str) -> Meta:
    """Return the annotation of a field of other APIs, which this API calls `name`."""
    return Meta(
        description=f"Not supported: send `{name}`.",
        extra={"effect": Effect.REFUSED, "neutral": (), "new_name": name},
        extra_json_schema={"enum": [None]},
    )


def unknown_left_out(*other_types: str, refused: tuple[str, ...] = ()) -> Meta:
    """Return the annotation of a list from which the server removes items of unknown types.

    The response reports the removed types. The types of the list's structs and `other_types` are
    known. An item whose type contains one of the `refused` words is not removed, so that the
    request is refused.
    """
    return Meta(extra={"known": other_types, "refused": refused, "leaves_out": True})


def advice(values: Mapping[str, str]) -> Meta:
    """Return an annotation with advice for the errors about a request field's wrong values.

    `values` has the advice by wrong value; `*` is for any other value.
    """
    return Meta(extra={"advice": values})


def reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return a JSON reference (`$ref`) to a struct's schema in the OpenAPI document."""
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


# Marks a field that is ignored if its value is wrong; a strict server refuses it.
DROPPABLE: Final = Meta(extra={"is_droppable": True}, extra_json_schema={WRONG_IS_IGNORED: True})

# Words in the types of message parts with images, audio and other media, which are refused.
MEDIA: Final = ("image", "audio", "video", "file", "document")
PARTS: Final = unknown_left_out(refused=MEDIA)
TEXT_ONLY: Final = {"*": "Models here read text only."}

Ignored = Annotated[Any, ignored()]
Hint = Annotated[Any, hint()]
SentBack = Annotated[Any, Meta(description="A field of answers that clients send back.")]
Unsupported = Annotated[Any, unsupported()]
AddSpecial = Annotated[
    bool | None,
    doc("Add the model's begin (or end) of sequence unless the text has it; true if left out."),
]
ParseSpecial = Annotated[
    bool | None,
    doc(
        "Turn texts such as `<s>` into special tokens; true if left out, unless the "
        "server has `--no-parse-special`."
    ),
]
AlwaysOff = Annotated[Any, unsupported(False)]  # noqa: FBT003 - a value, not an option
AlwaysOn = Annotated[Any, unsupported(True)]  # noqa: FBT003
HintOff = Annotated[Any, hint(False)]  # noqa: FBT003
IgnoredOff = Annotated[Any, ignored(False)]  # noqa: FBT003
IgnoredOn = Annotated[Any, ignored(True)]  # noqa: FBT003

# Fields of several protocols.
TOP_K: Final = sampling("top_k", "Draw from the k likeliest tokens; 0 or -1: from all.", minimum=-1)
TokenId = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": Fact.LAST_ID})]
ModelName = Annotated[
    str | None,
    doc("One of the names in `/v1/models`.", examples=Fact.MODEL_NAMES),
]
Stream = Annotated[bool | None, doc("Send the answer in pieces, as server-sent events.")]
Timings = Annotated[bool | None, doc("Report how long each answer took.")]


def inputs(max_items: Fact, *, may_be_null: bool = False) -> Meta:
    """Return the annotation of a request field that takes one or several inputs for embeddings.

    An input is a text, or a list of token ids and texts that are joined. `max_items` limits the
    number of inputs.
    """
    text = {"type": "string"}
    id_ = {"type": "integer", "minimum": 0, "maximum": Fact.LAST_ID}
    mixed = {"type": "array", "items": {"anyOf": [text, id_]}, "minItems": 1}
    with_id = mixed | {"contains": {"type": "integer"}}
    several = {
        "type": "array",
        "items": {"anyOf": [text, mixed]},
        "minItems": 1,
        "maxItems": max_items,
    }
    forms: list[dict[str, Any]] = [text, with_id, several]
    words = "A text, a list of token ids and texts that are joined, or a list of such inputs."
    return doc(words, oneOf=[*forms, {"type": "null"}] if may_be_null else forms)


def texts_or_ids(max_items: Fact, **of_text: int) -> Meta:
    """Return the annotation of a field that takes a text, token ids, or a list of either.

    `max_items` limits the list's length; `of_text` are JSON Schema keywords for texts.
    """
    text = {"type": "string", **of_text}
    ids = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": Fact.LAST_ID},
        "minItems": 1,
    }
    several = {
        "type": "array",
        "items": {"anyOf": [text, ids]},
        "minItems": 1,
        "maxItems": max_items,
    }
    return doc("A text, token ids, or a list of either.", oneOf=[text, ids, several])
