"""The server's version, and the responses of GET /, /health and /v1/models."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta

from twostroke.engine.status import Health

if TYPE_CHECKING:
    from twostroke.engine.model_card import ModelCard

_STATES = ["ok", "draining", *(one.value for one in Health if one is not Health.READY)]


def _version() -> str:
    try:
        return version("twostroke")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"


VERSION: Final = _version()
# `system_fingerprint`: the version, as another version may change answers. It has the form of
# llama-server's builds, such as b6123-..., which its clients expect.
FINGERPRINT: Final = f"b{VERSION}-twostroke"


class AboutBody(msgspec.Struct, frozen=True):
    """The server, its model, and its paths."""

    name: str
    version: str
    model: str
    endpoints: list[str]
    description: Annotated[str, Meta(description="The path of the API's description.")]


class HealthBody(msgspec.Struct, frozen=True):
    """Whether the server would answer a request now: `ok`, or the reason why not."""

    status: Annotated[str, Meta(extra_json_schema={"enum": _STATES})]
    model: str


class ProgressBody(msgspec.Struct, frozen=True):
    """Whether the engine finishes steps: how many it has, and the seconds of the present one."""

    status: Annotated[str, Meta(extra_json_schema={"enum": _STATES})]
    steps: int
    step_s: float


class LoadBody(msgspec.Struct, frozen=True):
    """What a router needs to know of a server.

    `epoch` is another after each start of the server or its engine; where `numerics` are equal,
    answers are. Tokens are counted since the start. `horizon_s` is how long ago the page was used
    that the prefix cache evicted last: what was used since is there. `context_length` is that of
    the first model. `prefill_per_decode` is how many prefill engines one such decode engine can
    use, once that was measured. `keeps_files` is whether it has files and batches. `trusts_sender`
    is whether the request had the router's key, whose sender is believed when it names a tenant.
    `takes_any_name` is whether names that it does not list are taken for its first model.
    Of several models work and tokens are summed, and `numerics` are the first one's.
    `numerics_by_model` has those of all that were loaded; unloading one evicts its pages.
    """

    status: Annotated[str, Meta(extra_json_schema={"enum": _STATES})]
    epoch: str
    models: list[str]
    version: str
    numerics: str
    numerics_by_model: dict[str, str]
    running: int
    waiting: int
    work_s: Annotated[float, Meta(description="Seconds that the tokens in the queue take.")]
    prompt_tokens: int
    cached_tokens: int
    horizon_s: float | None
    context_length: int
    prefill_per_decode: float | None
    keeps_files: bool
    trusts_sender: bool
    takes_any_name: bool


class Capabilities(msgspec.Struct, frozen=True):
    """A model's abilities besides text completion, by the names of Mistral's API.

    Chat needs a chat template; filling in the middle (`suffix`) needs tokens for it.
    """

    completion_chat: bool
    completion_fim: bool


class ModelMeta(msgspec.Struct, frozen=True):
    """A model's sizes, by llama-server's names: in tokens, values and bytes."""

    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int


class ModelStatus(msgspec.Struct, frozen=True):
    """Where a model is, in the form of llama-server; one that is not loaded is when asked for."""

    value: Literal["unloaded", "loading", "loaded", "unloading"]


class ModelBody(msgspec.Struct, frozen=True):
    """One model; `created` is when the server read its files, `max_model_len` its context."""

    id: str
    created: int
    max_model_len: int
    capabilities: Capabilities
    meta: ModelMeta
    status: ModelStatus
    object: Literal["model"] = "model"
    owned_by: str = "twostroke"


class ModelList(msgspec.Struct, frozen=True):
    """All models."""

    data: list[ModelBody]
    object: Literal["list"] = "list"


def model_body(card: ModelCard, name: str, state: str) -> ModelBody:
    """Describe a model under one of its names; `state` is a word of `ModelStatus`."""
    abilities = Capabilities(
        completion_chat=card.can_chat,
        completion_fim=card.tokenizer.infill is not None,
    )
    meta = ModelMeta(
        n_vocab=card.tokenizer.vocab_size,
        n_ctx_train=card.context_length,
        n_embd=card.embedding_width,
        n_params=card.num_parameters,
        size=card.file_bytes,
    )
    status = ModelStatus(state)  # type: ignore[arg-type]
    return ModelBody(name, card.created_s, card.context_length, abilities, meta, status)
