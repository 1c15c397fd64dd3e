"""/api/plan: what the served model could do, on this machine or on a device of the table."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, TypeVar

import msgspec
from msgspec import Meta
from starlette.routing import Route

from twostroke.core.errors import OverloadedError, RequestError, nearest
from twostroke.server.body import field
from twostroke.server.body.decode import BodyDecoder, receive_fields
from twostroke.server.http.errors import UnknownPathError
from twostroke.server.http.fair_queue import Readers
from twostroke.server.http.request_context import served_of
from twostroke.server.http.responses import to_json, while_connected
from twostroke.server.openapi.operation import BODY, RouteDescription

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.backends.machine_limits import MachineLimits
    from twostroke.core.hardware import Hardware
    from twostroke.engine.process.served import ServedEngine
    from twostroke.lab.planner import Device, Plan, PlannedModel
    from twostroke.server.app import NoteIgnored
    from twostroke.server.options import ServeOptions

T = TypeVar("T")

PATH: Final = "/api/plan"
HERE: Final = "here"
_MAX_WAITING: Final = 16
_MAX_TOKENS: Final = 1 << 20  # so that no plan takes long
_MAX_STREAMS: Final = 1 << 14
_MAX_USERS: Final = 100_000
_DEFAULT_THINK_S: Final = 20.0  # as `planner.question` has it, which is imported when asked

Tokens = Annotated[int, Meta(ge=1, le=_MAX_TOKENS)]


class PlanRequest(field.RequestObject):
    """A load for the served model, and how to run it. Times are in seconds."""

    device: Annotated[str, field.doc("`here`, or a name in `devices` of `GET /api/plan`.")] = HERE
    count: Annotated[int, field.doc("Devices that divide each layer.", minimum=1, maximum=1024)] = 1
    prompt: Annotated[Tokens, field.doc("Tokens of a prompt.")] = 1024
    output: Annotated[Tokens, field.doc("Tokens of its answer.")] = 256
    cached: Annotated[
        float,
        field.doc("The share of the prompt in the prefix cache.", minimum=0, exclusiveMaximum=1),
    ] = 0.0
    streams: Annotated[
        Annotated[int, Meta(ge=1, le=_MAX_STREAMS)] | None,
        field.doc(
            "Requests that decode together; left out: as many as meet the objectives, and without "
            "`tpot_s` up to 256."
        ),
    ] = None
    weights: Annotated[
        str | None,
        field.doc("How weights are stored, a name in `weights`; left out: as they are."),
    ] = None
    kv_format: Annotated[
        str | None,
        field.doc("Of keys and values, a name in `kv_formats`; left out: the server's own."),
    ] = None
    ttft_s: Annotated[
        float | None, field.doc("Objective for the first token.", exclusiveMinimum=0, maximum=1e9)
    ] = None
    tpot_s: Annotated[
        float | None,
        field.doc("Objective for each further token.", exclusiveMinimum=0, maximum=1e9),
    ] = None
    users: Annotated[
        Annotated[int, Meta(ge=1, le=_MAX_USERS)] | None,
        field.doc("People or programs who each ask, wait for the answer, think, and ask again."),
    ] = None
    think_s: Annotated[
        float,
        field.doc(
            "Seconds between a user's answer and their next request.", minimum=0, maximum=1e6
        ),
    ] = _DEFAULT_THINK_S


class PlanDevice(msgspec.Struct, frozen=True):
    """A device; sizes are in bytes, None where they are not known."""

    name: str
    memory_bytes: float | None
    usd_per_hour: float | None


class PlanChoices(msgspec.Struct, frozen=True):
    """What a plan can be asked for; `here` is this machine's name, None if it was not measured."""

    model: str
    stored: str
    context_length: int
    here: str | None
    kv_format: str
    devices: list[PlanDevice]
    weights: list[str]
    kv_formats: Annotated[list[str], Meta(description="Formats of keys and values.")]


_OPERATIONS: Final = {
    ("GET", PATH): RouteDescription(
        "What a plan can be asked for",
        "Server",
        "For the page; there if the dashboard is.",
        answer=PlanChoices,
        errors=(UnknownPathError, OverloadedError),
    ),
    ("POST", PATH): RouteDescription(
        "What the model could do on this machine, or on a device of the table",
        "Server",
        "The object of `twostroke plan --json`; see docs/guide/planning.md. Times are in seconds.",
        media={
            "application/json": {
                "type": "object",
                "required": ["question", "memory", "roof", "rows", "chosen", "verdict"],
            },
        },
        errors=(*BODY, UnknownPathError, OverloadedError),
        examples={
            "device": {"device": "L4", "prompt": 512, "streams": 8},
            "weights": {"device": "H100-SXM", "weights": "fp8", "tpot_s": 0.02},
        },
    ),
}


class Plans:
    """Makes plans of the served model in a thread, one at a time, in turns of tenants.

    It is an `Extension` of the server.
    """

    bodies: ClassVar[Mapping[str, type[msgspec.Struct]]] = {PATH: PlanRequest}
    operations: ClassVar[Mapping[tuple[str, str], RouteDescription]] = _OPERATIONS

    def __init__(self, engine: ServedEngine, name: str, limits: MachineLimits | None) -> None:
        """Plan for the model of `engine`, called `name`, and the machine of `limits`."""
        self._card, self._name, self._limits = engine.card, name, limits
        self._token_budget = engine.facts.config.token_budget
        self._thread = Readers(1)
        self._num_waiting: Counter[str] = Counter()  # by tenant

    def routes(self, options: ServeOptions, note_ignored: NoteIgnored) -> list[Route]:
        """Return the routes; `note_ignored` takes the fields of a request without effect."""
        decoder = BodyDecoder(PlanRequest, options.limits.max_json_depth)

        async def plan(request: Request) -> Response:
            options.check_dashboard()
            record = served_of(request.scope)
            if request.method != "POST":
                return to_json(await self.choices(record.tenant))
            receiving = receive_fields(request, decoder, options.limits, self._thread)
            plan_request, ignored = await receiving
            note_ignored(ignored, record)
            work = self.plan(plan_request, record.tenant)
            return to_json(await while_connected(request.receive, work))

        # One route, so that a refused method is told of both.
        return [Route(PATH, plan, methods=["GET", "POST"], name=PATH)]

    async def choices(self, tenant: str = "") -> PlanChoices:
        """Return the devices and formats that a plan can be made for."""
        return await self._in_turn(tenant, self._choices)

    async def plan(self, request: PlanRequest, tenant: str = "") -> Plan:
        """Return the plan.

        Raises:
            RequestError: a field has a wrong value.
            UsageError: a number is out of range.
            OverloadedError: too many plans of the tenant are waiting.
        """
        return await self._in_turn(tenant, self._plan, request)

    def close(self) -> None:
        """Drop the queue, and end the thread after the current plan."""
        self._thread.close()

    async def _in_turn(self, tenant: str, work: Callable[..., T], *arguments: Any) -> T:
        if self._num_waiting[tenant] >= _MAX_WAITING:
            raise OverloadedError(f"{self._num_waiting[tenant]} plans are waiting.")
        self._num_waiting[tenant] += 1
        try:
            return await self._thread.run(tenant, work, *arguments)
        finally:
            self._num_waiting[tenant] -= 1
            if not self._num_waiting[tenant]:
                del self._num_waiting[tenant]

    def _choices(self) -> PlanChoices:
        from twostroke.lab.planner import WEIGHTS
        from twostroke.model.program.kv_layout import FORMATS

        here = self._hardware
        devices = [
            PlanDevice(one.name, one.memory_bytes, one.usd_per_hour)
            for one in self._devices.values()
        ]
        card = self._card
        return PlanChoices(
            model=self._name,
            stored=card.format,
            context_length=card.context_length,
            here=here.name if here is not None else None,
            kv_format=self._kv_format,
            devices=devices,
            weights=list(WEIGHTS),
            kv_formats=list(FORMATS),
        )

    def _plan(self, asked: PlanRequest) -> Plan:
        from twostroke.lab.planner import (
            WEIGHTS,
            Question,
            known_calibration,
            make_plan,
            usual,
            usual_budget,
        )
        from twostroke.lab.planner.devices import device_of
        from twostroke.model.program.kv_layout import FORMATS

        names = set(Question.__struct_fields__) & set(PlanRequest.__struct_fields__)
        values = {name: getattr(asked, name) for name in names}
        values["kv_format"] = _one_of(FORMATS, asked.kv_format or self._kv_format, "kv_format")
        is_here = asked.device == HERE
        budget = self._token_budget if is_here else usual_budget(is_here=False)
        question = Question(**values, token_budget=budget)
        model, calibration = self._model, None
        if asked.weights is not None:
            model = model.as_(_one_of(WEIGHTS, asked.weights, "weights"))
        if not is_here:
            device = self._devices[_one_of(self._devices, asked.device, "device")]
        elif (hardware := self._hardware) is None:
            reason = "cannot be this machine, whose limits are not known: name another."
            raise RequestError(reason, field="device")
        else:
            device = device_of(hardware)
            known = known_calibration(self._card.identity, hardware.num_threads)
            calibration = known or usual(device)
        return make_plan(model, device, question, calibration)

    @cached_property
    def _model(self) -> PlannedModel:
        from twostroke.lab.planner import PlannedModel

        card = self._card
        return PlannedModel(
            self._name, card.cost.program, card.cost.weight_bytes, card.format, "bf16"
        )

    @cached_property
    def _devices(self) -> dict[str, Device]:
        from twostroke.lab.planner import known_devices  # nothing else of a server needs it

        return known_devices()

    @property
    def _hardware(self) -> Hardware | None:
        return self._limits.hardware() if self._limits else None

    @property
    def _kv_format(self) -> str:
        from twostroke.model.program.kv_layout import FORMATS

        cache = self._card.cost.cache
        return next(name for name, one in FORMATS.items() if one == cache)


def _one_of(known: Iterable[str], value: str, name: str) -> str:
    """Return a value that must be one of those known."""
    names = list(known)
    if value not in names:
        reason = f"must be one of {', '.join(names)}, got '{{value}}'.{nearest(value, names)}"
        raise RequestError(reason, field=name, value=value[:80])
    return value
