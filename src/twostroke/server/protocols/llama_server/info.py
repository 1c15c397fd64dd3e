"""GET /props, /slots and /lora-adapters: a server's properties and what it does now."""

from __future__ import annotations

from collections import defaultdict
from itertools import count
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.routing import Route

from twostroke.core.errors import OverloadedError, TwostrokeError
from twostroke.server.http.responses import to_json
from twostroke.server.models.about import FINGERPRINT
from twostroke.server.models.residency import ModelResidency
from twostroke.server.protocols.llama_server.fields import DEFAULTS, TextFields, to_params
from twostroke.server.protocols.llama_server.settings import GenerationSettings, settings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.engine.status import RequestView
    from twostroke.server.models.registry import ModelRegistry
    from twostroke.server.options import ServeOptions


class DefaultSettings(msgspec.Struct, frozen=True):
    """The settings of /completion that a request does not set, and the context in tokens."""

    params: GenerationSettings
    n_ctx: int


class Modalities(msgspec.Struct, frozen=True):
    """What a prompt may have besides text."""

    vision: bool = False
    audio: bool = False


class Props(msgspec.Struct, kw_only=True, frozen=True):
    """A server's properties; `model_path` is the model's name, not a path."""

    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities
    endpoint_slots: bool
    endpoint_props: bool = False
    endpoint_metrics: bool = True
    webui: bool = True
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool = False


class NextToken(msgspec.Struct, frozen=True):
    """How far an answer is, in tokens."""

    has_next_token: bool
    n_decoded: int


class Slot(msgspec.Struct, kw_only=True, frozen=True):
    """A place for a running request, with the counts of its prompt if there is one."""

    id: int
    id_task: int | UnsetType = UNSET
    n_ctx: int
    speculative: bool
    is_processing: bool
    n_prompt_tokens: int | UnsetType = UNSET
    n_prompt_tokens_processed: int | UnsetType = UNSET
    n_prompt_tokens_cache: int | UnsetType = UNSET
    next_token: list[NextToken] | UnsetType = UNSET


class SlotsOffError(TwostrokeError):
    """The server does not show what it does."""

    http_status = 501
    code = "slots_not_shown"


def info_routes(models: ModelRegistry, options: ServeOptions) -> list[Route]:
    """Return the routes; `?model=NAME` asks for another model than the first."""
    all_places: dict[str, _Places] = defaultdict(_Places)

    async def props(request: Request) -> Response:
        name, served = models.find(request.query_params.get("model"))
        config, card = served.engine.facts.config, served.card
        none = TextFields()
        params = card.sampling.fill(to_params(none), DEFAULTS)
        texts = card.tokenizer.named_texts
        return to_json(
            Props(
                default_generation_settings=DefaultSettings(
                    settings_of(none, params), card.context_length
                ),
                total_slots=config.max_running,
                model_alias=name,
                model_path=name,
                modalities=Modalities(),
                endpoint_slots=options.shows_dashboard,
                chat_template=card.tokenizer.chat_templates.get("default", ""),
                bos_token=texts.get("bos_token", ""),
                eos_token=texts.get("eos_token", ""),
                build_info=FINGERPRINT,
                is_sleeping=models.state(served.name) != ModelResidency.IN.value,
            )
        )

    async def slots(request: Request) -> Response:
        if not options.shows_dashboard:
            message = "The slots are not shown: start `twostroke serve` with --dashboard."
            raise SlotsOffError(message)
        _, served = models.find(request.query_params.get("model"))
        engine, card, places = served.engine, served.card, all_places[served.name]
        config = engine.facts.config
        running = (await engine.read()).view.running
        if request.query_params.get("fail_on_no_slot") and len(running) >= config.max_running:
            raise OverloadedError("All slots are taken.")
        is_guessing = bool(engine.facts.methods)
        found = [
            Slot(id=id_, n_ctx=card.context_length, speculative=is_guessing, is_processing=False)
            for id_ in range(config.max_running)
        ]
        for one, (place, task) in zip(running, places.of(running), strict=True):
            found[place] = _busy(found[place], task, one)
        return to_json(found)

    async def adapters(_request: Request) -> Response:
        return to_json([])

    gets = {"/props": props, "/slots": slots, "/lora-adapters": adapters}
    return [Route(path, endpoint, name=path) for path, endpoint in gets.items()]


class _Places:
    """Keeps each running request in one place for as long as it runs."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, int]] = {}  # by request: its place and its number
        self._numbers = count()

    def of(self, running: Sequence[RequestView]) -> list[tuple[int, int]]:
        """Return the place and the number of each request."""
        self._of = {one.id: self._of[one.id] for one in running if one.id in self._of}
        taken = {place for place, _ in self._of.values()}
        free = (place for place in count() if place not in taken)
        for one in running:
            if one.id not in self._of:
                self._of[one.id] = (next(free), next(self._numbers))
        return [self._of[one.id] for one in running]


def _busy(slot: Slot, task: int, running: RequestView) -> Slot:
    return replace(
        slot,
        id_task=task,
        is_processing=True,
        n_prompt_tokens=running.num_prompt,
        n_prompt_tokens_processed=min(running.num_computed, running.num_prompt),
        n_prompt_tokens_cache=running.num_cached,
        next_token=[NextToken(has_next_token=True, n_decoded=running.num_output)],
    )
