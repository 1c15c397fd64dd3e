"""What to buy, or where to place what: many models with loads and objectives on mixed devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import field
from msgspec.structs import replace

from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.lab.measure.report_text import format_ms, format_number
from twostroke.lab.planner.devices import find_device, known_devices
from twostroke.lab.planner.models import planned_model
from twostroke.lab.planner.packing import Demand, Packer
from twostroke.lab.planner.planner import Planner
from twostroke.lab.planner.replicas import UNITS, DeviceGroup, Replicas

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from twostroke.lab.planner.devices import Device
    from twostroke.lab.planner.fleet_file import FleetQuestion
    from twostroke.lab.planner.models import PlannedModel
    from twostroke.lab.planner.packing import Option, PackingResult, PlacementPattern
    from twostroke.lab.planner.replicas import Shortfall

_MOST_BOUGHT: Final = 100_000  # devices; a load that needs more is refused
_FAR: Final = 1000.0  # times the price of carrying a load, for not carrying it
_ALTERNATIVE_S: Final = 2.0  # for the integer program of each
_MOST_ALTERNATIVES: Final = 3


class PlacedReplica(Frozen):
    """Replicas of one model in a group; `count` in each place. Latencies in seconds."""

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
    """Places that hold the same replicas; `count` devices are one place, and there are `times`."""

    device: str
    count: int
    times: int
    usd_per_hour: float
    memory_share: float
    time_share: float
    replicas: tuple[PlacedReplica, ...]


class ServedLoad(Frozen):
    """A model's load and how much of it is carried, in requests per second.

    `next_usd` is what an hour of one request per second more would cost; for "performance", the
    value that it would take from others.
    """

    model: str
    load: float
    carried: float
    next_usd: float


class Alternative(Frozen):
    """The best fleet without one kind of device: its price and its missing load as a share."""

    without: str
    usd_per_hour: float
    missing_share: float


class FleetPlan(Frozen):
    """The answer. `verdict` says why there is none: then there are no groups.

    `least_usd` is a bound on the price: no fleet of the replicas looked at costs less (None for
    "performance"). `binding` says which limits decide. `mfu` and `mbu` are the question's.
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
    assumed: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by model, as a plan's


def make_fleet(question: FleetQuestion) -> FleetPlan:
    """Return the fleet of least cost, or of most performance.

    Raises:
        UsageError: a device is not known, or has no price where one is needed.
        ModelNotFoundError, ModelFormatError: a model cannot be planned.
    """
    return _Choice(question).answer()


class _Choice:
    """The places, the replicas that they may hold, and the packer of one question."""

    def __init__(self, question: FleetQuestion) -> None:
        self._asked = question
        self._names = _unique([one.label for one in question.models])
        self._loads = tuple(one.requests_per_s for one in question.models)
        self._makers = list(_makers(question))
        self._prices = {find_device(name).name: usd for name, usd in question.prices.items()}
        kinds = [find_device(name) for name in question.stock or question.devices]
        kinds = kinds or _for_sale(self._prices)
        self._stock = {find_device(name).name: n for name, n in question.stock.items()}
        self._places = list(self._all_places(kinds, self._stock))
        self._options = self._replicas(self._places)
        self._packer = Packer(self._options)

    def answer(self) -> FleetPlan:
        """Return the fleet."""
        shortfalls = [maker.context_shortfall(self._names[i]) for i, maker in self._makers]
        if any(shortfalls):
            return self._none(" ".join(dict.fromkeys(filter(None, shortfalls))))
        if reasons := [one for index in range(len(self._names)) if (one := self._lack(index))]:
            return self._none(" ".join(reasons))
        demand = self._demand()
        packed = self._packer.pack(demand)
        if demand.must_serve and not packed.carries(demand):
            return self._none(self._refused(demand, packed))
        if not packed.used:
            return self._none(self._buys_nothing())
        others = list(self._alternatives(demand, packed))
        packed = self._packer.pack(demand)  # with the patterns found for the others, too
        bought = sum(pattern.place.count * times for pattern, times in packed.used)
        if not self._stock and bought > _MOST_BOUGHT:
            return self._none(
                f"The load needs {bought:,} devices, and at most {_MOST_BOUGHT:,} are planned: it "
                "is more than any fleet of the table can carry."
            )
        return FleetPlan(
            objective=self._asked.objective,
            mfu=self._asked.mfu,
            mbu=self._asked.mbu,
            usd_per_hour=packed.usd_per_hour,
            least_usd=packed.bound if demand.must_serve else None,
            groups=tuple(self._groups(packed)),
            models=tuple(self._served(demand, packed)),
            binding=tuple(self._binding(demand, packed)),
            alternatives=tuple(others),
            assumed={
                self._names[index]: maker.model.assumed
                for index, maker in self._makers
                if maker.model.assumed
            },
        )

    def _none(self, verdict: str) -> FleetPlan:
        asked = self._asked
        return FleetPlan(asked.objective, asked.mfu, asked.mbu, 0.0, None, (), (), (), (), verdict)

    def _all_places(
        self, kinds: Sequence[Device], stock: Mapping[str, int]
    ) -> Iterator[DeviceGroup]:
        asked = self._asked
        for device in kinds:
            price = self._prices.get(device.name, device.usd_per_hour)
            if price is None and (asked.objective == "cost" or asked.budget is not None):
                reason = f"The table has no price for {device.name}: give one as prices, such as "
                raise UsageError(f"{reason}{{{device.name}: 2.50}}.")
            if device.memory_bytes is None:
                raise UsageError(f"The memory of {device.name} is not known: use a .toml file.")
            for power in range(7):
                count, most = 1 << power, min(stock.get(device.name, 64), asked.most_devices)
                if count > most or (count > 1 and device.link is None):
                    break
                usable = device.memory_bytes * count * asked.memory_share
                yield DeviceGroup(device, count, usable, (price or 0.0) * count, device.name)

    def _replicas(self, places: Sequence[DeviceGroup]) -> list[Option]:
        return [
            (place, [found for _, maker in self._makers for found in maker.on(place)])
            for place in places
        ]

    def _demand(self) -> Demand:
        """Return what is packed; a load that is left costs far more than to carry it, or its value.

        For "performance" the price of places only decides between fleets that serve alike.
        """
        asked, dearest = self._asked, max(place.usd_per_hour for place in self._places) + 1
        if asked.objective == "performance":
            values = tuple(one.value for one in asked.models)
            all_value = sum(v * load for v, load in zip(values, self._loads, strict=True))
            weight = 1e-6 * all_value / dearest
            return Demand(self._loads, values, self._stock, asked.budget, False, weight)  # noqa: FBT003
        best = [0.0] * len(self._loads)
        for _, found in self._options:
            for one in found:
                best[one.model] = max(best[one.model], one.requests_per_s)
        return Demand(
            self._loads, tuple(_FAR * dearest / rate for rate in best), self._stock, asked.budget
        )

    def _lack(self, index: int) -> str:
        """Return why a model can run on no place, how far it is off and what helps."""
        if any(one.model == index for _, found in self._options for one in found):
            return ""
        makers = [maker for owner, maker in self._makers if owner == index]
        lacks = [maker.shortfall(place) for maker in makers for place in self._places]
        if not lacks:
            return f"There is no place for {self._names[index]}."
        order = ("memory", "TTFT", "TPOT")
        nearest = min(lacks, key=lambda one: (-order.index(one.figure), one.times))
        return f"{self._names[index]}: {_told(nearest)}"

    def _refused(self, demand: Demand, packed: PackingResult) -> str:
        """Return how much load stays, and what would carry it."""
        pairs = list(zip(self._names, packed.missing, self._loads, strict=True))
        shares = [f"{name} {lack / load:.0%}" for name, lack, load in pairs if lack > 1e-6 * load]
        shown = ", ".join(shares[:5]) + (", ..." if len(shares) > 5 else "")
        if demand.budget is not None:
            free = self._packer.pack(replace(demand, budget=None))
            times = free.usd_per_hour / demand.budget
            if free.carries(demand):
                return (
                    f"The budget is too small: the cheapest fleet costs {free.usd_per_hour:,.2f} $ "
                    f"an hour, {times:,.2f} times the budget."
                )
        text = f"The devices cannot carry the load; missing in the best packing: {shown}."
        return f"{text} {self._enough(demand)}"

    def _buys_nothing(self) -> str:
        """Return by how much a budget is too small for any replica."""
        least_usd = min(option.usd_per_hour for option, replicas in self._options if replicas)
        times = least_usd / (self._asked.budget or least_usd)
        return (
            f"The budget is too small for any replica: the cheapest place costs {least_usd:,.2f} $ "
            f"an hour, {times:,.2f} times the budget."
        )

    def _enough(self, demand: Demand) -> str:
        """Return what would have to be bought beside the stock."""
        new = [one for one in known_devices().values() if one.memory_bytes and one.usd_per_hour]
        bought = [replace(place, stock="") for place in self._all_places(new, {})]
        owned = [replace(place, usd_per_hour=0.0) for place in self._places]
        options = self._replicas([*owned, *bought])
        more = Packer(options).pack(replace(demand, budget=None), time_limit_s=_ALTERNATIVE_S)
        counts: dict[str, int] = {}
        for pattern, times in more.used:
            if not pattern.place.stock:
                name = pattern.place.device.name
                counts[name] = counts.get(name, 0) + times * pattern.place.count
        shopping = ", ".join(f"{count:,} x {name}" for name, count in counts.items())
        return f"Enough would be {shopping} more, for {more.usd_per_hour:,.2f} $ an hour."

    def _groups(self, packed: PackingResult) -> Iterator[PlacementGroup]:
        ordered = sorted(packed.used, key=lambda one: -one[0].place.usd_per_hour * one[1])
        for pattern, times in ordered:
            place, replicas = pattern.place, pattern.replicas
            yield PlacementGroup(
                device=place.device.name,
                count=place.count,
                times=times,
                usd_per_hour=place.usd_per_hour * times,
                memory_share=sum(one.memory_bytes for one in replicas) / place.memory_bytes,
                time_share=sum(one.share for one in replicas) / UNITS,
                replicas=tuple(self._placed(pattern)),
            )

    def _placed(self, pattern: PlacementPattern) -> Iterator[PlacedReplica]:
        for one in dict.fromkeys(pattern.replicas):
            yield PlacedReplica(
                self._names[one.model],
                one.weights,
                pattern.replicas.count(one),
                one.streams,
                one.share / UNITS,
                one.memory_bytes,
                one.requests_per_s,
                one.ttft_s,
                one.tpot_s,
                one.bound,
            )

    def _served(self, demand: Demand, packed: PackingResult) -> Iterator[ServedLoad]:
        only_decides = 0.0 if demand.must_serve else demand.usd_weight * packed.usd_per_hour
        rows = zip(self._names, self._loads, packed.missing, packed.load_prices, strict=True)
        for name, load, missing, price in rows:
            yield ServedLoad(
                name, load, load - missing, price if price * load > only_decides else 0.0
            )

    def _binding(self, demand: Demand, packed: PackingResult) -> Iterator[str]:
        unit = "save {:,.2f} $ an hour" if demand.must_serve else "add a value of {:,.3g} a second"
        for name, price in packed.stock_prices.items():
            if price > 1e-9:
                yield f"{name}: all are in use; one more would {unit.format(price)}."
        if packed.budget_price > 1e-12:
            yield f"Budget: one $ an hour more would {unit.format(packed.budget_price)}."
        full = [0.0, 0.0, 0.0]
        for pattern, times in packed.used:
            memory = sum(one.memory_bytes for one in pattern.replicas) / pattern.place.memory_bytes
            time = sum(one.share for one in pattern.replicas) / UNITS
            usd = pattern.place.usd_per_hour * times or times
            full = [full[0] + usd * (memory > 0.9), full[1] + usd * (time > 0.95), full[2] + usd]
        if full[2]:
            yield (
                f"Memory is full on {full[0] / full[2]:.0%} of the devices (by price), time on "
                f"{full[1] / full[2]:.0%}."
            )

    def _alternatives(self, demand: Demand, packed: PackingResult) -> Iterator[Alternative]:
        """Yield the best fleet without each of the kinds that cost most."""
        usd: dict[str, float] = {}
        for pattern, times in packed.used:
            name = pattern.place.device.name
            usd[name] = usd.get(name, 0.0) + pattern.place.usd_per_hour * times
        for name in sorted(usd, key=usd.__getitem__, reverse=True)[:_MOST_ALTERNATIVES]:
            other = self._packer.pack(demand, without=name, time_limit_s=_ALTERNATIVE_S)
            lost = sum(m / load for m, load in zip(other.missing, self._loads, strict=True))
            yield Alternative(name, other.usd_per_hour, lost / len(self._loads))


def _makers(question: FleetQuestion) -> Iterator[tuple[int, Replicas]]:
    """Yield for each model and each way to store it what makes its replicas."""
    known: dict[str, PlannedModel] = {}
    device = next(iter(known_devices().values()))
    for index, one in enumerate(question.models):
        try:
            model = known.get(one.model) or planned_model(one.model)
        except TwostrokeError as error:
            raise type(error)(str(error), field=f"models[{index}].model") from None
        known[one.model] = model
        for stored in [model.as_(way) for way in one.formats] or [model]:
            asked = one.question(question.mfu, question.mbu, question.token_budget)
            planner = Planner(stored, device, asked)
            yield index, Replicas(index, planner, one.requests_per_s, question.utilization)


def _for_sale(prices: Mapping[str, float]) -> list[Device]:
    known = known_devices().values()
    return [d for d in known if d.memory_bytes and (d.usd_per_hour or d.name in prices)]


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names, numbered where one occurs several times."""
    return [
        name if names.count(name) == 1 else f"{name} #{names[: i + 1].count(name)}"
        for i, name in enumerate(names)
    ]


def _told(lack: Shortfall) -> str:
    if lack.figure == "memory":
        return (
            "it fits nowhere: one request with the weights takes "
            f"{format_number(lack.value / 1e9)} GB, and {lack.place} offers "
            f"{format_number(lack.limit / 1e9)} GB. Allow more most_devices, or fewer bits "
            "(weights)."
        )
    what = "a shorter prompt or more of it cached" if lack.figure == "TTFT" else "speculation"
    return (
        f"no device meets its objectives: on {lack.place} {lack.figure} is at least "
        f"{format_ms(lack.value)} ms, {lack.times:,.2f} times the objective. Allow more "
        f"most_devices, fewer bits (weights), or {what}."
    )
