"""The OpenAPI descriptions of the routes of Ollama's API."""

from __future__ import annotations

from typing import Final

from twostroke.server.openapi.operation import (
    BODY,
    CITY,
    GENERATION,
    HELLO,
    WEATHER,
    RouteDescription,
)
from twostroke.server.protocols.ollama import embed, models, reply

_STREAMED: Final = "Streams lines of JSON unless `stream` is false."

OPERATIONS: Final[dict[tuple[str, str], RouteDescription]] = {
    ("POST", "/api/chat"): RouteDescription(
        "Answer a conversation",
        "Ollama",
        _STREAMED,
        answer=reply.OllamaChatLine,
        lines=(reply.OllamaChatLine,),
        errors=GENERATION,
        examples={
            "answer": {"messages": HELLO, "stream": False, "options": {"num_predict": 64}},
            "stream": {"messages": HELLO, "options": {"num_predict": 64, "temperature": 0}},
            "form": {
                "messages": [{"role": "user", "content": "Where is the Eiffel Tower?"}],
                "format": CITY,
                "stream": False,
                "options": {"num_predict": 64},
            },
            "tools": {
                "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
                "tools": [{"type": "function", "function": WEATHER}],
                "stream": False,
                "options": {"num_predict": 64},
            },
        },
    ),
    ("POST", "/api/generate"): RouteDescription(
        "Answer a prompt, or continue it",
        "Ollama",
        _STREAMED,
        answer=reply.OllamaGenerateLine,
        lines=(reply.OllamaGenerateLine,),
        errors=GENERATION,
        examples={
            "answer": {
                "prompt": "Why is the sky blue?",
                "system": "Be brief.",
                "stream": False,
                "options": {"num_predict": 64},
            },
            "raw": {
                "prompt": "The capital of France is",
                "raw": True,
                "options": {"num_predict": 8, "temperature": 0},
            },
        },
    ),
    ("POST", "/api/embed"): RouteDescription(
        "Turn texts into vectors",
        "Ollama",
        "Vectors have length 1.",
        answer=embed.EmbedBody,
        errors=GENERATION,
        examples={
            "text": {"input": "The sky is blue."},
            "several": {"input": ["The sky is blue.", "Grass is green."], "dimensions": 16},
        },
    ),
    ("POST", "/api/embeddings"): RouteDescription(
        "Turn a text into a vector",
        "Ollama",
        "The older form of `/api/embed`.",
        answer=embed.OldEmbedBody,
        errors=GENERATION,
        examples={"text": {"prompt": "The sky is blue."}},
    ),
    ("GET", "/api/tags"): RouteDescription(
        "List the models, once for each name", "Ollama", answer=models.TaggedModels
    ),
    ("GET", "/api/ps"): RouteDescription(
        "List the models in memory", "Ollama", answer=models.LoadedModels
    ),
    ("GET", "/api/version"): RouteDescription(
        "Return the version of Ollama whose API this server has",
        "Ollama",
        answer=models.VersionBody,
    ),
    ("POST", "/api/show"): RouteDescription(
        "Describe the model",
        "Ollama",
        answer=models.ShownModel,
        errors=BODY,
        examples={"served": {}},
    ),
    ("POST", "/api/pull"): RouteDescription(
        "Check that a model is there",
        "Ollama",
        "Only for models that are served; nothing is downloaded.",
        answer=models.PullStatus,
        errors=BODY,
        examples={"served": {}},
    ),
}
