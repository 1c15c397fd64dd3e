"""How fields of requests describe themselves: meaning, bounds, and whether they are supported.

`server/body/decode.py` checks requests by these annotations, `server/body/lenient.py` drops what
they allow to drop, and `server/openapi/document.py` publishes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta

from twostroke.core.sampling import BOUNDS

# Keywords of the schemas made here, which the document replaces or explains.
NEUTRAL: Final = "x-neutral"
WRONG_IS_IGNORED: Final = "x-wrong-is-ignored"


class RequestObject(msgspec.Struct, forbid_unknown_fields=True):
    """An object of a request."""


class TaggedObject(RequestObject, tag_field="type"):
    """An object of a request that says in `type` what it is.

    `other_types` has what to do instead of sending an object of another type, `*` of any other.
    """

    other_types: ClassVar[Mapping[str, str]] = {}


class Effect(StrEnum):
    """What becomes of a field that the server cannot honour, unless its value is neutral."""

    REFUSED = "refused"  # without it the answer would mean something else
    HINT = "hint"  # ignored, and refused by a strict server
    NONE = "none"  # ignored


class Fact(StrEnum):
    """A place in a JSON Schema for a value of the running model or of the server's options."""

    LAST_ID = "{last token}"
    MODEL_NAMES = "{model names}"
    GUESSERS = "{methods of speculation}"
    EMBEDDING_WIDTH = "{embedding width}"
    MAX_CHOICES = "{most answers}"
    MAX_INPUTS = "{most inputs}"


def doc(description: str, **keywords: object) -> Meta:
    """Return a field's description, and JSON Schema keywords that other code enforces."""
    return Meta(description=description, extra_json_schema=keywords)


def sampling(name: str, description: str = "", **keywords: object) -> Meta:
    """Describe a field whose bounds `SamplingParams` checks; `keywords` replace some of them."""
    bounds = BOUNDS[name]
    low = "exclusiveMinimum" if bounds.above else "minimum"
    limits = {low: bounds.low, "maximum": bounds.high}
    return doc(description or bounds.description, **limits | keywords)


def limit(description: str) -> Meta:
    """Describe a limit of tokens, where -1 is none; one above any context is cut, as others are."""
    return doc(description, minimum=-1, **{"not": {"const": 0}})


def unsupported(*neutral: object) -> Meta:
    """Mark a field that is refused unless it is null or has one of the `neutral` values."""
    return _mark(Effect.REFUSED, "Not supported: leave it out.", neutral, enum=[None, *neutral])


def hint(*neutral: object) -> Meta:
    """Mark a field that is ignored, and that a strict server refuses unless null or `neutral`."""
    text = "Ignored; refused with `--strict`."
    return _mark(Effect.HINT, text, neutral, **{NEUTRAL: [None, *neutral]})


def ignored(*neutral: object) -> Meta:
    """Mark a field that is ignored, and reported unless it is null or `neutral`."""
    return _mark(Effect.NONE, "Ignored.", neutral)


def keeping(value: str, *neutral: object) -> Meta:
    """Mark a field that has an effect where there is a page cache, with such a `value`."""
    text = f"Keeps the prompt in a page cache: {value}. Ignored without one."
    return _mark(Effect.NONE, text, neutral)


def _mark(effect: Effect, text: str, neutral: tuple[object, ...], **keywords: object) -> Meta:
    # `shown`, because 1 and True would be one annotation.
    extra = {"effect": effect, "neutral": neutral, "shown": repr(neutral)}
    return Meta(description=text, extra=extra, extra_json_schema=keywords)


def renamed(name: str) -> Meta:
    """Mark a field of another protocol that is called `name` in this one."""
    return Meta(
        description=f"Not supported: send `{name}`.",
        extra={"effect": Effect.REFUSED, "neutral": (), "new_name": name},
        extra_json_schema={"enum": [None]},
    )


def unknown_left_out(*other_types: str, refused: tuple[str, ...] = ()) -> Meta:
    """Mark a list from which items of unknown types are left out and reported.

    The types of the list's structs are known, and so are `other_types`. If the type of an item
    contains one of the `refused` words, the item stays, and the request is refused.
    """
    return Meta(extra={"known": other_types, "refused": refused, "leaves_out": True})


def advice(values: Mapping[str, str]) -> Meta:
    """Add to the error about a wrong value what to do instead."""
    return Meta(extra={"advice": values})


def reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return a reference to a struct's schema in the document."""
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


# Marks a field that is ignored if its value is wrong; a strict server refuses it.
DROPPABLE: Final = Meta(extra={"is_droppable": True}, extra_json_schema={WRONG_IS_IGNORED: True})

# Words in the types of parts with images, audio and the like, which models here cannot read.
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
    """Describe a field that takes a text, a list of token ids and texts, or a list of either."""
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
    ways: list[dict[str, Any]] = [text, with_id, several]
    words = "A text, a list of token ids and texts that are joined, or a list of such inputs."
    return doc(words, oneOf=[*ways, {"type": "null"}] if may_be_null else ways)


def texts_or_ids(max_items: Fact, **of_text: int) -> Meta:
    """Describe a field that takes a text, token ids, or a list of either."""
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
