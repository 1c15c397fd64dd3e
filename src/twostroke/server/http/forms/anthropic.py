"""The form of errors in Anthropic's protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from twostroke.core.errors import ContextLengthError, OverloadedError, TwostrokeError
from twostroke.core.json_io import encode_json
from twostroke.server.http.errors import to_message
from twostroke.server.http.request_context import ErrorForm

if TYPE_CHECKING:
    from twostroke.core.errors import Naming

_OVERLOADED: Final = 529
KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


_TYPES: Final = sorted({"invalid_request_error", "api_error", *KINDS.values()})


class ErrorCause(msgspec.Struct, frozen=True):
    """A code by which clients choose how to continue."""

    error_code: str


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    """The inside of Anthropic's error object."""

    type: Annotated[str, Meta(extra_json_schema={"enum": _TYPES})]
    message: str
    details: ErrorCause | UnsetType = UNSET


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """Anthropic's error object, as a response body or as the data of a stream's event."""

    error: AnthropicErrorDetail
    request_id: str


def _status(error: TwostrokeError) -> int:
    return _OVERLOADED if isinstance(error, OverloadedError) else error.http_status


def _body(error: TwostrokeError, request_id: str, naming: Naming) -> bytes:
    status = _status(error)
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    cause = _CAUSES.get(error.field or "", UNSET)
    detail = AnthropicErrorDetail(kind, _message(error, naming), cause)
    return encode_json(AnthropicErrorBody(detail, request_id))


def _message(error: TwostrokeError, naming: Naming) -> str:
    """Return the sentence; for the context length it is Anthropic's, which clients parse."""
    facts: Any = error.facts
    if not isinstance(error, ContextLengthError) or "context_length" not in facts:
        return to_message(error, naming)
    num_prompt, limit = facts["num_prompt"], facts["context_length"]
    if "num_answer" not in facts:
        return f"prompt is too long: {facts['least']}{num_prompt} tokens > {limit - 1} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {num_prompt} + "
        f"{facts['num_answer']} > {limit}, decrease input length or `max_tokens` and try again"
    )


# By field. At this code, SDKs send the whole conversation instead of a thread's id.
_CAUSES: Final = {"thread": ErrorCause("thread_unsupported_request")}

ANTHROPIC: Final = ErrorForm(
    status=_status,
    body=_body,
    struct=AnthropicErrorBody,
    id_header=b"request-id",
)
