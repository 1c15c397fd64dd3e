"""Paths of OpenAI's and Anthropic's services that this server does not have, and why."""

from __future__ import annotations

from typing import Final

_TEXT_MODELS: Final = "models here read and write text only"
_PROVIDER: Final = "it belongs to the provider's own service"
_SERVED: Final = (
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


def reason_unserved(path: str) -> str | None:
    """Return a sentence about a path of OpenAI's or Anthropic's that is not served, else None."""
    for start, reason in _REASONS.items():
        if path == start or path.startswith(f"{start}/"):
            return f"The path {path} is not served: {reason}. {_SERVED}"
    return None
