"""Which form an error has: that of the path's protocol, or of the client's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.server.http.errors import OPENAI
from twostroke.server.http.forms.anthropic import ANTHROPIC
from twostroke.server.http.forms.llama_server import LLAMA_SERVER
from twostroke.server.http.forms.ollama import OLLAMA

if TYPE_CHECKING:
    from starlette.types import Scope

    from twostroke.server.http.request_context import ErrorForm

ANTHROPIC_HEADER: Final = b"anthropic-version"  # which Anthropic's SDKs always send
_LLAMA_PATHS: Final = """
    /completion /infill /apply-template /embeddings /props /slots /lora-adapters
    /rerank /reranking /v1/rerank /v1/reranking
"""
_LLAMA_ALIASES: Final = ("/chat/completions", "/completions", "/embedding")
# For these paths and those below them; the first that suits a path counts.
_BY_PATH: Final = {
    "/v1/messages": ANTHROPIC,
    "/api/plan": OPENAI,
    "/api/state": OPENAI,
    "/api/load": OPENAI,
    "/api": OLLAMA,
    **dict.fromkeys(_LLAMA_PATHS.split(), LLAMA_SERVER),
}
FORMS: Final = (OPENAI, *dict.fromkeys(_BY_PATH.values()))


def error_form(scope: Scope, client_path: str = "") -> ErrorForm:
    """Return the form of errors for a request; OpenAI's where no other protocol is known.

    `client_path` is the path as the client wrote it: without /v1 it may be one of llama-server's.
    """
    path = scope["path"]
    if client_path in _LLAMA_ALIASES:
        return LLAMA_SERVER
    for prefix, form in _BY_PATH.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return form
    is_anthropic = any(name == ANTHROPIC_HEADER for name, _ in scope["headers"])
    return ANTHROPIC if is_anthropic else OPENAI
