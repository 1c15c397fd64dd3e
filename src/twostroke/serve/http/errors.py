"""What goes wrong in a request, and how OpenAI's clients want to hear of it.

Other protocols have forms of their own (`ErrorForm`).
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from twostroke.core.errors import EngineStoppedError, RequestError, TwostrokeError
from twostroke.serve.observe.exchange import exchange_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.types import Scope

    from twostroke.core.errors import Naming

MAX_MESSAGE_LENGTH = 1000
RETRY_AFTER_S = 1
RETRY_STATUSES: Final = frozenset((429, 503, 529))
ErrorType = Literal[
    "invalid_request_error", "authentication_error", "rate_limit_error", "server_error"
]
_TYPES: Final[dict[int, ErrorType]] = {401: "authentication_error", 429: "rate_limit_error"}
_PLACE: Final = re.compile(r"\[\d+\]")
_logger = logging.getLogger("twostroke.serve")


class BodySyntaxError(RequestError):
    """A body that is not JSON, or nested too deeply."""

    code = "invalid_json"


class UnknownFieldError(RequestError):
    """A field that no such request has."""

    code = "unknown_parameter"


class MissingFieldError(RequestError):
    """A field that every such request needs."""

    code = "missing_required_parameter"


class UnsupportedFieldError(RequestError):
    """A field or value of the protocol that would change the answer and that we do not have."""

    code = "unsupported_parameter"


class UnknownPathError(TwostrokeError):
    """No such route."""

    http_status = 404
    code = "unknown_url"


class MethodError(TwostrokeError):
    """A route that is there, asked with a method that it does not take."""

    http_status = 405
    code = "method_not_allowed"


class BodySizeError(TwostrokeError):
    """A request body over the limit."""

    http_status = 413
    code = "request_too_large"


class HeaderSizeError(TwostrokeError):
    """Request line and headers over the limit."""

    http_status = 431
    code = "headers_too_large"


class BodyTimeoutError(TwostrokeError):
    """A request body that came too slowly."""

    http_status = 408
    code = "request_timeout"


class ContentTypeError(TwostrokeError):
    """A body that does not say that it is JSON, or says that it is compressed."""

    http_status = 415
    code = "unsupported_media_type"


class ClientGoneError(TwostrokeError):
    """The client left before its answer was ready; nobody will read this."""

    http_status = 499
    code = "client_gone"


class ErrorDetail(msgspec.Struct, frozen=True):
    """The inside of OpenAI's error object."""

    message: Annotated[str, Meta(description="One sentence: what was wrong, and the limit.")]
    type: ErrorType
    param: Annotated[str | None, Meta(description="The field with the wrong value.")]
    code: Annotated[str | None, Meta(description="A word for programs.")]


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object, as a response body or as the data of a stream's event."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How one protocol tells of errors.

    Attributes:
        status: the HTTP status of an error.
        body: the JSON of one, of the request's id, and with the client's names of fields.
        struct: what that JSON is.
        id_header: a further name for the header with the request's id.
    """

    status: Callable[[TwostrokeError], int]
    body: Callable[[TwostrokeError, str, Naming], bytes]
    struct: type[msgspec.Struct]
    id_header: bytes | None = None


def to_message(error: TwostrokeError, naming: Naming = str) -> str:
    """Return what a client may read of an error; `naming` gives the client's names of fields.

    Failures of the engine are told without their inner message, which may speak of memory and
    paths; the server's log has it.
    """
    if error.http_status < 500:
        return one_line(error.sentence(naming))
    if isinstance(error, EngineStoppedError):
        return "The engine is not running: it is shutting down or has failed. Try again later."
    return "The engine failed on this request."


def to_response(error: TwostrokeError, scope: Scope) -> Response:
    """Return the response that tells of an error, as the protocol of `scope`'s path has it."""
    form: ErrorForm = scope.get("state", {}).get("error_form", OPENAI)
    headers, status = {}, form.status(error)
    if (exchange := exchange_of(scope)) is not None:
        exchange.error = error.code or "server_error"
    if status in RETRY_STATUSES:
        headers["retry-after"] = str(RETRY_AFTER_S)
    if status in {408, 413, 431}:  # what may still come is not worth waiting for
        headers["connection"] = "close"
    names = scope.get("state", {}).get("field_names", {})
    body = form.body(error, request_id_of(scope), partial(_rename, names=names))
    return Response(body, status, headers, media_type="application/json")


def note_names(names: Mapping[str, str], scope: Scope) -> None:
    """Note what the client calls fields; a place in a list is `[]`, as in `tools[].name`."""
    scope.setdefault("state", {})["field_names"] = names


def _rename(field: str, names: Mapping[str, str]) -> str:
    places = _PLACE.findall(field)
    named = names.get(_PLACE.sub("[]", field))
    return field if named is None else named.replace("[]", "{}").format(*places)


def request_id_of(scope: Scope) -> str:
    """Return the request id that the outermost layer noted; empty without it."""
    found: str = scope.get("state", {}).get("request_id", "")
    return found


def note_fault(error: Exception, scope: Scope) -> None:
    """Log what nobody foresaw; the trace only for those who debug the server itself."""
    if (exchange := exchange_of(scope)) is not None:
        exchange.error = "server_error"
    _logger.error(
        "Request %s failed: %s: %s",
        request_id_of(scope),
        type(error).__name__,
        one_line(str(error)),
        exc_info=error if _logger.isEnabledFor(logging.DEBUG) else None,
    )


def note_failure(error: TwostrokeError, scope: Scope) -> None:
    """Log an error that is no fault of this program, such as a failure of the engine."""
    level = logging.ERROR if error.http_status >= 500 else logging.WARNING
    _logger.log(level, "Request %s failed: %s", request_id_of(scope), one_line(str(error)))


def one_line(text: str) -> str:
    """Return `text` with line breaks and other control characters spelled out, and not too long."""
    text = text[: MAX_MESSAGE_LENGTH + 1]
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= MAX_MESSAGE_LENGTH else text[: MAX_MESSAGE_LENGTH - 1] + "…"


def _openai_body(error: TwostrokeError, _request_id: str, naming: Naming) -> bytes:
    param = error.field and naming(error.field)
    message, kind = to_message(error, naming), _kind(error.http_status)
    detail = ErrorDetail(message, kind, param, error.code)
    return msgspec.json.encode(ErrorBody(detail))


def _kind(status: int) -> ErrorType:
    if status >= 500:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


OPENAI: Final = ErrorForm(
    status=lambda error: error.http_status,
    body=_openai_body,
    struct=ErrorBody,
)
