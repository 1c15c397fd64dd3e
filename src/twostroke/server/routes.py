"""Which API protocol answers each path, and errors for paths that the server does not have."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from twostroke.core.errors import nearest
from twostroke.server.body.explain import MAX_NAME_LENGTH
from twostroke.server.generation.protocol import (
    NDJSON,
    ApiProtocol,
    EmbeddingProtocol,
    UtilityEndpoint,
)
from twostroke.server.protocols.anthropic import messages
from twostroke.server.protocols.anthropic.reply import MessageEncoder
from twostroke.server.protocols.common.fields import llama_server_aliases
from twostroke.server.protocols.llama_server import completion, infill
from twostroke.server.protocols.llama_server import embeddings as llama_embeddings
from twostroke.server.protocols.llama_server.fields import field_names as llama_field_names
from twostroke.server.protocols.llama_server.reply import LlamaEncoder
from twostroke.server.protocols.ollama import embed, models
from twostroke.server.protocols.ollama import reply as ollama_reply
from twostroke.server.protocols.ollama import request as ollama
from twostroke.server.protocols.openai import chat, completions, embeddings, stored_chat, tokens
from twostroke.server.protocols.openai.completions_reply import CompletionEncoder
from twostroke.server.protocols.responses import compact
from twostroke.server.protocols.responses import exchange as responses
from twostroke.server.protocols.responses.reply import ResponsesEncoder
from twostroke.server.protocols.responses.request import ResponsesRequest

GENERATION_PROTOCOLS: Final[dict[str, ApiProtocol[Any]]] = {
    "/v1/chat/completions": ApiProtocol(
        prefix="chatcmpl-",
        request=chat.ChatRequest,
        read=stored_chat.read,
        encoder=stored_chat.encoder,
        field_names=chat.field_names,
        read_as_llama_server=stored_chat.read_as_llama_server,
    ),
    "/v1/completions": ApiProtocol(
        prefix="cmpl-",
        request=completions.CompletionRequest,
        read=completions.read,
        encoder=CompletionEncoder,
        field_names=llama_server_aliases,
    ),
    "/v1/messages": ApiProtocol(
        prefix="msg_",
        request=messages.MessagesRequest,
        read=messages.read,
        encoder=MessageEncoder,
        field_names=messages.field_names,
    ),
    "/v1/responses": ApiProtocol(
        prefix="resp_",
        request=ResponsesRequest,
        read=responses.read,
        encoder=ResponsesEncoder,
        field_names=responses.field_names,
        recalls=True,
    ),
    "/v1/responses/compact": ApiProtocol(
        prefix="resp_",
        request=compact.CompactRequest,
        read=compact.read,
        encoder=compact.CompactEncoder,
        field_names=compact.field_names,
        recalls=True,
    ),
    "/completion": ApiProtocol(
        prefix="cmpl-",
        request=completion.LlamaRequest,
        read=completion.read,
        encoder=LlamaEncoder,
        field_names=llama_field_names,
    ),
    "/infill": ApiProtocol(
        prefix="cmpl-",
        request=infill.InfillRequest,
        read=infill.read,
        encoder=LlamaEncoder,
        field_names=llama_field_names,
    ),
    "/api/chat": ApiProtocol(
        prefix="",
        request=ollama.OllamaChatRequest,
        read=ollama.read_chat,
        encoder=partial(ollama_reply.LineEncoder, make=ollama_reply.chat_line),
        field_names=ollama.field_names,
        framing=NDJSON,
        empty_response=ollama_reply.empty_chat_response,
        keep_s=ollama.keep_alive_s,
    ),
    "/api/generate": ApiProtocol(
        prefix="",
        request=ollama.OllamaGenerateRequest,
        read=ollama.read_generate,
        encoder=partial(ollama_reply.LineEncoder, make=ollama_reply.generate_line),
        field_names=ollama.field_names,
        framing=NDJSON,
        empty_response=ollama_reply.empty_generate_response,
        keep_s=ollama.keep_alive_s,
    ),
}
EMBEDDING_PROTOCOLS: Final[dict[str, EmbeddingProtocol[Any]]] = {
    "/v1/embeddings": EmbeddingProtocol(
        request=embeddings.EmbeddingRequest,
        read=embeddings.read,
        whole_response=embeddings.to_response,
    ),
    "/embeddings": EmbeddingProtocol(
        request=llama_embeddings.LlamaEmbeddingRequest,
        read=llama_embeddings.read,
        whole_response=llama_embeddings.to_response,
    ),
    "/api/embed": EmbeddingProtocol(
        request=embed.EmbedRequest,
        read=embed.read,
        whole_response=embed.to_response,
        empty_response=embed.empty_response,
        keep_s=ollama.keep_alive_s,
    ),
    "/api/embeddings": EmbeddingProtocol(
        request=embed.OldEmbedRequest,
        read=embed.read_old,
        whole_response=embed.to_old_response,
        empty_response=embed.empty_old_response,
        keep_s=ollama.keep_alive_s,
    ),
}
UTILITY_ENDPOINTS: Final[dict[str, UtilityEndpoint[Any]]] = {
    "/v1/messages/count_tokens": UtilityEndpoint(
        request=messages.CountRequest,
        answer=messages.count_tokens,
        field_names=messages.field_names,
    ),
    "/v1/responses/input_tokens": UtilityEndpoint(
        request=ResponsesRequest,
        answer=responses.count_tokens,
        field_names=responses.field_names,
        recalls=True,
    ),
    "/v1/chat/completions/input_tokens": UtilityEndpoint(
        request=chat.ChatRequest,
        answer=chat.count_tokens,
        field_names=chat.field_names,
        recalls=True,
    ),
    "/tokenize": UtilityEndpoint(
        request=tokens.TokenizeRequest,
        answer=tokens.tokenize,
        field_names=lambda _request: chat.TOOL_NAMES,
    ),
    "/detokenize": UtilityEndpoint(request=tokens.DetokenizeRequest, answer=tokens.detokenize),
    "/api/show": UtilityEndpoint(request=models.ShowRequest, answer=models.show),
    "/api/pull": UtilityEndpoint(request=models.PullRequest, answer=models.pull),
    "/apply-template": UtilityEndpoint(
        request=tokens.TemplateRequest,
        answer=tokens.apply_template,
        field_names=lambda _request: chat.TOOL_NAMES,
    ),
}

_SERVED_APIS: Final = (
    "Served are chat completions, completions, responses, conversations, embeddings, files, "
    "uploads, batches, messages and models: see /openapi.json."
)
# The reason why a path and the paths below it are not served.
_REASONS_BY_PATH: Final = {
    **dict.fromkeys(
        (
            "/v1/audio",
            "/v1/images",
            "/v1/live",
            "/v1/realtime",
            "/v1/videos",
            "/v1/voices",
        ),
        "models here read and write text only",
    ),
    "/v1/moderations": "no model for moderation is loaded",
    **dict.fromkeys(
        (
            "/v1/agents",
            "/v1/assistants",
            "/v1/chatkit",
            "/v1/containers",
            "/v1/decisions",
            "/v1/deployments",
            "/v1/environments",
            "/v1/evals",
            "/v1/fine-tunes",
            "/v1/fine_tuning",
            "/v1/memory_stores",
            "/v1/organization",
            "/v1/organizations",
            "/v1/projects",
            "/v1/safety",
            "/v1/sessions",
            "/v1/skills",
            "/v1/threads",
            "/v1/user_profiles",
            "/v1/vaults",
            "/v1/vector_stores",
            "/v1/webhooks",
        ),
        "it belongs to the provider's own service",
    ),
    "/v1/complete": "send /v1/messages, or /v1/completions for a text to continue",
    "/v1/edits": "OpenAI has ended it, too: send /v1/chat/completions",
    "/v1/engines": "OpenAI has ended it, too: send /v1/models",
}


def explain_unknown_path(path: str, known_paths: list[str]) -> str:
    """Return the message of the 404 response for an HTTP path that the server does not have.

    The message says why an API of other servers is not served, or names the most similar path.
    """
    shortened_path = path[:MAX_NAME_LENGTH]
    for start, reason in _REASONS_BY_PATH.items():
        if path == start or path.startswith(f"{start}/"):
            return f"The path {shortened_path} is not served: {reason}. {_SERVED_APIS}"
    return f"The path {path} does not exist.{nearest(shortened_path, known_paths)}"
