"""What goes wrong in a request, and how OpenAI's clients want to hear of it."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from twostroke.core.errors import EngineStoppedError, RequestError, TwostrokeError

MAX_MESSAGE_LENGTH = 1000
RETRY_AFTER_S = 1


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
    """A body that does not say that it is JSON."""

    http_status = 415
    code = "unsupported_media_type"


class ClientGoneError(TwostrokeError):
    """The client left before its answer was ready; nobody will read this."""

    http_status = 499
    code = "client_gone"


class ErrorDetail(msgspec.Struct, frozen=True):
    """The inside of OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object, as a response body or as the data of a stream's event."""

    error: ErrorDetail


def to_body(error: TwostrokeError) -> bytes:
    """Return the JSON of an error.

    Failures of the engine are told without their inner message, which may speak of memory and
    paths; the server's log has it.
    """
    if error.http_status < 500:
        message = error.message
    elif isinstance(error, EngineStoppedError):
        message = "The engine is not running: it is shutting down or has failed. Try again later."
    else:
        message = "The engine failed on this request."
    detail = ErrorDetail(one_line(message), _kind(error.http_status), error.param, error.code)
    return msgspec.json.encode(ErrorBody(detail))


def to_response(error: TwostrokeError) -> Response:
    """Return the response that tells of an error."""
    headers = {}
    if error.http_status in {429, 503}:
        headers["retry-after"] = str(RETRY_AFTER_S)
    if error.http_status in {408, 413, 431}:  # what may still come is not worth waiting for
        headers["connection"] = "close"
    return Response(to_body(error), error.http_status, headers, media_type="application/json")


def one_line(text: str) -> str:
    """Return `text` with line breaks and other control characters spelled out, and not too long."""
    text = text[: MAX_MESSAGE_LENGTH + 1]
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= MAX_MESSAGE_LENGTH else text[: MAX_MESSAGE_LENGTH - 1] + "…"


def _kind(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error"
    )
