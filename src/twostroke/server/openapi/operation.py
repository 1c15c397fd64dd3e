"""The description of a route for OpenAPI: its texts, responses, errors and examples."""

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
    """The description of an HTTP route for the OpenAPI document.

    Attributes:
        summary: a few words.
        tag: the group of the route: the owner of its protocol, such as OpenAI.
        description: further sentences.
        answer: the type of a JSON response; None without one.
        events: the structs of a stream's server-sent events; empty without such a stream.
        lines: the structs of a stream of JSON lines; empty without such a stream.
        media: the JSON Schemas of responses of other media types, by media type. The schema for
            application/json is an alternative to `answer`.
        form: the schema of a multipart/form-data body; empty for a JSON body.
        may_be_unready: whether the route sends the same response with status 503 if the server is
            not ready.
        errors: the classes of the errors besides `ANYWHERE`, the errors of all routes.
        examples: request bodies by name, without the model's name.
        parameters: the parameters of the path, the query and the headers, in OpenAPI's form.
        leads_to: methods and paths of operations that take the id in this operation's response.
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


def parameter(location: str, name: str, description: str, **schema: object) -> dict[str, Any]:
    """Build the OpenAPI description of a request parameter.

    `location` is "path", "query" or "header"; parameters in the path are required. `schema` has the
    keywords of the parameter's JSON Schema.
    """
    fields = {"name": name, "in": location, "description": description, "schema": schema}
    return fields | ({"required": True} if location == "path" else {})
