"""Paths: other names under which existing clients ask, and whether a browser asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from starlette.requests import Request

# Most are llama-server's: paths without /v1, and older names.
ALIASES: Final = {
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/completion",
    "/embedding": "/embeddings",
    "/models": "/v1/models",
    "/responses": "/v1/responses",
    "/v1/health": "/health",
}


def wants_page(request: Request) -> bool:
    """Whether the request comes from a browser rather than a program."""
    return "text/html" in request.headers.get("accept", "").lower()
