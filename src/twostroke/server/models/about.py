"""The server's version, and the responses of GET /, /health and /v1/models."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta

from twostroke.server.http.router_messages import SERVER_STATES

if TYPE_CHECKING:
    from twostroke.engine.model_card import ModelCard

_STATES = list(SERVER_STATES)


def _version() -> str:
    try:
        return version("twostroke")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"


VERSION: Final = _version()
# The `system_fingerprint` of responses: the version, since another version may change answers. It
# has the form of llama-server's builds, such as b6123-..., which its clients expect.
FINGERPRINT: Final = f"b{VERSION}-twostroke"


class AboutBody(msgspec.Struct, frozen=True):
    """The response to GET /: the server, its model, and its endpoints."""

    name: str
    version: str
    model: str
    endpoints: list[str]
    description: Annotated[str, Meta(description="The path of the API's description.")]


class HealthBody(msgspec.Struct, frozen=True):
    """The response to GET /health: `ok`, or why the server would not answer a request now."""

    status: Annotated[str, Meta(extra_json_schema={"enum": _STATES})]
    model: str


class ProgressBody(msgspec.Struct, frozen=True):
    """The response to GET /health/progress: whether the engine makes progress.

    `steps` is the number of finished steps, and `step_s` the seconds of the current step.
    """

    status: Annotated[str, Meta(extra_json_schema={"enum": _STATES})]
    steps: int
    step_s: float


class Capabilities(msgspec.Struct, frozen=True):
    """The abilities of a model besides text completion, with the names of Mistral's API.

    Chat needs a chat template; filling in the middle (`suffix`) needs special tokens.
    """

    completion_chat: bool
    completion_fim: bool


class ModelMeta(msgspec.Struct, frozen=True):
    """The sizes of a model in tokens, values and bytes, with llama-server's names."""

    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int


class ModelStatus(msgspec.Struct, frozen=True):
    """The state of a model in llama-server's form: loaded or not.

    A request to a model that is not loaded loads it.
    """

    value: Literal["unloaded", "loading", "loaded", "unloading"]


class ModelBody(msgspec.Struct, frozen=True):
    """An entry of GET /v1/models in OpenAI's form: a served model.

    `created` is when the server read the model's files, and `max_model_len` the context length.
    """

    id: str
    created: int
    max_model_len: int
    capabilities: Capabilities
    meta: ModelMeta
    status: ModelStatus
    object: Literal["model"] = "model"
    owned_by: str = "twostroke"


class ModelList(msgspec.Struct, frozen=True):
    """The response to GET /v1/models: all served models."""

    data: list[ModelBody]
    object: Literal["list"] = "list"


def model_body(card: ModelCard, name: str, state: str) -> ModelBody:
    """Describe a model as GET /v1/models returns it.

    Args:
        card: the model's facts.
        name: the name under which the model is served.
        state: whether the model is loaded, a value of `ModelStatus`.
    """
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
    return ModelBody(
        id=name,
        created=card.created_s,
        max_model_len=card.context_length,
        capabilities=abilities,
        meta=meta,
        status=ModelStatus(state),  # type: ignore[arg-type]
    )
