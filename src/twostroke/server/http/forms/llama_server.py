"""The form of errors in llama-server's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from twostroke.core.json_io import encode_json
from twostroke.server.http.errors import context_counts, to_message
from twostroke.server.http.request_context import ErrorForm

if TYPE_CHECKING:
    from twostroke.core.errors import Naming, TwostrokeError

_TOO_LONG: Final = "exceed_context_size_error"
_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_supported_error",
    429: "unavailable_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_TYPES: Final = sorted({"invalid_request_error", "server_error", _TOO_LONG, *_KINDS.values()})


class LlamaErrorDetail(msgspec.Struct, frozen=True):
    """The inside of llama-server's error object; the counts are those of a prompt too long."""

    code: Annotated[int, Meta(description="The HTTP status.")]
    message: str
    type: Annotated[str, Meta(extra_json_schema={"enum": _TYPES})]
    n_prompt_tokens: int | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET


class LlamaErrorBody(msgspec.Struct, frozen=True):
    """llama-server's error object, as a response body or as the data of a stream's event."""

    error: LlamaErrorDetail


def _body(error: TwostrokeError, _request_id: str, naming: Naming) -> bytes:
    status = error.http_status
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    num_prompt, num_context = context_counts(error)
    if num_context is not UNSET:
        kind = _TOO_LONG
    detail = LlamaErrorDetail(status, to_message(error, naming), kind, num_prompt, num_context)
    return encode_json(LlamaErrorBody(detail))


LLAMA_SERVER: Final = ErrorForm(
    status=lambda error: error.http_status, body=_body, struct=LlamaErrorBody
)
