"""Plans a fleet for several models: which devices to buy, or which model to place where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import field
from msgspec.structs import replace

from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.lab.measure.report_text import format_ms, format_number
from twostroke.lab.planner.devices import find_device, known_devices
from twostroke.lab.planner.models import load_planned_model
from twostroke.lab.planner.packing import Demand, Packer
from twostroke.lab.planner.planner import Planner
from twostroke.lab.planner.replicas import TIME_UNITS, DeviceGroup, Replicas

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from twostroke.lab.planner.devices import Device
    from twostroke.lab.planner.fleet_file import FleetQuestion
    from twostroke.lab.planner.models import PlannedModel
    from twostroke.lab.planner.packing import Option, PackingResult, PlacementPattern
    from twostroke.lab.planner.replicas import Shortfall

_MAX_BOUGHT_DEVICES: Final = 100_000  # a load that needs more is refused
_MISSING_LOAD_PENALTY: Final = 1000.0  # multiple of the price of serving the load
_ALTERNATIVE_TIME_LIMIT_S: Final = 2.0  # for the integer program of each alternative
_MAX_ALTERNATIVES: Final = 3


class PlacedReplica(Frozen):
    """Replicas of one model on each device group of a `PlacementGroup`, in a fleet's plan.

    There are `count` of them. Latencies are in seconds.
    """

    model: str
    weights: str
    count: int
    streams: int
    time_share: float
    memory_bytes: float
    requests_per_s: float
    ttft_s: float
    tpot_s: float
    bound: str


class PlacementGroup(Frozen):
    """Device groups with the same replicas in a fleet's plan.

    There are `times` groups of `count` devices each.
    """

    device: str
    count: int
    times: int
    usd_per_hour: float
    memory_share: float
    time_share: float
    replicas: tuple[PlacedReplica, ...]


class ServedLoad(Frozen):
    """A model's load in a fleet's plan, and the part of it that the fleet serves (`carried`).

    Both are in requests per second. `next_usd` is the price per hour of serving one more request
    per second. For the objective "performance" it is the value that other models would lose for it.
    """

    model: str
    load: float
    carried: float
    next_usd: float


class Alternative(Frozen):
    """The best fleet without one kind of device: its price, and the share of load it misses."""

    without: str
    usd_per_hour: float
    missing_share: float


class FleetPlan(Frozen):
    """The answer to a fleet question: which devices to use, and which replicas to run on them.

    Attributes:
        objective: "cost" or "performance".
        mfu, mbu: the shares of peak arithmetic and bandwidth, as in the question.
        usd_per_hour: price of the fleet.
        least_usd: lower bound for the price of any fleet of these replicas; None for "performance".
        groups: devices and their replicas; empty if there is a `verdict`.
        models: the load of each model, and how much of it is served.
        binding: sentences about the limits that determine the result.
        alternatives: the best fleets without one kind of device.
        verdict: why no fleet can serve the models as asked; empty if a fleet can.
        assumed: by model, fields that the configuration lacks, so that defaults are used.
    """

    objective: str
    mfu: float
    mbu: float
    usd_per_hour: float
    least_usd: float | None
    groups: tuple[PlacementGroup, ...]
    models: tuple[ServedLoad, ...]
    binding: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    verdict: str = ""
    assumed: dict[str, tuple[str, ...]] = field(default_factory=dict)


def make_fleet(question: FleetQuestion) -> FleetPlan:
    """Return the plan of the fleet with the lowest price, or with the highest performance.

    Raises:
        UsageError: a device is unknown, or has no price where one is needed.
        ModelNotFoundError, ModelFormatError: a model cannot be planned.
    """
    return _FleetPlanner(question).answer()


class _FleetPlanner:
    """Plans the fleet of one question.

    It has the possible device groups, the replicas that fit on each, and a packer that combines
    them.
    """

    def __init__(self, question: FleetQuestion) -> None:
        self._question = question
        self._names = _unique_names([model.label for model in question.models])
        self._loads = tuple(model.requests_per_s for model in question.models)
        self._replicas = list(_replicas_of_models(question))
        self._prices = {find_device(name).name: usd for name, usd in question.prices.items()}
        devices = [find_device(name) for name in question.stock or question.devices]
        devices = devices or _devices_for_sale(self._prices)
        self._stock = {find_device(name).name: n for name, n in question.stock.items()}
        self._groups = list(self._possible_groups(devices, self._stock))
        self._options = self._options_on(self._groups)
        self._packer = Packer(self._options)

    def answer(self) -> FleetPlan:
        """Return the plan of the best fleet, or the reason why there is none."""
        shortfalls = [
            replicas.context_shortfall(self._names[index]) for index, replicas in self._replicas
        ]
        if any(shortfalls):
            return self._refusal(" ".join(dict.fromkeys(filter(None, shortfalls))))
        reasons = [self._shortfall(index) for index in range(len(self._names))]
        if any(reasons):
            return self._refusal(" ".join(filter(None, reasons)))
        demand = self._demand()
        packing = self._packer.pack(demand)
        if demand.must_serve and not packing.carries(demand):
            return self._refusal(self._missing_load(demand, packing))
        if not packing.used:
            return self._refusal(self._too_small_budget())
        alternatives = list(self._alternatives(demand, packing))
        packing = self._packer.pack(demand)  # patterns of the alternatives may improve it
        num_devices = sum(pattern.group.count * times for pattern, times in packing.used)
        if not self._stock and num_devices > _MAX_BOUGHT_DEVICES:
            return self._refusal(
                f"The load needs {counted_noun(num_devices, 'device', form=',')}; plans have at "
                f"most {_MAX_BOUGHT_DEVICES:,}. Lower requests_per_s."
            )
        return FleetPlan(
            objective=self._question.objective,
            mfu=self._question.mfu,
            mbu=self._question.mbu,
            usd_per_hour=packing.usd_per_hour,
            least_usd=packing.bound if demand.must_serve else None,
            groups=tuple(self._placement_groups(packing)),
            models=tuple(self._served_loads(demand, packing)),
            binding=tuple(self._binding_limits(demand, packing)),
            alternatives=tuple(alternatives),
            assumed={
                self._names[index]: replicas.model.assumed
                for index, replicas in self._replicas
                if replicas.model.assumed
            },
        )

    def _refusal(self, verdict: str) -> FleetPlan:
        return FleetPlan(
            objective=self._question.objective,
            mfu=self._question.mfu,
            mbu=self._question.mbu,
            usd_per_hour=0.0,
            least_usd=None,
            groups=(),
            models=(),
            binding=(),
            alternatives=(),
            verdict=verdict,
        )

    def _possible_groups(
        self, devices: Sequence[Device], stock: Mapping[str, int]
    ) -> Iterator[DeviceGroup]:
        """Yield the device groups that a fleet may have: 1, 2, 4, ... devices of each kind."""
        question = self._question
        for device in devices:
            price = self._prices.get(device.name, device.usd_per_hour)
            if price is None and (question.objective == "cost" or question.budget is not None):
                reason = f"The table has no price for {device.name}: give one as prices, such as "
                raise UsageError(f"{reason}{{{device.name}: 2.50}}.")
            if device.memory_bytes is None:
                raise UsageError(f"The memory of {device.name} is not known: use a .toml file.")
            max_count = min(stock.get(device.name, 64), question.most_devices)
            for power in range(7):
                count = 1 << power
                if count > max_count or (count > 1 and device.link is None):
                    break
                yield DeviceGroup(
                    device,
                    count,
                    memory_bytes=device.memory_bytes * count * question.memory_share,
                    usd_per_hour=(price or 0.0) * count,
                    stock=device.name,
                )

    def _options_on(self, groups: Sequence[DeviceGroup]) -> list[Option]:
        """Return each device group with the possible replicas of all models on it."""
        return [
            (
                group,
                [replica for _, replicas in self._replicas for replica in replicas.on_group(group)],
            )
            for group in groups
        ]

    def _demand(self) -> Demand:
        """Return the load of all models for the packer, with penalties for load that is not served.

        For the objective "cost", the penalty is far more than serving the load costs. For
        "performance" it is the value of the load, and prices only decide between fleets that serve
        the same load.
        """
        question = self._question
        max_usd = max(group.usd_per_hour for group in self._groups) + 1
        if question.objective == "performance":
            values = tuple(model.value for model in question.models)
            total_value = sum(v * load for v, load in zip(values, self._loads, strict=True))
            return Demand(
                self._loads,
                penalties=values,
                stock=self._stock,
                budget=question.budget,
                must_serve=False,
                usd_weight=1e-6 * total_value / max_usd,
            )
        max_rates = [0.0] * len(self._loads)
        for _, replicas in self._options:
            for replica in replicas:
                max_rates[replica.model] = max(max_rates[replica.model], replica.requests_per_s)
        return Demand(
            self._loads,
            penalties=tuple(_MISSING_LOAD_PENALTY * max_usd / rate for rate in max_rates),
            stock=self._stock,
            budget=question.budget,
        )

    def _shortfall(self, index: int) -> str:
        """Explain why a model runs on no device group, by how much it misses, and what helps.

        The text is empty if the model runs on some group. `index` is the model's number.
        """
        if any(replica.model == index for _, replicas in self._options for replica in replicas):
            return ""
        shortfalls = [
            replicas.shortfall(group)
            for owner, replicas in self._replicas
            for group in self._groups
            if owner == index
        ]
        if not shortfalls:
            return f"There are no devices for {self._names[index]}."
        order = ("memory", "TTFT", "TPOT")
        nearest = min(shortfalls, key=lambda each: (-order.index(each.figure), each.times))
        return f"{self._names[index]}: {_describe_shortfall(nearest)}"

    def _missing_load(self, demand: Demand, packing: PackingResult) -> str:
        """Explain how much load the best fleet misses, and which devices would serve it."""
        pairs = list(zip(self._names, packing.missing, self._loads, strict=True))
        shares = [f"{name} {miss / load:.0%}" for name, miss, load in pairs if miss > 1e-6 * load]
        listed = ", ".join(shares[:5]) + (", ..." if len(shares) > 5 else "")
        if demand.budget is not None:
            unlimited = self._packer.pack(replace(demand, budget=None))
            times = unlimited.usd_per_hour / demand.budget
            if unlimited.carries(demand):
                return (
                    "The budget is too small: the cheapest fleet costs "
                    f"{unlimited.usd_per_hour:,.2f} $ an hour, {times:,.2f} times the budget."
                )
        text = f"The devices cannot carry the load; missing in the best packing: {listed}."
        return f"{text} {self._enough(demand)}"

    def _too_small_budget(self) -> str:
        """Explain by how much the budget is too small for any replica of the models."""
        min_usd = min(group.usd_per_hour for group, replicas in self._options if replicas)
        times = min_usd / (self._question.budget or min_usd)
        return (
            "The budget is too small for any replica: the cheapest devices cost "
            f"{min_usd:,.2f} $ an hour, {times:,.2f} times the budget."
        )

    def _enough(self, demand: Demand) -> str:
        """Return a sentence about devices to add so that the fleet serves all load."""
        devices = [d for d in known_devices().values() if d.memory_bytes and d.usd_per_hour]
        bought = [replace(group, stock="") for group in self._possible_groups(devices, {})]
        owned = [replace(group, usd_per_hour=0.0) for group in self._groups]
        options = self._options_on([*owned, *bought])
        packing = Packer(options).pack(
            replace(demand, budget=None), time_limit_s=_ALTERNATIVE_TIME_LIMIT_S
        )
        counts: dict[str, int] = {}
        for pattern, times in packing.used:
            if not pattern.group.stock:
                name = pattern.group.device.name
                counts[name] = counts.get(name, 0) + times * pattern.group.count
        devices_to_buy = ", ".join(f"{count:,} x {name}" for name, count in counts.items())
        return f"Enough would be {devices_to_buy} more, for {packing.usd_per_hour:,.2f} $ an hour."

    def _placement_groups(self, packing: PackingResult) -> Iterator[PlacementGroup]:
        """Yield the device groups that a packing uses, the most expensive first."""
        for pattern, times in sorted(
            packing.used, key=lambda item: -item[0].group.usd_per_hour * item[1]
        ):
            group = pattern.group
            yield PlacementGroup(
                device=group.device.name,
                count=group.count,
                times=times,
                usd_per_hour=group.usd_per_hour * times,
                memory_share=_memory_share(pattern),
                time_share=_time_share(pattern),
                replicas=tuple(self._placed_replicas(pattern)),
            )

    def _placed_replicas(self, pattern: PlacementPattern) -> Iterator[PlacedReplica]:
        for replica in dict.fromkeys(pattern.replicas):
            yield PlacedReplica(
                model=self._names[replica.model],
                weights=replica.weights,
                count=pattern.replicas.count(replica),
                streams=replica.streams,
                time_share=replica.time_units / TIME_UNITS,
                memory_bytes=replica.memory_bytes,
                requests_per_s=replica.requests_per_s,
                ttft_s=replica.ttft_s,
                tpot_s=replica.tpot_s,
                bound=replica.bound,
            )

    def _served_loads(self, demand: Demand, packing: PackingResult) -> Iterator[ServedLoad]:
        # For "performance", prices below this only break ties.
        min_price = 0.0 if demand.must_serve else demand.usd_weight * packing.usd_per_hour
        rows = zip(self._names, self._loads, packing.missing, packing.load_prices, strict=True)
        for name, load, missing, price in rows:
            yield ServedLoad(
                name,
                load,
                carried=load - missing,
                next_usd=price if price * load > min_price else 0.0,
            )

    def _binding_limits(self, demand: Demand, packing: PackingResult) -> Iterator[str]:
        """Yield sentences about the fleet's limits: used-up stocks, the budget, full devices."""
        unit = "save {:,.2f} $ an hour" if demand.must_serve else "add a value of {:,.3g} a second"
        for name, price in packing.stock_prices.items():
            if price > 1e-9:
                yield f"{name}: all are in use; one more would {unit.format(price)}."
        if packing.budget_price > 1e-12:
            yield f"Budget: one $ an hour more would {unit.format(packing.budget_price)}."
        total = full_memory = full_time = 0.0
        for pattern, times in packing.used:
            usd = pattern.group.usd_per_hour * times or times
            total += usd
            full_memory += usd * (_memory_share(pattern) > 0.9)
            full_time += usd * (_time_share(pattern) > 0.95)
        if total:
            yield (
                f"Memory is full on {full_memory / total:.0%} of the devices (by price), time on "
                f"{full_time / total:.0%}."
            )

    def _alternatives(self, demand: Demand, packing: PackingResult) -> Iterator[Alternative]:
        """Yield the best fleet without each of the most expensive kinds of devices."""
        usd: dict[str, float] = {}
        for pattern, times in packing.used:
            name = pattern.group.device.name
            usd[name] = usd.get(name, 0.0) + pattern.group.usd_per_hour * times
        for name in sorted(usd, key=usd.__getitem__, reverse=True)[:_MAX_ALTERNATIVES]:
            other = self._packer.pack(demand, without=name, time_limit_s=_ALTERNATIVE_TIME_LIMIT_S)
            missing = sum(m / load for m, load in zip(other.missing, self._loads, strict=True))
            yield Alternative(name, other.usd_per_hour, missing / len(self._loads))


def _memory_share(pattern: PlacementPattern) -> float:
    num_bytes = sum(replica.memory_bytes for replica in pattern.replicas)
    return num_bytes / pattern.group.memory_bytes


def _time_share(pattern: PlacementPattern) -> float:
    return sum(replica.time_units for replica in pattern.replicas) / TIME_UNITS


def _replicas_of_models(question: FleetQuestion) -> Iterator[tuple[int, Replicas]]:
    """Yield a finder of possible replicas for each model in each of its weight formats.

    The index of the model comes first.
    """
    models: dict[str, PlannedModel] = {}
    device = next(iter(known_devices().values()))
    for index, entry in enumerate(question.models):
        try:
            model = models.get(entry.model) or load_planned_model(entry.model)
        except TwostrokeError as error:
            raise type(error)(str(error), field=f"models[{index}].model") from None
        models[entry.model] = model
        for variant in [model.with_weights(name) for name in entry.formats] or [model]:
            model_question = entry.question(question.mfu, question.mbu, question.token_budget)
            planner = Planner(variant, device, model_question)
            yield (
                index,
                Replicas(
                    index, planner, load=entry.requests_per_s, utilization=question.utilization
                ),
            )


def _devices_for_sale(prices: Mapping[str, float]) -> list[Device]:
    """Return the devices of the table with a known memory and a price."""
    devices = known_devices().values()
    return [d for d in devices if d.memory_bytes and (d.usd_per_hour or d.name in prices)]


def _unique_names(names: Sequence[str]) -> list[str]:
    """Return names without repetitions: a name that occurs twice becomes "a #1" and "a #2"."""
    return [
        name if names.count(name) == 1 else f"{name} #{names[: i + 1].count(name)}"
        for i, name in enumerate(names)
    ]


def _describe_shortfall(shortfall: Shortfall) -> str:
    """Return a sentence about a model that fits on no device group, and what would help.

    `shortfall` is from the device group on which the model exceeds its limit least.
    """
    if shortfall.figure == "memory":
        return (
            "it fits nowhere: one request with the weights takes "
            f"{format_number(shortfall.value / 1e9)} GB, and {shortfall.group} offers "
            f"{format_number(shortfall.limit / 1e9)} GB. Allow more most_devices, or fewer bits "
            "(weights)."
        )
    is_ttft = shortfall.figure == "TTFT"
    remedy = "a shorter prompt or more of it cached" if is_ttft else "speculation"
    return (
        f"no device meets its objectives: on {shortfall.group} {shortfall.figure} is at least "
        f"{format_ms(shortfall.value)} ms, {shortfall.times:,.2f} times the objective. Allow more "
        f"most_devices, fewer bits (weights), or {remedy}."
    )
