"""What each route is for: the words, answers and examples of its description.

Paths, methods and request bodies are those of the routes themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.errors import (
    EngineStoppedError,
    ModelNotFoundError,
    OverloadedError,
    RequestError,
    TwostrokeError,
)
from twostroke.serve.about import AboutBody, HealthBody, ModelBody, ModelList
from twostroke.serve.anthropic import messages, reply
from twostroke.serve.anthropic.errors import ANTHROPIC
from twostroke.serve.http import errors
from twostroke.serve.openai import chat_reply, completions_reply, embeddings, tokens
from twostroke.serve.openai.responses import stream_events
from twostroke.serve.openai.responses.body import ResponseBody
from twostroke.serve.openai.responses.request import INCLUDABLE
from twostroke.serve.openai.responses.routes import (
    LISTED,
    MAX_LISTED,
    Deleted,
    ItemList,
    ResponseNotFoundError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import msgspec

    Struct = type[msgspec.Struct]

ANYWHERE: Final = (errors.HeaderSizeError, TwostrokeError)
_BODY: Final = (
    RequestError,
    ModelNotFoundError,
    errors.BodyTimeoutError,
    errors.BodySizeError,
    errors.ContentTypeError,
)
_GENERATION: Final = (*_BODY, OverloadedError, EngineStoppedError)

_HELLO: Final = [{"role": "user", "content": "Why is the sky blue?"}]
_CITY: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}, "country": {"type": "string"}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
_WEATHER: Final = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


@dataclass(frozen=True, slots=True)
class Operation:
    """A route as people see it.

    Attributes:
        summary: a few words.
        tag: whose protocol it is.
        description: what else there is to know.
        answer: the struct of a JSON answer, None where it is none.
        events: what the events of a stream may be; empty where nothing streams.
        media: other media types of an answer, with their schemas.
        unwell: whether the same answer comes with 503, too.
        errors: what can go wrong besides `ANYWHERE`.
        examples: request bodies by name; the model's name is put into each.
        parameters: of the path, the query or the headers, as OpenAPI has them.
        leads_to: operations whose path has the id of what this one answers.
    """

    summary: str
    tag: str
    description: str = ""
    answer: Struct | None = None
    events: tuple[Struct, ...] = ()
    media: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    unwell: bool = False
    errors: tuple[type[TwostrokeError], ...] = ()
    examples: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    parameters: tuple[dict[str, Any], ...] = ()
    leads_to: tuple[tuple[str, str], ...] = ()


_TEXT: Final = {"type": "string"}
_MODEL: Final = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "minLength": 1},
    "description": "One of the names that `/v1/models` lists; it may contain slashes.",
}
_RESPONSE_ID: Final = {
    "name": "response_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "minLength": 1},
    "description": "The `id` of an answer that is kept.",
}
_INCLUDE: Final = {
    "name": "include[]",
    "in": "query",
    "schema": {"type": "array", "items": {"enum": list(INCLUDABLE)}},
    "description": "Accepted; an answer is kept with what its request included.",
}
_PAGE: Final = (
    {
        "name": "after",
        "in": "query",
        "schema": _TEXT,
        "description": "The id of the item before the page.",
    },
    {
        "name": "limit",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": LISTED},
        "description": "How many items a page has.",
    },
    {
        "name": "order",
        "in": "query",
        "schema": {"enum": ["asc", "desc"], "default": "desc"},
        "description": "Whether the oldest item comes first, or the newest.",
    },
)
_ANTHROPIC_VERSION: Final = {
    "name": "anthropic-version",
    "in": "header",
    "schema": _TEXT,
    "description": "Any: there is one version.",
}

OPERATIONS: Final[dict[tuple[str, str], Operation]] = {
    ("GET", "/"): Operation(
        "What answers here",
        "Server",
        "A browser, which accepts `text/html`, gets the page for people.",
        answer=AboutBody,
        media={"text/html": _TEXT},
    ),
    ("GET", "/health"): Operation(
        "Whether a request would be answered now", "Server", answer=HealthBody, unwell=True
    ),
    ("GET", "/metrics"): Operation(
        "Metrics for Prometheus",
        "Server",
        media={"text/plain": _TEXT, "application/openmetrics-text": _TEXT},
    ),
    ("GET", "/api/state"): Operation(
        "What the server does now, and did in the last minute",
        "Server",
        "For the dashboard: see `docs/observability.md`.",
        media={
            "application/json": {
                "type": "object",
                "required": ["health", "model", "requests", "pages", "window", "totals"],
            },
        },
        errors=(errors.UnknownPathError,),
    ),
    ("GET", "/openapi.json"): Operation(
        "This description",
        "Server",
        media={
            "application/json": {"type": "object", "required": ["openapi", "info", "paths"]},
        },
    ),
    ("GET", "/v1/models"): Operation("The model, by each of its names", "OpenAI", answer=ModelList),
    ("GET", "/v1/models/{model}"): Operation(
        "The model, by one of its names",
        "OpenAI",
        answer=ModelBody,
        errors=(ModelNotFoundError,),
        parameters=(_MODEL,),
    ),
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a conversation",
        "OpenAI",
        "OpenAI's chat protocol, with vLLM's further fields. With `stream` each event is a chunk; "
        "the last one is `[DONE]`.",
        answer=chat_reply.ChatCompletion,
        events=(chat_reply.Chunk, errors.ErrorBody),
        errors=_GENERATION,
        examples={
            "answer": {"messages": _HELLO, "max_tokens": 64, "temperature": 0},
            "stream": {
                "messages": _HELLO,
                "max_tokens": 64,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            "form": {
                "messages": [{"role": "user", "content": "Where is the Eiffel Tower?"}],
                "max_tokens": 64,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "place", "schema": _CITY},
                },
            },
            "tools": {
                "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
                "max_tokens": 64,
                "tools": [{"type": "function", "function": _WEATHER}],
            },
        },
    ),
    ("POST", "/v1/completions"): Operation(
        "Continue texts",
        "OpenAI",
        "OpenAI's older protocol. With `stream` each event has a piece of the text; the last one "
        "is `[DONE]`.",
        answer=completions_reply.CompletionBody,
        events=(completions_reply.CompletionBody, errors.ErrorBody),
        errors=_GENERATION,
        examples={
            "text": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
            "several": {"prompt": ["2 + 2 =", "3 + 3 ="], "max_tokens": 4, "n": 2, "seed": 7},
            "score": {"prompt": "The sky is blue", "max_tokens": 0, "echo": True, "logprobs": 1},
        },
    ),
    ("POST", "/v1/embeddings"): Operation(
        "Turn texts into vectors",
        "OpenAI",
        "Vectors have length 1; texts of one meaning point the same way, as far as the model was "
        "taught to.",
        answer=embeddings.EmbeddingList,
        errors=_GENERATION,
        examples={
            "text": {"input": "The sky is blue."},
            "several": {"input": ["The sky is blue.", "Grass is green."], "dimensions": 16},
            "ids": {"input": [[5, 6, 7]], "encoding_format": "base64", "pooling": "last"},
        },
    ),
    ("POST", "/v1/messages"): Operation(
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
        errors=_GENERATION,
        examples={
            "answer": {"messages": _HELLO, "max_tokens": 64, "system": "Be brief."},
            "stream": {"messages": _HELLO, "max_tokens": 64, "stream": True},
            "tools": {
                "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
                "max_tokens": 64,
                "tools": [{"name": "get_weather", "input_schema": _WEATHER["parameters"]}],
            },
        },
        parameters=(_ANTHROPIC_VERSION,),
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Count a request's tokens",
        "Anthropic",
        answer=messages.TokenCount,
        errors=_BODY,
        examples={"count": {"messages": _HELLO, "system": "Be brief."}},
        parameters=(_ANTHROPIC_VERSION,),
    ),
    ("POST", "/v1/responses"): Operation(
        "Answer a conversation, which may go on from an earlier answer",
        "OpenAI",
        "OpenAI's Responses API. With `stream` events have names, which are their `type`; the "
        "last one has the whole answer.",
        answer=ResponseBody,
        events=stream_events.EVENTS,
        errors=_GENERATION,
        examples={
            "answer": {"input": "Why is the sky blue?", "max_output_tokens": 64},
            "stream": {
                "instructions": "Be brief.",
                "input": _HELLO,
                "max_output_tokens": 64,
                "stream": True,
            },
            "form": {
                "input": "Where is the Eiffel Tower?",
                "max_output_tokens": 64,
                "text": {"format": {"type": "json_schema", "name": "place", "schema": _CITY}},
            },
            "tools": {
                "input": "What is the weather in Paris?",
                "max_output_tokens": 64,
                "tools": [{"type": "function", **_WEATHER}],
            },
        },
        leads_to=(
            ("GET", "/v1/responses/{response_id}"),
            ("DELETE", "/v1/responses/{response_id}"),
            ("GET", "/v1/responses/{response_id}/input_items"),
        ),
    ),
    ("GET", "/v1/responses/{response_id}"): Operation(
        "An answer that is kept",
        "OpenAI",
        answer=ResponseBody,
        errors=(RequestError, ResponseNotFoundError),
        parameters=(_RESPONSE_ID, _INCLUDE),
    ),
    ("DELETE", "/v1/responses/{response_id}"): Operation(
        "Forget an answer",
        "OpenAI",
        answer=Deleted,
        errors=(RequestError, ResponseNotFoundError),
        parameters=(_RESPONSE_ID,),
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation(
        "What an answer answered, page by page",
        "OpenAI",
        "Items of the earlier answers that it goes on from are among them.",
        answer=ItemList,
        errors=(RequestError, ResponseNotFoundError),
        parameters=(_RESPONSE_ID, _INCLUDE, *_PAGE),
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation(
        "Refused: only answers in the background could be cancelled",
        "OpenAI",
        "To stop an answer, close its connection.",
        errors=(RequestError, ResponseNotFoundError),
        parameters=(_RESPONSE_ID,),
    ),
    ("POST", "/tokenize"): Operation(
        "A text's or a conversation's token ids",
        "vLLM",
        answer=tokens.TokenizeBody,
        errors=_BODY,
        examples={
            "text": {"prompt": "The sky is blue.", "return_token_strs": True},
            "conversation": {"messages": _HELLO},
        },
    ),
    ("POST", "/detokenize"): Operation(
        "The text of token ids",
        "vLLM",
        answer=tokens.DetokenizeBody,
        errors=_BODY,
        examples={"ids": {"tokens": [5, 6, 7]}},
    ),
}
