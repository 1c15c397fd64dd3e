"""Other names of paths, under which existing clients ask."""

from __future__ import annotations

from typing import Final

# Most are llama-server's: paths without /v1, and older names.
ALIASES: Final = {
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/completion",
    "/embedding": "/embeddings",
    "/models": "/v1/models",
    "/responses": "/v1/responses",
    "/v1/health": "/health",
}
