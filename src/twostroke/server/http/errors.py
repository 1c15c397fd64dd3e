"""Errors of HTTP requests, their messages and responses, and their form in OpenAI's API."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from twostroke.core.errors import (
    ContextLengthError,
    DeadlineError,
    EngineDiedError,
    EngineStoppedError,
    ModelNotLoadedError,
    RequestError,
    SchemaMissError,
    TwostrokeError,
)
from twostroke.core.json_io import encode_json
from twostroke.server.http.body_limits import BodiesError
from twostroke.server.http.request_context import ErrorForm, served_of
from twostroke.server.http.retry_after import retry_after
from twostroke.server.storage import DamagedRowError, RecordsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Scope

    from twostroke.core.errors import Naming

MAX_MESSAGE_LENGTH = 1000
RETRY_STATUSES: Final = frozenset((429, 503, 529))
SHOULD_RETRY_HEADER: Final = "x-should-retry"  # the SDKs of OpenAI and Anthropic obey it
ErrorType = Literal[
    "invalid_request_error", "authentication_error", "rate_limit_error", "server_error"
]
_TYPES: Final[dict[int, ErrorType]] = {401: "authentication_error", 429: "rate_limit_error"}
_LIST_INDEX: Final = re.compile(r"\[\d+\]")
_logger = logging.getLogger("twostroke.serve")


class BodySyntaxError(RequestError):
    """The request body is not JSON, or is nested too deeply."""

    code = "invalid_json"


class UnknownFieldError(RequestError):
    """The request has a field that the API does not have."""

    code = "unknown_parameter"


class MissingFieldError(RequestError):
    """The request lacks a required field."""

    code = "missing_required_parameter"


class UnsupportedFieldError(RequestError):
    """The API has this request field or value, but the server does not support it."""

    code = "unsupported_parameter"


class UnknownPathError(TwostrokeError):
    """The server has no route for the request's path."""

    http_status = 404
    code = "unknown_url"


class MethodError(TwostrokeError):
    """The path's route does not accept the request's HTTP method."""

    http_status = 405
    code = "method_not_allowed"


class BodySizeError(TwostrokeError):
    """The request body or uploaded file is larger than allowed."""

    http_status = 413
    code = "request_too_large"


class HeaderSizeError(TwostrokeError):
    """The request's path and headers together are larger than allowed."""

    http_status = 431
    code = "headers_too_large"


class FramingError(TwostrokeError):
    """The request has both Content-Length and Transfer-Encoding, which could smuggle a request.

    A proxy in front of the server may see a part of the body as another request.
    """

    http_status = 400
    code = "ambiguous_length"


class BodyTimeoutError(TwostrokeError):
    """The request body arrived too slowly."""

    http_status = 408
    code = "request_timeout"


class ContentTypeError(TwostrokeError):
    """The request's headers do not say that the body is JSON, or say that it is compressed."""

    http_status = 415
    code = "unsupported_media_type"


class ClientGoneError(TwostrokeError):
    """The client disconnected before its response began, so no client reads this error."""

    http_status = 499
    code = "client_gone"


class ServerStoppingError(EngineStoppedError):
    """The server is stopping: it refuses new requests, and later cuts off running requests."""


class GatewayError(TwostrokeError):
    """A server behind this server, such as a router's replica, cannot answer the request.

    Clients may read the message.
    """


class ErrorDetail(msgspec.Struct, frozen=True):
    """The `error` member of OpenAI's error object."""

    message: Annotated[str, Meta(description="One sentence: what was wrong, and the limit.")]
    type: ErrorType
    param: Annotated[str | None, Meta(description="The field with the wrong value.")]
    code: Annotated[str | None, Meta(description="A word for programs.")]
    n_prompt_tokens: Annotated[
        int | UnsetType, Meta(description="The tokens of a prompt that is too long.")
    ] = UNSET
    n_ctx: Annotated[
        int | UnsetType, Meta(description="The tokens that prompt and answer may have.")
    ] = UNSET


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object, as a response body or as the data of a stream's event."""

    error: ErrorDetail


def to_message(error: TwostrokeError, naming: Naming = str) -> str:
    """Return an error's message as clients may read it.

    `naming` gives the protocol's names of fields. The message of a failed engine may contain paths
    and addresses, so clients get a general message, and only the log has the error's own.
    """
    if error.http_status < 500:
        return one_line(error.sentence(naming))
    if isinstance(error, (BodiesError, DeadlineError, GatewayError)):
        return str(error)
    if isinstance(error, (SchemaMissError, DamagedRowError)):
        return one_line(str(error))
    if isinstance(error, RecordsError):
        return "The server's records are not available. Try again later."
    if isinstance(error, EngineStoppedError):
        if isinstance(error, (ServerStoppingError, EngineDiedError, ModelNotLoadedError)):
            return str(error)
        return "The engine is not running. Try again later."
    return "The engine failed on this request."


def to_response(error: TwostrokeError, scope: Scope) -> Response:
    """Return the HTTP response for an error, in the form of the request's protocol."""
    served_request = served_of(scope)
    served_request.error = error.code or "server_error"
    form = served_request.error_form
    headers = {}
    status = form.status(error)
    if isinstance(error, SchemaMissError):  # the server has already retried
        headers[SHOULD_RETRY_HEADER] = "false"
    if status in RETRY_STATUSES:
        headers["retry-after"] = retry_after(error)
    if isinstance(error, DamagedRowError):
        headers[SHOULD_RETRY_HEADER] = "false"
    is_body_unread = status in {408, 413, 431} or isinstance(error, (BodiesError, FramingError))
    if is_body_unread:  # the rest may be long
        headers["connection"] = "close"
    naming = partial(_rename, names=served_request.field_names)
    body = form.body(error, served_request.request_id, naming)
    return Response(body, status, headers, media_type="application/json")


def _rename(field: str, names: Mapping[str, str]) -> str:
    """Replace the engine's name of a field by the protocol's name, for an error message.

    `[]` in `names` stands for a list index.
    """
    indexes = _LIST_INDEX.findall(field)
    named = names.get(_LIST_INDEX.sub("[]", field))
    return field if named is None else named.replace("[]", "{}").format(*indexes)


def report(error: Exception, scope: Scope) -> TwostrokeError:
    """Log an error that ends a request, and return the error that the client may read.

    An unexpected exception becomes an internal error. Its traceback is logged at level DEBUG only.
    The request's access log gets the error's code.
    """
    served_request = served_of(scope)
    text = str(error)
    traceback: Exception | None = None
    if isinstance(error, TwostrokeError):
        reported = error
    else:
        reported = TwostrokeError("An unforeseen failure.")
        text = f"{type(error).__name__}: {text}"
        traceback = error if _logger.isEnabledFor(logging.DEBUG) else None
    level = logging.ERROR if reported.http_status >= 500 else logging.WARNING
    if isinstance(reported, SchemaMissError):
        level = logging.WARNING
    if isinstance(reported, (DeadlineError, ServerStoppingError)):
        level = logging.DEBUG  # expected; the access log has the request's error code
    _logger.log(
        level,
        "Request %s failed: %s",
        served_request.request_id,
        one_line(text),
        exc_info=traceback,
    )
    served_request.error = reported.code or "server_error"
    return reported


def one_line(text: str) -> str:
    """Return a message as one line for logs and clients.

    Control characters are escaped, and the line is cut to `MAX_MESSAGE_LENGTH`.
    """
    text = text[: MAX_MESSAGE_LENGTH + 1]
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= MAX_MESSAGE_LENGTH else text[: MAX_MESSAGE_LENGTH - 1] + "…"


def _openai_body(error: TwostrokeError, _request_id: str, naming: Naming) -> bytes:
    num_prompt, num_context = context_counts(error)
    detail = ErrorDetail(
        message=to_message(error, naming),
        type=_error_type(error.http_status),
        param=error.field and naming(error.field),
        code=error.code,
        n_prompt_tokens=num_prompt,
        n_ctx=num_context,
    )
    return encode_json(ErrorBody(detail))


def context_counts(error: TwostrokeError) -> tuple[int | UnsetType, int | UnsetType]:
    """Return the length of a prompt that is too long, and the context length, in tokens.

    Both are UNSET if `error` is not about a prompt that is too long.
    """
    facts = dict[str, Any](error.facts)
    if not isinstance(error, ContextLengthError) or "context_length" not in facts:
        return UNSET, UNSET
    return facts["num_prompt"], facts["context_length"]


def _error_type(status: int) -> ErrorType:
    if status >= 500:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


OPENAI: Final = ErrorForm(
    status=lambda error: error.http_status,
    body=_openai_body,
    struct=ErrorBody,
)
