"""Ollama's descriptions of models: /api/tags, /api/show, /api/ps, /api/version; /api/pull."""

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

# The version of Ollama whose paths this server has; clients ask for a least one.
API_VERSION: Final = "0.14.0"
# What Ollama does with its own collection of models.
_REFUSED: Final = {
    "/api/create": ["POST"],
    "/api/copy": ["POST"],
    "/api/push": ["POST"],
    "/api/delete": ["DELETE"],
    "/api/blobs/{digest}": ["POST"],
}

Capability = Literal["completion", "tools", "thinking", "insert", "embedding"]


class ModelDetails(msgspec.Struct, kw_only=True, frozen=True):
    """A model's kind and size; `quantization_level` lists the formats of its weights."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int
    embedding_length: int


class TaggedModel(msgspec.Struct, kw_only=True, frozen=True):
    """A model in the list; `modified_at` is when it was loaded.

    `digest` is made of the facts about the model; it is not that of a file.
    """

    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: ModelDetails
    capabilities: list[Capability]


class TaggedModels(msgspec.Struct, frozen=True):
    """All models, loaded or not, under each of their names."""

    models: list[TaggedModel]


class LoadedModelBody(msgspec.Struct, kw_only=True, frozen=True):
    """A model in memory, and when it leaves if nobody asks for it; the sizes are in bytes."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: datetime
    size_vram: int = 0
    context_length: int


class LoadedModels(msgspec.Struct, frozen=True):
    """The models in memory, under each of their names."""

    models: list[LoadedModelBody]


class ShowRequest(field.RequestObject):
    """The name of a model."""

    model: field.ModelName = None
    name: Annotated[str | None, field.doc("The older name of `model`.")] = None
    verbose: field.Ignored = None
    options: field.Ignored = None
    system: field.Ignored = None
    template: field.Ignored = None

    def __post_init__(self) -> None:
        """Read the older name."""
        self.model = self.model or self.name


class ShownModel(msgspec.Struct, kw_only=True, frozen=True):
    """A model; `model_info` has its sizes, under the names of GGUF's metadata."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[Capability]
    modified_at: datetime


class PullRequest(field.RequestObject):
    """The name of a model; that of the served one is there already."""

    model: field.ModelName = None
    name: Annotated[str | None, field.doc("The older name of `model`.")] = None
    stream: Annotated[bool | None, field.doc("The answer is one line, either way.")] = None
    insecure: field.IgnoredOff = None
    username: field.Ignored = None
    password: field.Ignored = None

    def __post_init__(self) -> None:
        """Read the older name."""
        self.model = self.model or self.name


class PullStatus(msgspec.Struct, frozen=True):
    """The model is there."""

    status: Literal["success"] = "success"


class VersionBody(msgspec.Struct, frozen=True):
    """The version of Ollama whose API this is."""

    version: str


def show(_asked: ShowRequest, card: ModelCard) -> ShownModel:
    """Describe the model."""
    program, family = card.cost.program, card.architecture
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


def pull(_asked: PullRequest, _card: ModelCard) -> PullStatus:
    """Say that the served model is there; requests for others are refused by their name."""
    return PullStatus()


def ollama_routes(models: ModelRegistry) -> list[Route]:
    """Return the routes that list the models."""

    async def tags(_request: Request) -> Response:
        found = [
            TaggedModel(
                **_facts(name, served.card),
                size=served.card.file_bytes,
                modified_at=_loaded_at(served.card),
                # It reads the chat template.
                capabilities=await asyncio.to_thread(_capabilities, served.card),
            )
            for name, served in models
        ]
        return to_json(TaggedModels(found))

    async def loaded(_request: Request) -> Response:
        found = [
            LoadedModelBody(
                **_facts(name, served.card),
                size=models.num_bytes(served.name),
                expires_at=datetime.fromtimestamp(models.expires_at(served.name), UTC),
                context_length=served.card.context_length,
            )
            for name, served in models
            if models.state(served.name) == ModelResidency.IN.value
        ]
        return to_json(LoadedModels(found))

    async def version(_request: Request) -> Response:
        return to_json(VersionBody(API_VERSION))

    async def refuse(_request: Request) -> NoReturn:
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
            for path, methods in _REFUSED.items()
        ),
    ]


def _facts(name: str, card: ModelCard) -> dict[str, Any]:
    """Return the facts that both lists have; a name without a tag gets Ollama's default."""
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
        parameter_size=_in_words(card.num_parameters),
        quantization_level=card.format,
        context_length=card.context_length,
        embedding_length=card.embedding_width,
    )


def _capabilities(card: ModelCard) -> list[Capability]:
    """Return what the model can do, by Ollama's words."""
    chat = card.chat_template if card.can_chat else None
    found: dict[Capability, bool] = {
        "completion": True,
        "tools": chat is not None,
        "thinking": chat is not None and chat.reasons,
        "insert": card.tokenizer.infill is not None,
        # Others have embeddings as well, but clients take such models for nothing else.
        "embedding": card.pooling is not None,
    }
    return [name for name, is_there in found.items() if is_there]


def _loaded_at(card: ModelCard) -> datetime:
    return datetime.fromtimestamp(card.created_s, UTC)


def _in_words(count: int) -> str:
    """Return a count of parameters as Ollama writes it, such as 134.52M or 1.5B."""
    if count >= 1e9:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.2f}M" if count >= 1e6 else f"{count / 1e3:.2f}K"
