"""GET /v1/models and /v1/models/NAME, in OpenAI's form or, for its clients, in Anthropic's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from starlette.routing import Route

from twostroke.core.errors import RequestError
from twostroke.server.http.error_forms import ANTHROPIC
from twostroke.server.http.request_context import served_of
from twostroke.server.http.responses import to_json
from twostroke.server.models.about import ModelList, model_body

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.engine.model_card import ModelCard
    from twostroke.server.models.about import ModelBody
    from twostroke.server.models.registry import ModelRegistry, ServedModel

_DEFAULT_LISTED: Final = 20  # models in a page of Anthropic's list
_MAX_LISTED: Final = 1000
PATH: Final = "/v1/models"


class AnthropicModel(msgspec.Struct, tag_field="type", tag="model", frozen=True):
    """An entry of GET /v1/models in Anthropic's form: a served model."""

    id: str
    display_name: str
    created_at: datetime
    max_input_tokens: int
    max_tokens: int
    lifecycle: Literal["active"] = "active"


class AnthropicModels(msgspec.Struct, frozen=True):
    """The response of GET /v1/models in Anthropic's form: one part of the list of models."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_routes(models: ModelRegistry) -> list[Route]:
    """Return the HTTP routes that list and describe the served models."""

    def body(name: str, model: ServedModel) -> ModelBody:
        return model_body(model.card, name, models.state(model.name))

    async def list_models(request: Request) -> Response:
        if _is_anthropic(request):
            cards = {name: model.card for name, model in models}
            return to_json(_page(cards, dict(request.query_params)))
        return to_json(ModelList([body(name, model) for name, model in models]))

    async def get_model(request: Request) -> Response:
        name, model = models.find(request.path_params["model"])
        if _is_anthropic(request):
            return to_json(_anthropic_model(name, model.card))
        return to_json(body(name, model))

    paths = {PATH: list_models, f"{PATH}/{{model:path}}": get_model}
    return [Route(path, endpoint, name=path) for path, endpoint in paths.items()]


def _is_anthropic(request: Request) -> bool:
    return served_of(request.scope).error_form is ANTHROPIC


def _anthropic_model(name: str, card: ModelCard) -> AnthropicModel:
    return AnthropicModel(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(card.created_s, UTC),
        max_input_tokens=card.context_length,
        max_tokens=card.context_length,
    )


def _page(cards: dict[str, ModelCard], query: dict[str, Any]) -> AnthropicModels:
    """Return the part of the list of served models that a query asks for, in Anthropic's form.

    `query` may have `limit`, and `after_id` or `before_id`.
    """
    limit = query.get("limit", str(_DEFAULT_LISTED))
    if not (limit.isdecimal() and len(limit) <= 4 and 1 <= int(limit) <= _MAX_LISTED):
        raise RequestError(f"must be from 1 to {_MAX_LISTED}.", field="limit")
    names = list(cards)
    indexes: dict[str, int] = {}
    for field in ("after_id", "before_id"):
        if query.get(field):
            if query[field] not in names:
                raise RequestError("must be the id of a model.", field=field)
            indexes[field] = names.index(query[field])
    candidates = names[indexes.get("after_id", -1) + 1 : indexes.get("before_id")]
    page_names = candidates[-int(limit) :] if "before_id" in indexes else candidates[: int(limit)]
    data = [_anthropic_model(name, cards[name]) for name in page_names]
    return AnthropicModels(
        data,
        has_more=len(candidates) > len(page_names),
        first_id=page_names[0] if page_names else None,
        last_id=page_names[-1] if page_names else None,
    )
