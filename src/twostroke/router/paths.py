"""The paths that a router knows."""

from __future__ import annotations

from typing import Final

READ: Final = (  # without an answer of tokens
    *("/v1/embeddings", "/embeddings", "/api/embed", "/api/embeddings", "/v1/rerank", "/rerank"),
)
FREE: Final = (  # without an engine
    *("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/apply-template"),
    *("/tokenize", "/detokenize", "/api/show", "/api/pull"),
)
# Posts that compute: they go where the policy says, and may be tried again.
COMPUTED: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/completion", "/infill", "/api/chat", "/api/generate", *READ, *FREE),
)
