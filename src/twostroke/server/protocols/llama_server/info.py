"""GET /props, /slots and /lora-adapters: a model's properties and its running requests."""

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
from twostroke.server.protocols.common.llama_completion import GenerationSettings
from twostroke.server.protocols.llama_server.fields import (
    DEFAULTS,
    TextFields,
    generation_settings,
    to_params,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.engine.status import RequestView
    from twostroke.server.models.registry import ModelRegistry
    from twostroke.server.options import ServeOptions


class DefaultSettings(msgspec.Struct, frozen=True):
    """A part of `/props`: default settings of `/completion`, and the context length in tokens."""

    params: GenerationSettings
    n_ctx: int


class Modalities(msgspec.Struct, frozen=True):
    """A part of `/props`: the media that a prompt may have besides text, which are none."""

    vision: bool = False
    audio: bool = False


class Props(msgspec.Struct, kw_only=True, frozen=True):
    """The response of `/props`; `model_path` is the model's name, not a path."""

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
    """A part of `/slots`: how many tokens the answer of a running request has so far."""

    has_next_token: bool
    n_decoded: int


class Slot(msgspec.Struct, kw_only=True, frozen=True):
    """An entry of `/slots`: a free slot, or a running request with its prompt's token counts."""

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
    """The server was started without `--dashboard`, so it does not show its running requests."""

    http_status = 501
    code = "slots_not_shown"


def info_routes(models: ModelRegistry, options: ServeOptions) -> list[Route]:
    """Return the HTTP routes of /props, /slots and /lora-adapters.

    `?model=NAME` in a request selects a model, by default the first.
    """
    assignments: dict[str, _SlotAssignment] = defaultdict(_SlotAssignment)

    async def props(request: Request) -> Response:
        """Answer GET /props with the properties of the server and of the selected model."""
        name, model = models.find(request.query_params.get("model"))
        config = model.engine.facts.config
        card = model.card
        defaults = TextFields()
        params = card.sampling.fill(to_params(defaults), DEFAULTS)
        texts = card.tokenizer.named_texts
        return to_json(
            Props(
                default_generation_settings=DefaultSettings(
                    generation_settings(defaults, params), card.context_length
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
                is_sleeping=models.state(model.name) != ModelResidency.LOADED.value,
            )
        )

    async def slots(request: Request) -> Response:
        """Answer GET /slots with one entry for each request that the model can run at once.

        An entry is free, or shows a running request.
        """
        if not options.shows_dashboard:
            message = "The slots are not shown: start `twostroke serve` with --dashboard."
            raise SlotsOffError(message)
        _, model = models.find(request.query_params.get("model"))
        engine = model.engine
        card = model.card
        config = engine.facts.config
        running = (await engine.read()).view.running
        if request.query_params.get("fail_on_no_slot") and len(running) >= config.max_running:
            reason = f"No slot is free, of {config.max_running} in all: try again later."
            raise OverloadedError(reason)
        free_slot = Slot(
            id=0,
            n_ctx=card.context_length,
            speculative=bool(engine.facts.methods),
            is_processing=False,
        )
        assigned = assignments[model.name].of(running)
        return to_json(_all_slots(free_slot, running, assigned, config.max_running))

    async def adapters(_request: Request) -> Response:
        return to_json([])

    gets = {"/props": props, "/slots": slots, "/lora-adapters": adapters}
    return [Route(path, endpoint, name=path) for path, endpoint in gets.items()]


class _SlotAssignment:
    """Gives running requests slot numbers, since llama-server's clients expect slots.

    The engine has no slots. A request keeps its slot number while it runs.
    """

    def __init__(self) -> None:
        self._by_request: dict[str, tuple[int, int]] = {}  # by id: the slot and the task
        self._task_ids = count()

    def of(self, running: Sequence[RequestView]) -> list[tuple[int, int]]:
        """Return the slot number and the task number of each running request, in the given order.

        New requests get the smallest free slot, and the next task number, which is never used
        again.
        """
        self._by_request = {
            request.id: self._by_request[request.id]
            for request in running
            if request.id in self._by_request
        }
        used_slots = {slot_id for slot_id, _ in self._by_request.values()}
        free_slots = (slot_id for slot_id in count() if slot_id not in used_slots)
        for request in running:
            if request.id not in self._by_request:
                self._by_request[request.id] = (next(free_slots), next(self._task_ids))
        return [self._by_request[request.id] for request in running]


def _all_slots(
    free_slot: Slot,
    running: Sequence[RequestView],
    assigned: Sequence[tuple[int, int]],
    max_running: int,
) -> list[Slot]:
    """Return the entries of all slots; `assigned` are the slots and tasks of running requests.

    After `max_running` was lowered, more requests may run; their slots are listed, too.
    """
    num_slots = max([max_running, *(1 + slot_id for slot_id, _ in assigned)])
    slots = [replace(free_slot, id=slot_id) for slot_id in range(num_slots)]
    for request, (slot_id, task_id) in zip(running, assigned, strict=True):
        slots[slot_id] = _busy_slot(slots[slot_id], task_id, request)
    return slots


def _busy_slot(slot: Slot, task_id: int, running: RequestView) -> Slot:
    """Return a copy of a free slot's entry that shows a running request."""
    return replace(
        slot,
        id_task=task_id,
        is_processing=True,
        n_prompt_tokens=running.num_prompt,
        n_prompt_tokens_processed=min(running.num_computed, running.num_prompt),
        n_prompt_tokens_cache=running.num_cached,
        next_token=[NextToken(has_next_token=True, n_decoded=running.num_output)],
    )
