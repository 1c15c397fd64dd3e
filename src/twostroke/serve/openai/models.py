"""GET /v1/models: OpenAI's list of models."""

from __future__ import annotations

import msgspec


class Capabilities(msgspec.Struct, frozen=True):
    """What a model has besides continuing texts, by the names of Mistral's API.

    Chat needs a chat template, filling in the middle (`suffix`) tokens for it.
    """

    completion_chat: bool
    completion_fim: bool


class ModelBody(msgspec.Struct, frozen=True):
    """One model; `created` is when it was loaded, `max_model_len` its context in tokens."""

    id: str
    created: int
    max_model_len: int
    capabilities: Capabilities
    object: str = "model"
    owned_by: str = "twostroke"


class ModelList(msgspec.Struct, frozen=True):
    """All models."""

    data: list[ModelBody]
    object: str = "list"
