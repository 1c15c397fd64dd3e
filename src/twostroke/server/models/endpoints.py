"""GET /v1/models and /v1/models/NAME, in OpenAI's form and, for Anthropic's clients, in theirs."""

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

_LISTED: Final = 20  # models of one of Anthropic's pages
_MAX_LISTED: Final = 1000
PATH: Final = "/v1/models"


class AnthropicModel(msgspec.Struct, tag_field="type", tag="model", frozen=True):
    """One model, in Anthropic's form."""

    id: str
    display_name: str
    created_at: datetime
    max_input_tokens: int
    max_tokens: int
    lifecycle: Literal["active"] = "active"


class AnthropicModels(msgspec.Struct, frozen=True):
    """A page of models, in Anthropic's form."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_routes(models: ModelRegistry) -> list[Route]:
    """Return the routes that describe the models under their names."""

    def body(name: str, served: ServedModel) -> ModelBody:
        return model_body(served.card, name, models.state(served.name))

    async def several(request: Request) -> Response:
        if _is_anthropic(request):
            cards = {name: served.card for name, served in models}
            return to_json(_page(cards, dict(request.query_params)))
        return to_json(ModelList([body(name, served) for name, served in models]))

    async def one(request: Request) -> Response:
        name, served = models.find(request.path_params["model"])
        if _is_anthropic(request):
            return to_json(_anthropic(name, served.card))
        return to_json(body(name, served))

    paths = {PATH: several, f"{PATH}/{{model:path}}": one}
    return [Route(path, endpoint, name=path) for path, endpoint in paths.items()]


def _is_anthropic(request: Request) -> bool:
    return served_of(request.scope).error_form is ANTHROPIC


def _anthropic(name: str, card: ModelCard) -> AnthropicModel:
    created_at, context = datetime.fromtimestamp(card.created_s, UTC), card.context_length
    return AnthropicModel(name, name, created_at, context, context)


def _page(cards: dict[str, ModelCard], asked: dict[str, Any]) -> AnthropicModels:
    """Return the models of a page; `asked` may have `limit` and `after_id` or `before_id`."""
    limit = asked.get("limit", str(_LISTED))
    if not (limit.isdecimal() and len(limit) <= 4 and 1 <= int(limit) <= _MAX_LISTED):
        raise RequestError(f"must be from 1 to {_MAX_LISTED}.", field="limit")
    places, names = {}, list(cards)
    for field in ("after_id", "before_id"):
        if asked.get(field):
            if asked[field] not in names:
                raise RequestError("must be the id of a model.", field=field)
            places[field] = names.index(asked[field])
    rest = names[places.get("after_id", -1) + 1 : places.get("before_id")]
    shown = rest[-int(limit) :] if "before_id" in places else rest[: int(limit)]
    data = [_anthropic(name, cards[name]) for name in shown]
    ends = (shown[0], shown[-1]) if shown else (None, None)
    return AnthropicModels(data, len(rest) > len(shown), *ends)
