"""The endpoint `/api/plan`: plans of the served model on this machine, or on another device."""

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
    from twostroke.lab.planner import Calibration, Device, Plan, PlannedModel
    from twostroke.lab.planner.reference_calibration import ReferenceCalibration
    from twostroke.server.app import NoteIgnored
    from twostroke.server.options import ServeOptions

T = TypeVar("T")

PATH: Final = "/api/plan"
THIS_MACHINE: Final = "here"
_MAX_WAITING: Final = 16  # plans of one tenant
_MAX_TOKENS: Final = 1 << 20  # limits the time of a plan
_MAX_STREAMS: Final = 1 << 14
_MAX_USERS: Final = 100_000
_DEFAULT_THINK_S: Final = 20.0  # of `planner.question`, which is imported on the first request

Tokens = Annotated[int, Meta(ge=1, le=_MAX_TOKENS)]


class PlanRequest(field.RequestObject):
    """The body of `POST /api/plan`: a load for the served model, and how to run it.

    Times are in seconds.
    """

    device: Annotated[str, field.doc("`here`, or a name in `devices` of `GET /api/plan`.")] = (
        THIS_MACHINE
    )
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
    """A device that plans can be made for: its name, memory and price.

    Memory and price are None if unknown.
    """

    name: str
    memory_bytes: float | None
    usd_per_hour: float | None


class PlanChoices(msgspec.Struct, frozen=True):
    """The reply to `GET /api/plan`: devices and formats that a plan request may name.

    `this_machine` is the machine's name, None if its limits are not measured.
    """

    model: str
    stored: str
    context_length: int
    this_machine: str | None = msgspec.field(name="here")
    kv_format: str
    devices: list[PlanDevice]
    weights: list[str]
    kv_formats: Annotated[list[str], Meta(description="Formats of keys and values.")]


_OPERATIONS: Final = {
    ("GET", PATH): RouteDescription(
        "Devices and formats for plans",
        "Server",
        "For the web UI; available if the dashboard is.",
        answer=PlanChoices,
        errors=(UnknownPathError, OverloadedError),
    ),
    ("POST", PATH): RouteDescription(
        "Plan the model on this machine, or on a device of the table",
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
    """The server's endpoint `/api/plan`, which plans the served model on request.

    Plans are made in a thread, one at a time; tenants take fair turns. It is an `Extension` of the
    server.
    """

    bodies: ClassVar[Mapping[str, type[msgspec.Struct]]] = {PATH: PlanRequest}
    operations: ClassVar[Mapping[tuple[str, str], RouteDescription]] = _OPERATIONS

    def __init__(self, engine: ServedEngine, name: str, limits: MachineLimits | None) -> None:
        """Plan for the model of `engine`, called `name`, on the machine with these `limits`."""
        self._card = engine.card
        self._name = name
        self._limits = limits
        self._token_budget = engine.facts.config.token_budget
        self._num_threads = engine.facts.backend.num_threads
        self._thread = Readers(1)
        self._num_waiting: Counter[str] = Counter()  # by tenant

    def routes(self, options: ServeOptions, note_ignored: NoteIgnored) -> list[Route]:
        """Return the HTTP routes by which clients ask for plans.

        `note_ignored` reports fields of a request that have no effect.
        """
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

        # One route for both methods, so that the error for other methods names both.
        return [Route(PATH, plan, methods=["GET", "POST"], name=PATH)]

    async def choices(self, tenant: str = "") -> PlanChoices:
        """Return the names of devices and number formats for which plans can be made."""
        return await self._in_turn(tenant, self._choices)

    async def plan(self, request: PlanRequest, tenant: str = "") -> Plan:
        """Return the plan that a request asks for, after the plans of earlier requests.

        Raises:
            RequestError: a field has a wrong value.
            UsageError: a number is out of range.
            OverloadedError: too many plans of the tenant are waiting.
        """
        return await self._in_turn(tenant, self._plan, request)

    def close(self) -> None:
        """Drop queued plans, and end the planning thread after the current plan."""
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

        hardware = self._hardware
        devices = [
            PlanDevice(device.name, device.memory_bytes, device.usd_per_hour)
            for device in self._devices.values()
        ]
        card = self._card
        return PlanChoices(
            model=self._name,
            stored=card.format,
            context_length=card.context_length,
            this_machine=hardware.name if hardware is not None else None,
            kv_format=self._kv_format,
            devices=devices,
            weights=list(WEIGHTS),
            kv_formats=list(FORMATS),
        )

    def _plan(self, request: PlanRequest) -> Plan:
        from twostroke.lab.planner import (
            WEIGHTS,
            Question,
            default_token_budget,
            load_calibration,
            make_plan,
            reference_steps,
        )
        from twostroke.lab.planner.devices import device_of
        from twostroke.model.program.kv_layout import FORMATS

        names = set(Question.__struct_fields__) & set(PlanRequest.__struct_fields__)
        values = {name: getattr(request, name) for name in names}
        values["kv_format"] = _check_choice(
            FORMATS, request.kv_format or self._kv_format, "kv_format"
        )
        is_here = request.device == THIS_MACHINE
        budget = self._token_budget if is_here else default_token_budget(is_here=False)
        question = Question(**values, token_budget=budget)
        model = self._model
        calibration: Calibration | ReferenceCalibration | None = None
        if request.weights is not None:
            model = model.with_weights(_check_choice(WEIGHTS, request.weights, "weights"))
        if not is_here:
            device = self._devices[_check_choice(self._devices, request.device, "device")]
        elif (hardware := self._hardware) is None:
            reason = "cannot be this machine, whose limits are not known: name another."
            raise RequestError(reason, field="device")
        else:
            device = device_of(hardware)
            calibration = load_calibration(self._card.identity, self._num_threads)
            calibration = calibration or reference_steps(device)
        return make_plan(model, device, question, calibration)

    @cached_property
    def _model(self) -> PlannedModel:
        from twostroke.lab.planner import PlannedModel

        card = self._card
        return PlannedModel(
            self._name,
            card.cost.program,
            weight_bytes=card.cost.weight_bytes,
            stored=card.format,
            arithmetic="bf16",
        )

    @cached_property
    def _devices(self) -> dict[str, Device]:
        from twostroke.lab.planner import known_devices  # imported on the first plan

        return known_devices()

    @property
    def _hardware(self) -> Hardware | None:
        return self._limits.hardware() if self._limits else None

    @property
    def _kv_format(self) -> str:
        from twostroke.model.program.kv_layout import FORMATS

        cache = self._card.cost.cache
        return next(name for name, kv_format in FORMATS.items() if kv_format == cache)


def _check_choice(valid_values: Iterable[str], value: str, name: str) -> str:
    """Return the value of a plan request's field `name`, if it is one of the valid values.

    Raises:
        RequestError: the value is not valid.
    """
    names = list(valid_values)
    if value not in names:
        reason = f"must be one of {', '.join(names)}, got '{{value}}'.{nearest(value, names)}"
        raise RequestError(reason, field=name, value=value[:80])
    return value
