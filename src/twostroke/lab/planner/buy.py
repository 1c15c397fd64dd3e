"""Self-hosting a model beside the price of an API: costs, break-even and what moves it."""

from __future__ import annotations

from math import ceil, comb
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.errors import TwostrokeError, UnreachableError, UsageError
from twostroke.core.frozen import Frozen, check_range
from twostroke.lab.measure.report_text import format_ms, format_number
from twostroke.lab.planner.planner import Planner
from twostroke.lab.planner.question import MEMORY_SHARE, context_shortfall
from twostroke.lab.planner.replicas import UNITS, DeviceGroup, Replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.lab.planner.devices import Device
    from twostroke.lab.planner.models import PlannedModel
    from twostroke.lab.planner.prices import ApiPrice
    from twostroke.lab.planner.question import Question
    from twostroke.lab.planner.replicas import PlannedReplica

DAYS: Final = 365.25 / 12  # of a month
HOURS: Final = {  # requests in each hour of a day, as weights
    "flat": (1.0,) * 24,
    "office": (*(0.1,) * 7, 0.4, *(1.0,) * 10, 0.6, 0.4, *(0.2,) * 4),
}
_SWING: Final = 0.2  # by which the tornado varies each input
_MOST_PER_DAY: Final = 1e9
_MONTHS: Final = 120


class Traffic(Frozen):
    """Requests of a day and how they may be served.

    `hours` has the weight of each hour (UTC); `growth` is a share a month. `batch` is the share of
    requests that can wait for an hour with room.
    """

    requests_per_day: float
    hours: tuple[float, ...] = HOURS["flat"]
    growth: float = 0.0
    batch: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        check_range(self, "requests_per_day", most=_MOST_PER_DAY)
        if len(self.hours) != 24 or min(self.hours) < 0 or not 0 < sum(self.hours) < 1e12:
            raise UsageError("must be 24 numbers from 0, not all 0.", field="hours")
        check_range(self, "batch", least=0, most=1)
        check_range(self, "growth", least=-0.5, most=1)

    @property
    def per_hour(self) -> tuple[float, ...]:
        """Requests in each hour."""
        return tuple(self.requests_per_day * one / sum(self.hours) for one in self.hours)


class Hosting(Frozen):
    """How the model is hosted.

    `spare` replicas run beside those that the load needs; `scaled` stops replicas in hours that do
    not need them. `engineering_usd` is for a month, `setup_usd` once. `availability` is that of one
    replica.
    """

    utilization: float = 0.6
    spare: int = 1
    scaled: bool = False
    engineering_usd: float = 0.0
    setup_usd: float = 0.0
    availability: float = 0.99

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        check_range(self, "utilization", "availability", most=1)
        check_range(self, "spare", least=0, most=1000)
        check_range(self, "engineering_usd", "setup_usd", least=0, most=1e9)


class Costs(Frozen):
    """Dollars of a month; `replicas` in each hour, spare ones included."""

    devices_usd: float
    engineering_usd: float
    replicas: tuple[int, ...]
    busy_share: float

    @property
    def usd(self) -> float:
        """All of it."""
        return self.devices_usd + self.engineering_usd


class CostComparison(Frozen):
    """An API beside self-hosting, in dollars of a month.

    `break_even` is the number of requests a day from which self-hosting costs less, None if it
    never does; `months` until savings have paid for the setup, None if not within ten years.
    """

    api: str
    source_date: str
    months_old: int
    is_stale: bool
    usd: float
    saving_usd: float
    break_even: float | None
    months: int | None


class Swing(Frozen):
    """What a month saves if an input is a fifth less, and a fifth more."""

    name: str
    low_usd: float
    high_usd: float

    @property
    def spread(self) -> float:
        """How far both are apart."""
        return abs(self.high_usd - self.low_usd)


class Case(Frozen):
    """All that costs depend on; `api_factor` multiplies the API's prices."""

    model: PlannedModel
    device: Device
    question: Question
    traffic: Traffic
    hosting: Hosting
    api_factor: float = 1.0


class Buy(Frozen):
    """The answer; `peak_availability` is the chance that enough replicas run in the peak hour."""

    model: str
    device: str
    replica: PlannedReplica
    costs: Costs
    comparisons: tuple[CostComparison, ...]
    against: str
    swings: tuple[Swing, ...]
    peak_availability: float
    assumed: tuple[str, ...] = ()  # as a plan's


def compare(case: Case, prices: Sequence[ApiPrice], today: str) -> Buy:
    """Return self-hosting beside each API; swings are against the cheapest.

    Raises:
        UsageError: the device has no price.
        UnreachableError: the model cannot run on it within its objectives, or its context cannot
            hold the requests.
    """
    context_length = case.model.program.context_length
    if shortfall := context_shortfall(case.model.name, context_length, case.question):
        raise UnreachableError(shortfall)
    replica = _replica(case)
    costs = _hosted(case, replica)
    rows = sorted((_beside(case, replica, one, today) for one in prices), key=lambda one: one.usd)
    cheapest = next(one for one in prices if one.model == rows[0].api)
    return Buy(
        model=case.model.name,
        device=case.device.name,
        replica=replica,
        costs=costs,
        comparisons=tuple(rows),
        against=cheapest.model,
        swings=tuple(sorted(_swings(case, cheapest), key=lambda one: -one.spread)),
        peak_availability=_availability(
            max(costs.replicas), case.hosting.spare, case.hosting.availability
        ),
        assumed=case.model.assumed,
    )


def _replica(case: Case) -> PlannedReplica:
    """Return one replica with all of its devices' time, busy for the share that is allowed."""
    device, asked = case.device, case.question
    usd = asked.price_of(device)
    if usd is None:
        reason = "is needed: no price of {value} is known."
        raise UsageError(reason, field="usd_per_hour", value=device.name)
    if device.memory_bytes is None:
        raise UsageError(f"The memory of {device.name} is not known: use a .toml file.")
    usable = device.memory_bytes * asked.count * MEMORY_SHARE
    place = DeviceGroup(device, asked.count, usable, usd * asked.count, device.name)
    planner = Planner(case.model, device, asked)
    maker = Replicas(0, planner, float("inf"), case.hosting.utilization)
    whole = [one for one in maker.on(place) if one.share == UNITS]
    if not whole:
        lack = maker.shortfall(place)
        if lack.figure == "memory":
            raise UnreachableError(
                f"It does not fit on {place.name}: it needs {format_number(lack.value / 1e9)} GB, "
                f"and {format_number(lack.limit / 1e9)} GB are there."
            )
        raise UnreachableError(
            f"On {place.name} {lack.figure} is at least {format_ms(lack.value)} ms, "
            f"{lack.times:,.2f} times the objective: more devices, or fewer bits for each weight."
        )
    return max(whole, key=lambda one: one.requests_per_s)


def _hosted(case: Case, replica: PlannedReplica) -> Costs:
    """Return what a month of hosting costs; requests that can wait fill hours with room."""
    hosting, traffic = case.hosting, case.traffic
    each = replica.requests_per_s * 3600  # requests of a replica in an hour
    needed = [max(1, ceil(one * (1 - traffic.batch) / each - 1e-9)) for one in traffic.per_hour]
    if not hosting.scaled:
        needed = [max(needed)] * 24
    lacking = ceil(traffic.requests_per_day / each - 1e-9) - sum(needed)
    if lacking > 0:  # waiting requests need more than what is idle
        more, rest = divmod(lacking, 24)
        add_all = not hosting.scaled and rest > 0
        needed = [
            one + more + (1 if add_all or hour < rest else 0) for hour, one in enumerate(needed)
        ]
    running = tuple(one + hosting.spare for one in needed)
    usd = case.question.price_of(case.device) or 0.0
    full = each / hosting.utilization * sum(running)
    return Costs(
        devices_usd=sum(running) * case.question.count * usd * DAYS,
        engineering_usd=hosting.engineering_usd,
        replicas=running,
        busy_share=traffic.requests_per_day / full,
    )


def _api_usd(case: Case, price: ApiPrice) -> float:
    """Return what a month of the API costs."""
    asked, batch = case.question, case.traffic.batch
    day = sum(
        price.hour_usd(hour, one, asked.prompt, asked.num_cached, asked.output)
        for hour, one in enumerate(case.traffic.per_hour)
    )
    return day * DAYS * case.api_factor * (1 - batch + batch * price.batch_share)


def _beside(case: Case, replica: PlannedReplica, price: ApiPrice, today: str) -> CostComparison:
    usd = _api_usd(case, price)
    return CostComparison(
        api=price.model,
        source_date=price.source_date,
        months_old=price.months_old(today),
        is_stale=price.is_stale(today),
        usd=usd,
        saving_usd=usd - _hosted(case, replica).usd,
        break_even=_break_even(lambda load: _saving(case, replica, price, load)),
        months=_months(case, replica, price),
    )


def _saving(case: Case, replica: PlannedReplica, price: ApiPrice, per_day: float) -> float:
    """Return what a month saves at another load."""
    other = replace(case, traffic=replace(case.traffic, requests_per_day=per_day))
    return _api_usd(other, price) - _hosted(other, replica).usd


def _break_even(saving: Callable[[float], float]) -> float | None:
    """Return the load from which on self-hosting always costs less; a whole replica is a step."""
    low, high, load = 0.0, _MOST_PER_DAY, _MOST_PER_DAY
    if saving(load) <= 0:
        return None
    while load > 1:
        load /= 1.1
        if saving(load) <= 0:
            low = load
            break
        high = load
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if saving(max(middle, 1e-9)) <= 0 else (low, middle)
    return high


def _months(case: Case, replica: PlannedReplica, price: ApiPrice) -> int | None:
    """Return the month in which savings have paid for the setup, at the growth of the load."""
    saved, load = -case.hosting.setup_usd, case.traffic.requests_per_day
    for month in range(1, _MONTHS + 1):
        gained = _saving(case, replica, price, min(load, _MOST_PER_DAY))
        saved += max(gained, 0.0)  # before it pays, the API is used
        if gained > 0 and saved >= 0:
            return month
        load *= 1 + case.traffic.growth
    return None


def _swings(case: Case, price: ApiPrice) -> Iterator[Swing]:
    """Yield how a month's saving changes with each input."""

    def saving(other: Case) -> float:
        return _api_usd(other, price) - _hosted(other, _replica(other)).usd

    for name, changed in _CHANGES.items():
        ends = []
        for factor in (1 - _SWING, 1 + _SWING):
            try:
                ends.append(saving(changed(case, factor)))
            except TwostrokeError:  # such as an objective that cannot be met
                break
        if len(ends) == 2:
            yield Swing(name, ends[0], ends[1])


def _asked(field: str) -> Callable[[Case, float], Case]:
    """Return what multiplies a field of the question: counts stay whole, shares at most 1."""

    def change(case: Case, factor: float) -> Case:
        value = getattr(case.question, field)
        new = max(1, round(value * factor)) if isinstance(value, int) else min(value * factor, 0.99)
        return replace(case, question=replace(case.question, **{field: new}))

    return change


def _device_price(case: Case, factor: float) -> Case:
    usd = (case.question.price_of(case.device) or 0.0) * factor
    return replace(case, question=replace(case.question, usd_per_hour=usd))


def _engine(case: Case, factor: float) -> Case:
    asked = case.question
    mfu, mbu = min(1.0, asked.mfu * factor), min(1.0, asked.mbu * factor)
    return replace(case, question=replace(asked, mfu=mfu, mbu=mbu))


def _traffic(case: Case, factor: float) -> Case:
    load = min(case.traffic.requests_per_day * factor, _MOST_PER_DAY)
    return replace(case, traffic=replace(case.traffic, requests_per_day=load))


def _hosting(field: str) -> Callable[[Case, float], Case]:
    def change(case: Case, factor: float) -> Case:
        value = getattr(case.hosting, field) * factor
        value = min(value, 1.0) if field == "utilization" else value
        return replace(case, hosting=replace(case.hosting, **{field: value}))

    return change


_CHANGES: Final[dict[str, Callable[[Case, float], Case]]] = {
    "requests": _traffic,
    "price of the API": lambda case, factor: replace(case, api_factor=factor),
    "price of devices": _device_price,
    "tokens of a prompt": _asked("prompt"),
    "tokens of an answer": _asked("output"),
    "share that is cached": _asked("cached"),
    "speed of the engine (MFU, MBU)": _engine,
    "utilization": _hosting("utilization"),
    "engineering": _hosting("engineering_usd"),
}


def _availability(running: int, spare: int, each: float) -> float:
    """Return the chance that at most `spare` of the replicas are down, each by itself."""
    return sum(
        comb(running, down) * (1 - each) ** down * each ** (running - down)
        for down in range(min(spare, running) + 1)
    )
