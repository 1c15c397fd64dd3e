"""What is said of a route: its texts, answers, errors and examples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import field

from twostroke.core.errors import (
    DeadlineError,
    EngineStoppedError,
    ModelNotFoundError,
    OverloadedError,
    RequestError,
    TwostrokeError,
)
from twostroke.core.frozen import Frozen
from twostroke.server.http import errors
from twostroke.server.http.origins import ForbiddenError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import msgspec

    Struct = type[msgspec.Struct]

ANYWHERE: Final = (ForbiddenError, errors.HeaderSizeError, TwostrokeError)
BODY: Final = (
    RequestError,
    ModelNotFoundError,
    errors.BodyTimeoutError,
    errors.BodySizeError,
    errors.ContentTypeError,
)
GENERATION: Final = (*BODY, OverloadedError, EngineStoppedError, DeadlineError)

HELLO: Final = [{"role": "user", "content": "Why is the sky blue?"}]
CITY: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}, "country": {"type": "string"}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
WEATHER: Final = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
TEXT: Final = {"type": "string"}


class RouteDescription(Frozen):
    """A route as people see it.

    Attributes:
        summary, tag, description: the summary is a few words, the tag the protocol's owner.
        answer: the type of a JSON answer; None without one.
        events: the structs of a stream's events; empty without streams of events.
        lines: the structs of a stream's lines; empty without streams of lines.
        media: other media types of an answer, with their schemas; for JSON, another form of it.
        form: the schema of a body of multipart/form-data; empty for JSON.
        may_be_unready: whether the same answer also comes with status 503.
        errors: the errors besides `ANYWHERE`.
        examples: request bodies by name, without the model's name.
        parameters: those of the path, the query and the headers, in OpenAPI's form.
        leads_to: operations whose path contains the id of this one's answer.
    """

    summary: str
    tag: str
    description: str = ""
    answer: Any = None
    events: tuple[Struct, ...] = ()
    lines: tuple[Struct, ...] = ()
    media: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    form: Mapping[str, Any] = field(default_factory=dict)
    may_be_unready: bool = False
    errors: tuple[type[TwostrokeError], ...] = ()
    examples: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    parameters: tuple[dict[str, Any], ...] = ()
    leads_to: tuple[tuple[str, str], ...] = ()


def parameter(place: str, name: str, description: str, **schema: object) -> dict[str, Any]:
    """Return a parameter in OpenAPI's form; those of paths are required."""
    found = {"name": name, "in": place, "description": description, "schema": schema}
    return found | ({"required": True} if place == "path" else {})
