"""Paths of OpenAI's and Anthropic's services that this server does not have, and why."""

from __future__ import annotations

from typing import Final

from twostroke.core.errors import nearest
from twostroke.server.body.explain import MAX_NAME_LENGTH

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
