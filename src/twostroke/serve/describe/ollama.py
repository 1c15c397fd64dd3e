"""The descriptions of the routes of Ollama's protocol."""

from __future__ import annotations

from typing import Final

from twostroke.serve.describe.operation import CITY, GENERATION, HELLO, WEATHER, Operation
from twostroke.serve.ollama import reply

_STREAMED: Final = "Streams lines of JSON unless `stream` is false."

OPERATIONS: Final[dict[tuple[str, str], Operation]] = {
    ("POST", "/api/chat"): Operation(
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
    ("POST", "/api/generate"): Operation(
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
}
