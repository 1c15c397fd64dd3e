"""Error bodies of Anthropic, llama-server and Ollama, and the choice of the form by path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from twostroke.core.errors import (
    ContextLengthError,
    ModelNotFoundError,
    OverloadedError,
    TwostrokeError,
)
from twostroke.core.json_io import encode_json
from twostroke.core.message_text import counted_noun
from twostroke.server.http.errors import OPENAI, context_counts, one_line, to_message
from twostroke.server.http.request_context import ErrorForm

if TYPE_CHECKING:
    from starlette.types import Scope

    from twostroke.core.errors import Naming

_OVERLOADED_STATUS: Final = 529
ANTHROPIC_TYPES_BY_STATUS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED_STATUS: "overloaded_error",
}
_ANTHROPIC_TYPES: Final = sorted(
    {"invalid_request_error", "api_error", *ANTHROPIC_TYPES_BY_STATUS.values()}
)


class ErrorCause(msgspec.Struct, frozen=True):
    """The code of an Anthropic error, by which clients choose how to continue."""

    error_code: str


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    """The `error` member of Anthropic's error object."""

    type: Annotated[str, Meta(extra_json_schema={"enum": _ANTHROPIC_TYPES})]
    message: str
    details: ErrorCause | UnsetType = UNSET


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """Anthropic's error object, as a response body or as the data of a stream's event."""

    error: AnthropicErrorDetail
    request_id: str


def _anthropic_status(error: TwostrokeError) -> int:
    return _OVERLOADED_STATUS if isinstance(error, OverloadedError) else error.http_status


def _anthropic_body(error: TwostrokeError, request_id: str, naming: Naming) -> bytes:
    status = _anthropic_status(error)
    type_ = ANTHROPIC_TYPES_BY_STATUS.get(
        status, "invalid_request_error" if status < 500 else "api_error"
    )
    cause = _ANTHROPIC_CAUSES.get(error.field or "", UNSET)
    detail = AnthropicErrorDetail(type_, _anthropic_message(error, naming), cause)
    return encode_json(AnthropicErrorBody(detail, request_id))


def _anthropic_message(error: TwostrokeError, naming: Naming) -> str:
    """Return an error's message for Anthropic's clients.

    For a prompt that is too long, the message has the words of Anthropic's API, which clients
    parse.
    """
    facts: Any = error.facts
    if not isinstance(error, ContextLengthError) or "context_length" not in facts:
        return to_message(error, naming)
    num_prompt, limit = facts["num_prompt"], facts["context_length"]
    if "num_answer" not in facts:
        return (
            f"prompt is too long: {facts['least']}{counted_noun(num_prompt, 'token')} > "
            f"{limit - 1} maximum"
        )
    return (
        f"input length and `max_tokens` exceed context limit: {num_prompt} + "
        f"{facts['num_answer']} > {limit}, decrease input length or `max_tokens` and try again"
    )


# Causes by field. On this code, SDKs send the whole conversation instead of a thread's id.
_ANTHROPIC_CAUSES: Final = {"thread": ErrorCause("thread_unsupported_request")}

ANTHROPIC: Final = ErrorForm(
    status=_anthropic_status,
    body=_anthropic_body,
    struct=AnthropicErrorBody,
    id_header=b"request-id",
)

_LLAMA_TOO_LONG: Final = "exceed_context_size_error"
_LLAMA_TYPES_BY_STATUS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_supported_error",
    429: "unavailable_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_LLAMA_TYPES: Final = sorted(
    {"invalid_request_error", "server_error", _LLAMA_TOO_LONG, *_LLAMA_TYPES_BY_STATUS.values()}
)


class LlamaErrorDetail(msgspec.Struct, frozen=True):
    """The `error` member of llama-server's error object.

    `n_prompt_tokens` and `n_ctx` (the context length) are set only if the prompt is too long.
    """

    code: Annotated[int, Meta(description="The HTTP status.")]
    message: str
    type: Annotated[str, Meta(extra_json_schema={"enum": _LLAMA_TYPES})]
    n_prompt_tokens: int | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET


class LlamaErrorBody(msgspec.Struct, frozen=True):
    """llama-server's error object, as a response body or as the data of a stream's event."""

    error: LlamaErrorDetail


def _llama_body(error: TwostrokeError, _request_id: str, naming: Naming) -> bytes:
    status = error.http_status
    type_ = _LLAMA_TYPES_BY_STATUS.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    num_prompt, num_context = context_counts(error)
    if num_context is not UNSET:
        type_ = _LLAMA_TOO_LONG
    detail = LlamaErrorDetail(status, to_message(error, naming), type_, num_prompt, num_context)
    return encode_json(LlamaErrorBody(detail))


LLAMA_SERVER: Final = ErrorForm(
    status=lambda error: error.http_status, body=_llama_body, struct=LlamaErrorBody
)


class OllamaErrorBody(msgspec.Struct, frozen=True):
    """Ollama's error object, as a response body or as the last line of a stream."""

    error: str


def _ollama_body(error: TwostrokeError, _request_id: str, naming: Naming) -> bytes:
    message = to_message(error, naming)
    if isinstance(error, ModelNotFoundError) and "name" in error.facts:
        # Clients search the message for these words.
        reason = "model '{name}' not found: this server has {served} (others: `twostroke pull`)"
        facts = error.facts | {"served": error.facts["served"] or "no model"}
        message = one_line(reason.format(**facts))
    return encode_json(OllamaErrorBody(message))


OLLAMA: Final = ErrorForm(
    status=lambda error: error.http_status, body=_ollama_body, struct=OllamaErrorBody
)

ANTHROPIC_HEADER: Final = b"anthropic-version"  # Anthropic's SDKs always send it
_LLAMA_PATHS: Final = """
    /completion /infill /apply-template /embeddings /props /slots /lora-adapters
    /rerank /reranking /v1/rerank /v1/reranking
"""
_LLAMA_ALIASES: Final = ("/chat/completions", "/completions", "/embedding")
# For each path and all paths below it; the first match decides.
_FORMS_BY_PATH: Final = {
    "/v1/messages": ANTHROPIC,
    "/api/plan": OPENAI,
    "/api/prompts": OPENAI,
    "/api/state": OPENAI,
    "/api/load": OPENAI,
    "/api": OLLAMA,
    **dict.fromkeys(_LLAMA_PATHS.split(), LLAMA_SERVER),
}
FORMS: Final = (OPENAI, *dict.fromkeys(_FORMS_BY_PATH.values()))


def error_form(scope: Scope, client_path: str = "") -> ErrorForm:
    """Return the form of error responses for a request's path: OpenAI's, Anthropic's or another.

    The path decides, then the header `anthropic-version`; the default is OpenAI's form.
    `client_path` is the path before aliases are resolved: OpenAI's paths without `/v1` have llama-
    server's form.
    """
    path = scope["path"]
    if client_path in _LLAMA_ALIASES:
        return LLAMA_SERVER
    for prefix, form in _FORMS_BY_PATH.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return form
    is_anthropic = any(name == ANTHROPIC_HEADER for name, _ in scope["headers"])
    return ANTHROPIC if is_anthropic else OPENAI
