"""The OpenAPI texts, responses and examples of each route."""

from __future__ import annotations

from typing import Final

from twostroke.core.errors import ModelNotFoundError, OverloadedError, RequestError
from twostroke.server.http import errors
from twostroke.server.http.error_forms import ANTHROPIC, LLAMA_SERVER
from twostroke.server.http.router_messages import ServerLoad
from twostroke.server.models.about import (
    AboutBody,
    HealthBody,
    ModelBody,
    ModelList,
    ProgressBody,
)
from twostroke.server.observability.prompt_doctor import PromptsBody
from twostroke.server.openapi import batches, ollama, stored
from twostroke.server.openapi.operation import (
    BODY,
    CITY,
    GENERATION,
    HELLO,
    TEXT,
    WEATHER,
    RouteDescription,
    parameter,
)
from twostroke.server.protocols.anthropic import messages, reply
from twostroke.server.protocols.common.llama_completion import LlamaCompletion
from twostroke.server.protocols.llama_server import info
from twostroke.server.protocols.llama_server.embeddings import LlamaEmbedding
from twostroke.server.protocols.llama_server.reply import LlamaPiece
from twostroke.server.protocols.openai import (
    chat,
    chat_reply,
    completions_reply,
    embeddings,
    tokens,
)
from twostroke.server.protocols.responses import compact, stream_events
from twostroke.server.protocols.responses.body import ResponseBody
from twostroke.server.protocols.responses.exchange import InputTokens

_NAME: Final = {"type": "string", "minLength": 1}
_MODEL: Final = parameter(
    "path", "model", "One of the names in `/v1/models`; it may contain slashes.", **_NAME
)
_SELECTED_FIELDS: Final = {
    "type": "object",
    "description": "The fields in `response_fields`, by these names.",
    "not": {"required": ["content", "prompt", "stop", "model", "timings"]},
}
_ANTHROPIC_VERSION: Final = parameter(
    "header", "anthropic-version", "Any text: there is one version.", **TEXT
)
_ANTHROPIC_PAGE: Final = (
    _ANTHROPIC_VERSION,
    *(
        parameter("query", name, "In Anthropic's form: the part of the list to return.", **TEXT)
        for name in ("after_id", "before_id", "limit")
    ),
)
_ANTHROPIC_MODEL: Final = {
    "type": "object",
    "properties": {"type": {"const": "model"}},
    "required": ["type", "id", "display_name", "created_at"],
}
_ANTHROPIC_MODELS: Final = {
    "type": "object",
    "properties": {"data": {"type": "array", "items": _ANTHROPIC_MODEL}},
    "required": ["data", "has_more", "first_id", "last_id"],
}

_SERVER_OPERATIONS: Final[dict[tuple[str, str], RouteDescription]] = {
    ("GET", "/"): RouteDescription(
        "The server, its model and its paths",
        "Server",
        "A browser, which accepts `text/html`, gets the web UI.",
        answer=AboutBody,
        media={"text/html": TEXT},
    ),
    ("GET", "/health"): RouteDescription(
        "Whether a request would be answered now",
        "Server",
        answer=HealthBody,
        may_be_unready=True,
    ),
    ("GET", "/health/live"): RouteDescription(
        "Whether the server's process answers", "Server", answer=HealthBody
    ),
    ("GET", "/health/ready"): RouteDescription(
        "Whether a request would be answered now, as /health",
        "Server",
        answer=HealthBody,
        may_be_unready=True,
    ),
    ("GET", "/health/progress"): RouteDescription(
        "Whether the engine finishes steps", "Server", answer=ProgressBody, may_be_unready=True
    ),
    ("GET", "/api/load"): RouteDescription(
        "The facts that a router needs", "Server", answer=ServerLoad
    ),
    ("GET", "/metrics"): RouteDescription(
        "Metrics for Prometheus",
        "Server",
        media={"text/plain": TEXT, "application/openmetrics-text": TEXT},
    ),
    ("GET", "/api/state"): RouteDescription(
        "The server's state, now and during the last minute",
        "Server",
        "For the dashboard; see `docs/operations/observability.md`.",
        parameters=(
            parameter("query", "past", "Add the data of the last two minutes.", type="string"),
        ),
        media={
            "application/json": {
                "type": "object",
                "required": ["health", "model", "requests", "pages", "window", "totals"],
            },
        },
        errors=(errors.UnknownPathError,),
    ),
    ("GET", "/api/prompts"): RouteDescription(
        "Where the tenant's prompts part from earlier ones",
        "Server",
        "With `--prompt-doctor`; see `docs/operations/observability.md`.",
        parameters=(parameter("query", "show_text", "Add text around each point.", type="string"),),
        answer=PromptsBody,
        errors=(errors.UnknownPathError,),
    ),
    ("GET", "/openapi.json"): RouteDescription(
        "This description",
        "Server",
        media={
            "application/json": {"type": "object", "required": ["openapi", "info", "paths"]},
        },
    ),
    ("GET", "/v1/models"): RouteDescription(
        "List the models, once for each name",
        "OpenAI",
        "Requests with the header `anthropic-version` get Anthropic's form.",
        answer=ModelList,
        media={"application/json": _ANTHROPIC_MODELS},
        errors=(RequestError,),
        parameters=_ANTHROPIC_PAGE,
    ),
    ("GET", "/v1/models/{model}"): RouteDescription(
        "Return a model by one of its names",
        "OpenAI",
        answer=ModelBody,
        media={"application/json": _ANTHROPIC_MODEL},
        errors=(ModelNotFoundError,),
        parameters=(_MODEL, _ANTHROPIC_VERSION),
    ),
    ("POST", "/v1/chat/completions"): RouteDescription(
        "Answer a conversation",
        "OpenAI",
        "OpenAI's chat protocol, with vLLM's further fields. With `stream` each event is a chunk; "
        "the last event is `[DONE]`.",
        answer=chat_reply.ChatCompletion,
        events=(chat_reply.ChatChunk, errors.ErrorBody),
        errors=GENERATION,
        examples={
            "answer": {"messages": HELLO, "max_tokens": 64, "temperature": 0},
            "stream": {
                "messages": HELLO,
                "max_tokens": 64,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            "form": {
                "messages": [{"role": "user", "content": "Where is the Eiffel Tower?"}],
                "max_tokens": 64,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "place", "schema": CITY},
                },
            },
            "tools": {
                "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
                "max_tokens": 64,
                "tools": [{"type": "function", "function": WEATHER}],
            },
        },
    ),
    ("POST", "/v1/completions"): RouteDescription(
        "Continue texts",
        "OpenAI",
        "OpenAI's older protocol. With `stream` each event has a piece of the text; the last event "
        "is `[DONE]`.",
        answer=completions_reply.CompletionBody,
        events=(completions_reply.CompletionBody, errors.ErrorBody),
        errors=GENERATION,
        examples={
            "text": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
            "several": {"prompt": ["2 + 2 =", "3 + 3 ="], "max_tokens": 4, "n": 2, "seed": 7},
            "score": {
                "prompt": "The sky is blue",
                "max_tokens": 0,
                "echo": True,
                "logprobs": 1,
            },
        },
    ),
    ("POST", "/v1/embeddings"): RouteDescription(
        "Turn texts into vectors",
        "OpenAI",
        "Vectors have length 1. Texts of similar meaning have similar vectors, if the model was "
        "trained for that.",
        answer=embeddings.EmbeddingList,
        errors=GENERATION,
        examples={
            "text": {"input": "The sky is blue."},
            "several": {"input": ["The sky is blue.", "Grass is green."], "dimensions": 16},
            "ids": {"input": [[5, 6, 7]], "encoding_format": "base64", "pooling": "last"},
        },
    ),
    ("POST", "/v1/messages"): RouteDescription(
        "Answer a conversation",
        "Anthropic",
        "Anthropic's Messages API. With `stream` events have names, which are their `type`.",
        answer=reply.MessageBody,
        events=(
            reply.MessageStart,
            reply.BlockStart,
            reply.Ping,
            reply.BlockDelta,
            reply.BlockStop,
            reply.MessageDelta,
            reply.MessageStop,
            ANTHROPIC.struct,
        ),
        errors=GENERATION,
        examples={
            "answer": {"messages": HELLO, "max_tokens": 64, "system": "Be brief."},
            "stream": {"messages": HELLO, "max_tokens": 64, "stream": True},
            "tools": {
                "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
                "max_tokens": 64,
                "tools": [{"name": "get_weather", "input_schema": WEATHER["parameters"]}],
            },
        },
        parameters=(_ANTHROPIC_VERSION,),
    ),
    ("POST", "/v1/messages/count_tokens"): RouteDescription(
        "Count a request's tokens",
        "Anthropic",
        answer=messages.TokenCount,
        errors=BODY,
        examples={"count": {"messages": HELLO, "system": "Be brief."}},
        parameters=(_ANTHROPIC_VERSION,),
    ),
    ("POST", "/v1/responses"): RouteDescription(
        "Answer a conversation, which may continue an earlier answer",
        "OpenAI",
        "OpenAI's Responses API. With `stream` events have names, which are their `type`; the "
        "last event has the complete response.",
        answer=ResponseBody,
        events=stream_events.EVENTS,
        errors=GENERATION,
        examples={
            "answer": {"input": "Why is the sky blue?", "max_output_tokens": 64},
            "stream": {
                "instructions": "Be brief.",
                "input": HELLO,
                "max_output_tokens": 64,
                "stream": True,
            },
            "form": {
                "input": "Where is the Eiffel Tower?",
                "max_output_tokens": 64,
                "text": {"format": {"type": "json_schema", "name": "place", "schema": CITY}},
            },
            "tools": {
                "input": "What is the weather in Paris?",
                "max_output_tokens": 64,
                "tools": [{"type": "function", **WEATHER}],
            },
        },
        leads_to=(
            ("GET", "/v1/responses/{response_id}"),
            ("DELETE", "/v1/responses/{response_id}"),
            ("GET", "/v1/responses/{response_id}/input_items"),
        ),
    ),
    ("POST", "/v1/responses/compact"): RouteDescription(
        "Replace a conversation by a summary, which the model writes",
        "OpenAI",
        "Begin the `input` of later requests with the items of `output`.",
        answer=compact.CompactedResponse,
        errors=GENERATION,
        examples={"compact": {"input": "Why is the sky blue?"}},
    ),
    ("POST", "/v1/chat/completions/input_tokens"): RouteDescription(
        "Count the tokens of a conversation's prompt",
        "OpenAI",
        "As llama-server does; the fields are those of `/v1/chat/completions`.",
        answer=chat.ChatInputTokens,
        errors=BODY,
        examples={"count": {"messages": HELLO}},
    ),
    ("POST", "/v1/responses/input_tokens"): RouteDescription(
        "Count a request's tokens",
        "OpenAI",
        answer=InputTokens,
        errors=BODY,
        examples={"count": {"input": "Why is the sky blue?", "instructions": "Be brief."}},
    ),
    ("POST", "/tokenize"): RouteDescription(
        "Return the token ids of a text or a conversation",
        "vLLM",
        "llama-server's clients send `content`.",
        answer=tokens.TokenizeBody,
        errors=BODY,
        examples={
            "text": {"prompt": "The sky is blue.", "return_token_strs": True},
            "pieces": {"content": "The sky is blue.", "with_pieces": True},
            "conversation": {"messages": HELLO},
        },
    ),
    ("POST", "/detokenize"): RouteDescription(
        "Return the text of token ids",
        "vLLM",
        answer=tokens.DetokenizeBody,
        errors=BODY,
        examples={"ids": {"tokens": [5, 6, 7]}},
    ),
    ("POST", "/completion"): RouteDescription(
        "Continue texts",
        "llama-server",
        "llama-server's own protocol, also at `/completions`. Several prompts or answers make a "
        "list. With `stream`, the last event of each answer has its settings and counts.",
        answer=LlamaCompletion | list[LlamaCompletion],
        media={"application/json": _SELECTED_FIELDS},
        events=(LlamaPiece, LlamaCompletion, LLAMA_SERVER.struct),
        errors=GENERATION,
        examples={
            "text": {"prompt": "The capital of France is", "n_predict": 8, "temperature": 0},
            "stream": {"prompt": "The capital of France is", "n_predict": 8, "stream": True},
            "several": {"prompt": ["2 + 2 =", [5, 6, "a text"]], "n_predict": 4, "seed": 7},
            "chosen": {"prompt": "2 + 2 =", "n_predict": 4, "response_fields": ["content"]},
        },
    ),
    ("POST", "/infill"): RouteDescription(
        "Write the text between a prefix and a suffix",
        "llama-server",
        "For models that can fill in the middle; further fields as in `/completion`.",
        answer=LlamaCompletion | list[LlamaCompletion],
        media={"application/json": _SELECTED_FIELDS},
        events=(LlamaPiece, LlamaCompletion, LLAMA_SERVER.struct),
        errors=GENERATION,
        examples={
            "gap": {
                "input_prefix": "def add(a, b):\n",
                "prompt": "    return ",
                "input_suffix": "\n",
                "n_predict": 8,
            },
        },
    ),
    ("POST", "/apply-template"): RouteDescription(
        "Return the text that the chat template makes of a conversation",
        "llama-server",
        answer=tokens.TemplateBody,
        errors=BODY,
        examples={"conversation": {"messages": HELLO}},
    ),
    ("POST", "/embeddings"): RouteDescription(
        "Turn texts into vectors",
        "llama-server",
        "llama-server's own form, also at `/embedding`. Vectors have length 1.",
        answer=list[LlamaEmbedding],
        errors=GENERATION,
        examples={"text": {"content": "The sky is blue."}},
    ),
    ("GET", tokens.INFO_PATH): RouteDescription(
        "Describe the tokenizer",
        "vLLM",
        "lm-evaluation-harness sends this request before it uses the server's tokenizer.",
        answer=tokens.TokenizerInfo,
        errors=(ModelNotFoundError,),
    ),
    ("GET", "/props"): RouteDescription(
        "The server's properties, and the default settings of `/completion`",
        "llama-server",
        answer=info.Props,
    ),
    ("GET", "/slots"): RouteDescription(
        "The running requests, each in a slot",
        "llama-server",
        "With `fail_on_no_slot` in the query, an error is sent if there is no free slot.",
        answer=list[info.Slot],
        errors=(info.SlotsOffError, OverloadedError),
        parameters=(parameter("query", "fail_on_no_slot", "Anything but an empty text.", **TEXT),),
    ),
    ("GET", "/lora-adapters"): RouteDescription(
        "An empty list: there are no adapters",
        "llama-server",
        media={"application/json": {"type": "array", "maxItems": 0}},
    ),
}

OPERATIONS: Final = ollama.OPERATIONS | stored.OPERATIONS | batches.OPERATIONS | _SERVER_OPERATIONS
