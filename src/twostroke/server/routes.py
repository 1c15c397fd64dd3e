"""The protocols that the server speaks, by path, and errors for paths that it does not have."""

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
from twostroke.server.protocols.common.fields import other_names
from twostroke.server.protocols.llama_server import completion, infill
from twostroke.server.protocols.llama_server import embeddings as llama_embeddings
from twostroke.server.protocols.llama_server.fields import names as llama_names
from twostroke.server.protocols.llama_server.reply import LlamaEncoder
from twostroke.server.protocols.ollama import embed, models
from twostroke.server.protocols.ollama import reply as ollama_reply
from twostroke.server.protocols.ollama import request as ollama
from twostroke.server.protocols.ollama.request import keep_s
from twostroke.server.protocols.openai import chat, completions, embeddings, stored_chat, tokens
from twostroke.server.protocols.openai.completions_reply import CompletionEncoder
from twostroke.server.protocols.responses import compact
from twostroke.server.protocols.responses import exchange as responses
from twostroke.server.protocols.responses.reply import ResponsesEncoder
from twostroke.server.protocols.responses.request import ResponsesRequest

DIALECTS: Final[dict[str, ApiProtocol[Any]]] = {
    "/v1/chat/completions": ApiProtocol(
        "chatcmpl-",
        chat.ChatRequest,
        stored_chat.read,
        stored_chat.encoder,
        chat.names,
        read_as_llama_server=stored_chat.read_as_llama_server,
    ),
    "/v1/completions": ApiProtocol(
        "cmpl-",
        completions.CompletionRequest,
        completions.read,
        CompletionEncoder,
        other_names,
    ),
    "/v1/messages": ApiProtocol(
        "msg_", messages.MessagesRequest, messages.read, MessageEncoder, messages.names
    ),
    "/v1/responses": ApiProtocol(
        "resp_",
        ResponsesRequest,
        responses.read,
        ResponsesEncoder,
        responses.names,
        recalls=True,
    ),
    "/v1/responses/compact": ApiProtocol(
        "resp_",
        compact.CompactRequest,
        compact.read,
        compact.CompactEncoder,
        compact.names,
        recalls=True,
    ),
    "/completion": ApiProtocol(
        "cmpl-", completion.LlamaRequest, completion.read, LlamaEncoder, llama_names
    ),
    "/infill": ApiProtocol("cmpl-", infill.InfillRequest, infill.read, LlamaEncoder, llama_names),
    "/api/chat": ApiProtocol(
        "",
        ollama.OllamaChatRequest,
        ollama.read_chat,
        partial(ollama_reply.LineEncoder, make=ollama_reply.chat_line),
        ollama.names,
        framing=NDJSON,
        empty=ollama_reply.empty_chat,
        keep_s=keep_s,
    ),
    "/api/generate": ApiProtocol(
        "",
        ollama.OllamaGenerateRequest,
        ollama.read_generate,
        partial(ollama_reply.LineEncoder, make=ollama_reply.generate_line),
        ollama.names,
        framing=NDJSON,
        empty=ollama_reply.empty_generate,
        keep_s=keep_s,
    ),
}
INQUIRIES: Final[dict[str, UtilityEndpoint[Any]]] = {
    "/v1/messages/count_tokens": UtilityEndpoint(
        messages.CountRequest, messages.count, messages.names
    ),
    "/v1/responses/input_tokens": UtilityEndpoint(
        ResponsesRequest, responses.count, responses.names, recalls=True
    ),
    "/v1/chat/completions/input_tokens": UtilityEndpoint(
        chat.ChatRequest, chat.count, chat.names, recalls=True
    ),
    "/tokenize": UtilityEndpoint(
        tokens.TokenizeRequest, tokens.tokenize, lambda _asked: chat.TOOL_NAMES
    ),
    "/detokenize": UtilityEndpoint(tokens.DetokenizeRequest, tokens.detokenize),
    "/api/show": UtilityEndpoint(models.ShowRequest, models.show),
    "/api/pull": UtilityEndpoint(models.PullRequest, models.pull),
    "/apply-template": UtilityEndpoint(
        tokens.TemplateRequest, tokens.apply_template, lambda _asked: chat.TOOL_NAMES
    ),
}
EMBEDDINGS: Final[dict[str, EmbeddingProtocol[Any]]] = {
    "/v1/embeddings": EmbeddingProtocol(
        embeddings.EmbeddingRequest, embeddings.read, embeddings.whole_response
    ),
    "/embeddings": EmbeddingProtocol(
        llama_embeddings.LlamaEmbeddingRequest,
        llama_embeddings.read,
        llama_embeddings.whole_response,
    ),
    "/api/embed": EmbeddingProtocol(
        embed.EmbedRequest, embed.read, embed.whole_response, embed.empty, keep_s
    ),
    "/api/embeddings": EmbeddingProtocol(
        embed.OldEmbedRequest, embed.read_old, embed.whole_old, embed.empty_old, keep_s
    ),
}

_TEXT_MODELS: Final = "models here read and write text only"
_PROVIDER: Final = "it belongs to the provider's own service"
_SERVED_APIS: Final = (
    "Served are chat completions, completions, responses, conversations, embeddings, files, "
    "uploads, batches, messages and models: see /openapi.json."
)
# By the beginning of a path, with the reason why it is not served.
_REASONS: Final = {
    **dict.fromkeys(("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime"), _TEXT_MODELS),
    **dict.fromkeys(("/v1/live", "/v1/voices"), _TEXT_MODELS),
    "/v1/moderations": "no model for moderation is loaded",
    **dict.fromkeys(
        (
            *("/v1/fine_tuning", "/v1/fine-tunes", "/v1/evals", "/v1/containers", "/v1/webhooks"),
            *("/v1/organization", "/v1/organizations", "/v1/skills", "/v1/safety", "/v1/chatkit"),
            *("/v1/assistants", "/v1/threads", "/v1/vector_stores", "/v1/agents", "/v1/sessions"),
            *("/v1/environments", "/v1/memory_stores", "/v1/vaults", "/v1/user_profiles"),
            *("/v1/projects", "/v1/decisions", "/v1/deployments"),
        ),
        _PROVIDER,
    ),
    "/v1/complete": "send /v1/messages, or /v1/completions for a text to continue",
    "/v1/edits": "OpenAI has ended it, too: send /v1/chat/completions",
    "/v1/engines": "OpenAI has ended it, too: send /v1/models",
}


def unknown_path(path: str, known_paths: list[str]) -> str:
    """Return the message about a path without a route: why it is not served, or the nearest one."""
    word = path[:MAX_NAME_LENGTH]
    for start, reason in _REASONS.items():
        if path == start or path.startswith(f"{start}/"):
            return f"The path {word} is not served: {reason}. {_SERVED_APIS}"
    return f"The path {path} does not exist.{nearest(word, known_paths)}"
