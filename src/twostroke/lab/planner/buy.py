"""Compares the cost of hosting a model with the prices of APIs: break-even and sensitivity."""

from __future__ import annotations

from math import ceil, comb
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.errors import TwostrokeError, UnreachableError, UsageError
from twostroke.core.frozen import Frozen, check_range
from twostroke.lab.measure.report_text import format_ms, format_number
from twostroke.lab.planner.planner import Planner
from twostroke.lab.planner.question import MEMORY_SHARE, context_shortfall
from twostroke.lab.planner.replicas import TIME_UNITS, DeviceGroup, Replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.lab.planner.devices import Device
    from twostroke.lab.planner.models import PlannedModel
    from twostroke.lab.planner.prices import ApiPrice
    from twostroke.lab.planner.question import Question
    from twostroke.lab.planner.replicas import PlannedReplica

DAYS_PER_MONTH: Final = 365.25 / 12
HOUR_WEIGHTS: Final = {  # relative number of requests in each hour of a day
    "flat": (1.0,) * 24,
    "office": (*(0.1,) * 7, 0.4, *(1.0,) * 10, 0.6, 0.4, *(0.2,) * 4),
}
_SWING_SHARE: Final = 0.2  # each input is varied by this share
_MAX_REQUESTS_PER_DAY: Final = 1e9
_MAX_MONTHS: Final = 120
_HOURS_PER_YEAR: Final = 24 * 365.25


class Traffic(Frozen):
    """The daily requests that a hosted model or an API must serve.

    Attributes:
        requests_per_day: mean number of requests.
        hours: relative number of requests in each hour (UTC).
        growth: growth per month, as a share.
        batch: share of requests that can wait until an hour with free capacity.
    """

    requests_per_day: float
    hours: tuple[float, ...] = HOUR_WEIGHTS["flat"]
    growth: float = 0.0
    batch: float = 0.0

    def __post_init__(self) -> None:
        """Raise UsageError, with the field, if a number of the traffic is out of range."""
        check_range(self, "requests_per_day", high=_MAX_REQUESTS_PER_DAY)
        if len(self.hours) != 24 or min(self.hours) < 0 or not 0 < sum(self.hours) < 1e12:
            raise UsageError("must be 24 numbers from 0, not all 0.", field="hours")
        check_range(self, "batch", low=0, high=1)
        check_range(self, "growth", low=-0.5, high=1)

    @property
    def per_hour(self) -> tuple[float, ...]:
        """The number of requests in each hour of the day."""
        return tuple(self.requests_per_day * hour / sum(self.hours) for hour in self.hours)


class Hosting(Frozen):
    """How a model is hosted: how busy replicas are, how many are spare, and costs besides devices.

    Attributes:
        utilization: share of the time that a replica may be busy, from 0 to 1.
        spare: number of replicas that run in addition to the replicas that the load needs.
        scaled: whether replicas stop in hours that do not need them.
        engineering_usd: cost of engineering per month.
        setup_usd: one-time cost.
        availability: share of the time that one replica runs.
        purchase_usd: price of a device that is bought; None for a device that is rented.
        lifetime_years: years over which the purchase is written off.
        watts: power of a running device, including its share of the server; None for the device's
            TDP.
        usd_per_kwh: price of power; 0 if the rent includes it.
        pue: power of the whole data centre, including cooling, divided by the power of its servers.
        grams_per_kwh: carbon dioxide for each kWh; None if unknown.
    """

    utilization: float = 0.6
    spare: int = 1
    scaled: bool = False
    engineering_usd: float = 0.0
    setup_usd: float = 0.0
    availability: float = 0.99
    purchase_usd: float | None = None
    lifetime_years: float = 4.0
    watts: float | None = None
    usd_per_kwh: float = 0.0
    pue: float = 1.0
    grams_per_kwh: float | None = None

    def __post_init__(self) -> None:
        """Raise UsageError, with the field, if a number about hosting is out of range."""
        check_range(self, "purchase_usd", "watts", high=1e9)
        check_range(self, "lifetime_years", low=0.1, high=50)
        check_range(self, "usd_per_kwh", low=0, high=1000)
        check_range(self, "pue", low=1, high=10)
        check_range(self, "grams_per_kwh", low=0, high=1e5)
        check_range(self, "utilization", "availability", high=1)
        check_range(self, "spare", low=0, high=1000)
        check_range(self, "engineering_usd", "setup_usd", low=0, high=1e9)

    @property
    def counts_energy(self) -> bool:
        """Whether the price or the carbon dioxide of power is known."""
        return self.usd_per_kwh > 0 or self.grams_per_kwh is not None


class Costs(Frozen):
    """The monthly costs of hosting a model, in $, and the replicas that they pay for.

    `replicas` is the number of replicas in each hour, with spare replicas. `busy_share` is the
    share of the replicas' time in which they have work. `energy_kwh` is None if power is not
    counted; `carbon_kg` is the carbon dioxide of this energy, None if unknown.
    """

    devices_usd: float
    engineering_usd: float
    replicas: tuple[int, ...]
    busy_share: float
    energy_usd: float = 0.0
    energy_kwh: float | None = None
    carbon_kg: float | None = None

    @property
    def usd(self) -> float:
        """The total cost of hosting per month, in $."""
        return self.devices_usd + self.engineering_usd + self.energy_usd


class CostComparison(Frozen):
    """The monthly cost of one API, in $, compared with the cost of hosting the model.

    Attributes:
        api: name of the API's model.
        source_date: date of the API's price.
        months_old: age of the API's price in months.
        is_stale: the price is so old that it has probably changed.
        usd: cost of the API.
        saving_usd: `usd` minus the cost of hosting.
        break_even: requests per day from which hosting is cheaper; None if it never is.
        months: months until savings have paid for the setup; None if more than ten years.
    """

    api: str
    source_date: str
    months_old: int
    is_stale: bool
    usd: float
    saving_usd: float
    break_even: float | None
    months: int | None


class InputSensitivity(Frozen):
    """How much one input of a cost comparison, such as the load, changes the monthly saving.

    `low_usd` is the saving if the input is a fifth lower, `high_usd` if it is a fifth higher.
    """

    name: str
    low_usd: float
    high_usd: float

    @property
    def spread(self) -> float:
        """The difference, in $, between the savings with the lower and with the higher input."""
        return abs(self.high_usd - self.low_usd)


class CostInputs(Frozen):
    """All inputs of a comparison between hosting a model and using an API.

    `api_factor` multiplies the prices of APIs.
    """

    model: PlannedModel
    device: Device
    question: Question
    traffic: Traffic
    hosting: Hosting
    api_factor: float = 1.0


class HostingComparison(Frozen):
    """The result of comparing the cost of hosting a model with the prices of APIs.

    Attributes:
        model, device: names.
        replica: the replica that hosting runs.
        costs: costs of hosting.
        comparisons: APIs, the cheapest first.
        against: the cheapest API, with which `swings` compare.
        swings: sensitivity of the saving to each input, the largest first.
        peak_availability: probability that enough replicas run in the peak hour.
        assumed: configuration fields that are missing, as in `Plan`.
    """

    model: str
    device: str
    replica: PlannedReplica
    costs: Costs
    comparisons: tuple[CostComparison, ...]
    against: str
    swings: tuple[InputSensitivity, ...]
    peak_availability: float
    assumed: tuple[str, ...] = ()


def compare_costs(case: CostInputs, prices: Sequence[ApiPrice], today: str) -> HostingComparison:
    """Compare the cost of hosting a model with the price of each API.

    `today` is a date such as 2026-07.

    Raises:
        UsageError: the device has no price, or its memory is unknown.
        UnreachableError: the model cannot run on the device within its objectives, or its
            context is too short for the requests.
    """
    context_length = case.model.program.context_length
    if shortfall := context_shortfall(case.model.name, context_length, case.question):
        raise UnreachableError(shortfall)
    replica = _hosted_replica(case)
    costs = _hosting_costs(case, replica)
    comparisons = [_compare_api(case, replica, price, today) for price in prices]
    comparisons.sort(key=lambda comparison: comparison.usd)
    cheapest = next(price for price in prices if price.model == comparisons[0].api)
    return HostingComparison(
        model=case.model.name,
        device=case.device.name,
        replica=replica,
        costs=costs,
        comparisons=tuple(comparisons),
        against=cheapest.model,
        swings=tuple(sorted(_swings(case, cheapest), key=lambda swing: -swing.spread)),
        peak_availability=_availability(
            max(costs.replicas), case.hosting.spare, case.hosting.availability
        ),
        assumed=case.model.assumed,
    )


def _hosted_replica(case: CostInputs) -> PlannedReplica:
    """Return the fastest replica of the model on devices that it shares with no other replica.

    Raises:
        UsageError: the device has no price, or its memory is unknown.
        UnreachableError: the model cannot run on the device within its objectives, or its context
            is too short for the requests.
    """
    device, question = case.device, case.question
    usd = _device_usd_per_hour(case)
    if usd is None:
        reason = "is needed: no price of {value} is known."
        raise UsageError(reason, field="usd_per_hour", value=device.name)
    if case.hosting.counts_energy and case.hosting.watts is None and device.tdp_w is None:
        reason = "is needed: the power of {value} is not known."
        raise UsageError(reason, field="watts", value=device.name)
    if device.memory_bytes is None:
        raise UsageError(f"The memory of {device.name} is not known: use a .toml file.")
    group = DeviceGroup(
        device,
        question.count,
        memory_bytes=device.memory_bytes * question.count * MEMORY_SHARE,
        usd_per_hour=usd * question.count,
        stock=device.name,
    )
    planner = Planner(case.model, device, question)
    replicas = Replicas(0, planner, load=float("inf"), utilization=case.hosting.utilization)
    candidates = [r for r in replicas.on_group(group) if r.time_units == TIME_UNITS]
    if not candidates:
        shortfall = replicas.shortfall(group)
        if shortfall.figure == "memory":
            raise UnreachableError(
                f"It does not fit on {group.name}: it needs "
                f"{format_number(shortfall.value / 1e9)} GB, and "
                f"{format_number(shortfall.limit / 1e9)} GB are there."
            )
        raise UnreachableError(
            f"On {group.name} {shortfall.figure} is at least {format_ms(shortfall.value)} ms, "
            f"{shortfall.times:,.2f} times the objective: more devices, or fewer bits for each "
            "weight."
        )
    return max(candidates, key=lambda replica: replica.requests_per_s)


def _hosting_costs(case: CostInputs, replica: PlannedReplica) -> Costs:
    """Return the monthly costs of hosting the model on replicas like `replica`.

    Batch requests fill hours in which replicas have free capacity.
    """
    hosting, traffic = case.hosting, case.traffic
    hourly_capacity = replica.requests_per_s * 3600  # requests per replica
    interactive = [requests * (1 - traffic.batch) for requests in traffic.per_hour]
    needed = [max(1, ceil(requests / hourly_capacity - 1e-9)) for requests in interactive]
    if not hosting.scaled:
        needed = [max(needed)] * 24
    missing = ceil(traffic.requests_per_day / hourly_capacity - 1e-9) - sum(needed)
    if missing > 0:  # batch requests need more than the free capacity
        per_hour, rest = divmod(missing, 24)
        add_everywhere = not hosting.scaled and rest > 0
        needed = [
            count + per_hour + (1 if add_everywhere or hour < rest else 0)
            for hour, count in enumerate(needed)
        ]
    running = tuple(count + hosting.spare for count in needed)
    usd = _device_usd_per_hour(case) or 0.0
    energy_kwh = None
    if hosting.counts_energy:
        watts = (hosting.watts or case.device.tdp_w or 0.0) * case.question.count
        energy_kwh = sum(running) * watts / 1000 * hosting.pue * DAYS_PER_MONTH
    grams = hosting.grams_per_kwh
    daily_capacity = hourly_capacity / hosting.utilization * sum(running)
    return Costs(
        devices_usd=sum(running) * case.question.count * usd * DAYS_PER_MONTH,
        engineering_usd=hosting.engineering_usd,
        replicas=running,
        busy_share=traffic.requests_per_day / daily_capacity,
        energy_usd=(energy_kwh or 0.0) * hosting.usd_per_kwh,
        energy_kwh=energy_kwh,
        carbon_kg=None if energy_kwh is None or grams is None else energy_kwh * grams / 1000,
    )


def _device_usd_per_hour(case: CostInputs) -> float | None:
    """Return the price of a device in $ per hour: its rent, or its purchase over its lifetime."""
    hosting = case.hosting
    if hosting.purchase_usd is None:
        return case.question.price_of(case.device)
    return hosting.purchase_usd / (hosting.lifetime_years * _HOURS_PER_YEAR)


def _api_usd(case: CostInputs, price: ApiPrice) -> float:
    """Return the cost of serving the traffic by an API, in $ per month."""
    question, batch = case.question, case.traffic.batch
    daily_usd = sum(
        price.hour_usd(
            hour,
            requests,
            prompt=question.prompt,
            cached=question.num_cached,
            output=question.output,
        )
        for hour, requests in enumerate(case.traffic.per_hour)
    )
    batch_factor = 1 - batch + batch * price.batch_share
    return daily_usd * DAYS_PER_MONTH * case.api_factor * batch_factor


def _compare_api(
    case: CostInputs, replica: PlannedReplica, price: ApiPrice, today: str
) -> CostComparison:
    usd = _api_usd(case, price)
    return CostComparison(
        api=price.model,
        source_date=price.source_date,
        months_old=price.months_old(today),
        is_stale=price.is_stale(today),
        usd=usd,
        saving_usd=usd - _hosting_costs(case, replica).usd,
        break_even=_break_even(lambda load: _saving(case, replica, price, load)),
        months=_months_to_pay_off(case, replica, price),
    )


def _saving(
    case: CostInputs, replica: PlannedReplica, price: ApiPrice, requests_per_day: float
) -> float:
    """Return how much hosting saves per month compared with an API, in $.

    `requests_per_day` replaces the load in `case`.
    """
    other = replace(case, traffic=replace(case.traffic, requests_per_day=requests_per_day))
    return _api_usd(other, price) - _hosting_costs(other, replica).usd


def _break_even(saving: Callable[[float], float]) -> float | None:
    """Return the requests per day from which hosting is always cheaper; None if it never is.

    `saving` returns the saving at a load. Costs rise in steps of whole replicas, so the search
    starts at the highest load and goes down.
    """
    low, high, load = 0.0, _MAX_REQUESTS_PER_DAY, _MAX_REQUESTS_PER_DAY
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


def _months_to_pay_off(case: CostInputs, replica: PlannedReplica, price: ApiPrice) -> int | None:
    """Return the month in which the savings of hosting have paid for its setup; None if never.

    The load grows from month to month. In months without a saving, the API is used, which saves
    nothing.
    """
    balance, load = -case.hosting.setup_usd, case.traffic.requests_per_day
    for month in range(1, _MAX_MONTHS + 1):
        saving = _saving(case, replica, price, min(load, _MAX_REQUESTS_PER_DAY))
        balance += max(saving, 0.0)
        if saving > 0 and balance >= 0:
            return month
        load *= 1 + case.traffic.growth
    return None


def _swings(case: CostInputs, price: ApiPrice) -> Iterator[InputSensitivity]:
    """Yield how the monthly saving changes if each input is a fifth lower, and a fifth higher."""

    def saving(other: CostInputs) -> float:
        return _api_usd(other, price) - _hosting_costs(other, _hosted_replica(other)).usd

    for name, changed in _CHANGES.items():
        if name == _POWER_PRICE and not case.hosting.usd_per_kwh:
            continue
        savings = []
        for factor in (1 - _SWING_SHARE, 1 + _SWING_SHARE):
            try:
                savings.append(saving(changed(case, factor)))
            except TwostrokeError:  # such as an objective that cannot be met
                break
        if len(savings) == 2:
            yield InputSensitivity(name, savings[0], savings[1])


def _scale_question(field: str) -> Callable[[CostInputs, float], CostInputs]:
    """Return a function that multiplies a field of the inputs' planning question by a factor.

    Counts stay whole numbers, and shares stay at most 0.99.
    """

    def change(case: CostInputs, factor: float) -> CostInputs:
        value = getattr(case.question, field)
        new = max(1, round(value * factor)) if isinstance(value, int) else min(value * factor, 0.99)
        return replace(case, question=replace(case.question, **{field: new}))

    return change


def _scale_device_price(case: CostInputs, factor: float) -> CostInputs:
    if case.hosting.purchase_usd is not None:
        return _scale_hosting("purchase_usd")(case, factor)
    usd = (case.question.price_of(case.device) or 0.0) * factor
    return replace(case, question=replace(case.question, usd_per_hour=usd))


def _scale_engine(case: CostInputs, factor: float) -> CostInputs:
    mfu = min(1.0, case.question.mfu * factor)
    mbu = min(1.0, case.question.mbu * factor)
    return replace(case, question=replace(case.question, mfu=mfu, mbu=mbu))


def _scale_traffic(case: CostInputs, factor: float) -> CostInputs:
    load = min(case.traffic.requests_per_day * factor, _MAX_REQUESTS_PER_DAY)
    return replace(case, traffic=replace(case.traffic, requests_per_day=load))


def _scale_hosting(field: str) -> Callable[[CostInputs, float], CostInputs]:
    """Return a function that multiplies a field of the inputs' `Hosting` by a factor."""

    def change(case: CostInputs, factor: float) -> CostInputs:
        value = getattr(case.hosting, field) * factor
        value = min(value, 1.0) if field == "utilization" else value
        return replace(case, hosting=replace(case.hosting, **{field: value}))

    return change


_POWER_PRICE: Final = "price of power"
_CHANGES: Final[dict[str, Callable[[CostInputs, float], CostInputs]]] = {
    "requests": _scale_traffic,
    "price of the API": lambda case, factor: replace(case, api_factor=factor),
    "price of devices": _scale_device_price,
    "tokens of a prompt": _scale_question("prompt"),
    "tokens of an answer": _scale_question("output"),
    "share that is cached": _scale_question("cached"),
    "speed of the engine (MFU, MBU)": _scale_engine,
    "utilization": _scale_hosting("utilization"),
    "engineering": _scale_hosting("engineering_usd"),
    _POWER_PRICE: _scale_hosting("usd_per_kwh"),
}


def _availability(running: int, spare: int, availability: float) -> float:
    """Return the probability that at most `spare` replicas are down, if they fail independently.

    `running` counts all replicas, with the spare ones. `availability` is the share of the time that
    one replica runs.
    """
    return sum(
        comb(running, down) * (1 - availability) ** down * availability ** (running - down)
        for down in range(min(spare, running) + 1)
    )
