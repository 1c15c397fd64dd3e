"""Ollama's endpoints about models: /api/tags, /api/show, /api/ps, /api/version, /api/pull."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn

import msgspec
from starlette.routing import Route

from twostroke.server.body import field
from twostroke.server.http.errors import UnknownPathError
from twostroke.server.http.responses import to_json
from twostroke.server.models.residency import ModelResidency

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.engine.model_card import ModelCard
    from twostroke.server.models.registry import ModelRegistry

# The version of Ollama whose paths this server has; clients require a minimum version.
API_VERSION: Final = "0.14.0"
# Paths that change Ollama's own collection of models, which this server does not have.
_REFUSED_PATHS: Final = {
    "/api/create": ["POST"],
    "/api/copy": ["POST"],
    "/api/push": ["POST"],
    "/api/delete": ["DELETE"],
    "/api/blobs/{digest}": ["POST"],
}

Capability = Literal["completion", "tools", "thinking", "insert", "embedding"]


class ModelDetails(msgspec.Struct, kw_only=True, frozen=True):
    """A model's family and size, as `/api/tags`, `/api/ps` and `/api/show` report them.

    `quantization_level` lists the number formats of the model's weights.
    """

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int
    embedding_length: int


class TaggedModel(msgspec.Struct, kw_only=True, frozen=True):
    """An entry of `/api/tags`: one name of a model; `modified_at` is the time when it was loaded.

    `digest` identifies the model by its name, format and size; it is not the digest of a file.
    """

    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: ModelDetails
    capabilities: list[Capability]


class TaggedModels(msgspec.Struct, frozen=True):
    """The response of `/api/tags`: an entry for each name of each model, loaded or not."""

    models: list[TaggedModel]


class LoadedModelBody(msgspec.Struct, kw_only=True, frozen=True):
    """An entry of `/api/ps`: a model in memory, with sizes in bytes.

    The model is unloaded at `expires_at` if no request comes.
    """

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: datetime
    size_vram: int = 0
    context_length: int


class LoadedModels(msgspec.Struct, frozen=True):
    """The response of `/api/ps`: the models in memory, with an entry for each of their names."""

    models: list[LoadedModelBody]


class ShowRequest(field.RequestObject):
    """The body of a request to `/api/show`."""

    model: field.ModelName = None
    name: Annotated[str | None, field.doc("The older name of `model`.")] = None
    verbose: field.Ignored = None
    options: field.Ignored = None
    system: field.Ignored = None
    template: field.Ignored = None

    def __post_init__(self) -> None:
        """Accept the model's name in the field `name`, the older name of `model`."""
        self.model = self.model or self.name


class ShownModel(msgspec.Struct, kw_only=True, frozen=True):
    """The response of `/api/show`: a model's description.

    `model_info` has the model's sizes by the names of GGUF's metadata.
    """

    license: str
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[Capability]
    modified_at: datetime


class PullRequest(field.RequestObject):
    """The body of a request to `/api/pull`, which downloads nothing here."""

    model: field.ModelName = None
    name: Annotated[str | None, field.doc("The older name of `model`.")] = None
    stream: Annotated[bool | None, field.doc("No effect: the response is always one line.")] = None
    insecure: field.IgnoredOff = None
    username: field.Ignored = None
    password: field.Ignored = None

    def __post_init__(self) -> None:
        """Accept the model's name in the field `name`, the older name of `model`."""
        self.model = self.model or self.name


class PullStatus(msgspec.Struct, frozen=True):
    """The response of `/api/pull`, which says that the server has the model."""

    status: Literal["success"] = "success"


class VersionBody(msgspec.Struct, frozen=True):
    """The response of `/api/version`: the version of Ollama whose API this server has."""

    version: str


def show(_request: ShowRequest, card: ModelCard) -> ShownModel:
    """Answer POST /api/show with the description of a model."""
    program = card.cost.program
    family = card.architecture
    return ShownModel(
        license=card.licence or "",
        modelfile=f"FROM {card.name}",
        parameters=f"num_ctx {card.context_length}",
        template=card.tokenizer.chat_templates.get("default", ""),
        details=_details(card),
        model_info={
            "general.architecture": family,
            "general.basename": card.name,
            "general.parameter_count": card.num_parameters,
            f"{family}.block_count": len(program.cache_layers),
            f"{family}.context_length": card.context_length,
            f"{family}.embedding_length": card.embedding_width,
            f"{family}.vocab_size": program.vocab_size,
        },
        capabilities=_capabilities(card),
        modified_at=_loaded_at(card),
    )


def pull(_request: PullRequest, _card: ModelCard) -> PullStatus:
    """Answer POST /api/pull with success, since the server already has the requested model.

    A request that names an unknown model has been refused before this call.
    """
    return PullStatus()


def ollama_routes(models: ModelRegistry) -> list[Route]:
    """Return the routes of /api/tags, /api/ps and /api/version, and of endpoints that are refused.

    Refused are the endpoints that change Ollama's own collection of models.
    """

    async def tags(_request: Request) -> Response:
        """Answer GET /api/tags with all models, loaded or not."""
        tagged_models = [
            TaggedModel(
                **_common_fields(name, model.card),
                size=model.card.file_bytes,
                modified_at=_loaded_at(model.card),
                # In a thread, since this parses the chat template.
                capabilities=await asyncio.to_thread(_capabilities, model.card),
            )
            for name, model in models
        ]
        return to_json(TaggedModels(tagged_models))

    async def loaded(_request: Request) -> Response:
        """Answer GET /api/ps with the models in memory."""
        loaded_models = [
            LoadedModelBody(
                **_common_fields(name, model.card),
                size=models.num_bytes(model.name),
                expires_at=datetime.fromtimestamp(models.expires_at(model.name), UTC),
                context_length=model.card.context_length,
            )
            for name, model in models
            if models.state(model.name) == ModelResidency.LOADED.value
        ]
        return to_json(LoadedModels(loaded_models))

    async def version(_request: Request) -> Response:
        return to_json(VersionBody(API_VERSION))

    async def refuse(_request: Request) -> NoReturn:
        """Answer 404 to a request that would create, copy, push or delete models."""
        reason = (
            "This server has the models that it was started with: fetch others with "
            "`twostroke pull`, list them with `twostroke models`, and serve them with "
            "`twostroke serve`."
        )
        raise UnknownPathError(reason)

    gets = {"/api/tags": tags, "/api/ps": loaded, "/api/version": version}
    return [
        *(Route(path, endpoint, name=path) for path, endpoint in gets.items()),
        *(
            Route(path, refuse, methods=methods, include_in_schema=False)
            for path, methods in _REFUSED_PATHS.items()
        ),
    ]


def _common_fields(name: str, card: ModelCard) -> dict[str, Any]:
    """Return a model's fields that the responses of both /api/tags and /api/ps have.

    A name without a tag gets the tag `latest`, as in Ollama.
    """
    tagged = name if ":" in name else f"{name}:latest"
    identity = f"{card.name} {card.format} {card.file_bytes} {card.num_parameters}"
    return {
        "name": tagged,
        "model": tagged,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": _details(card),
    }


def _details(card: ModelCard) -> ModelDetails:
    return ModelDetails(
        format=card.container,
        family=card.architecture,
        families=[card.architecture],
        parameter_size=_parameter_size(card.num_parameters),
        quantization_level=card.format,
        context_length=card.context_length,
        embedding_length=card.embedding_width,
    )


def _capabilities(card: ModelCard) -> list[Capability]:
    """Return a model's capabilities, such as tools or thinking, by Ollama's names."""
    chat = card.chat_template if card.can_chat else None
    is_capable: dict[Capability, bool] = {
        "completion": True,
        "tools": chat is not None,
        "thinking": chat is not None and chat.reasons,
        "insert": card.tokenizer.infill is not None,
        # Other models make embeddings, too, but clients use models with this for nothing else.
        "embedding": card.pooling is not None,
    }
    return [name for name, has_capability in is_capable.items() if has_capability]


def _loaded_at(card: ModelCard) -> datetime:
    return datetime.fromtimestamp(card.created_s, UTC)


def _parameter_size(count: int) -> str:
    """Return a number of parameters as Ollama writes it, such as 134.52M or 1.5B."""
    if count >= 1e9:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.2f}M" if count >= 1e6 else f"{count / 1e3:.2f}K"
