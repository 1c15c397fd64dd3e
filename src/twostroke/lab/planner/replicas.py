"""Replicas that a model can have on devices: their memory, share of time, load and latency."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.lab.planner.planner import most_under
from twostroke.lab.planner.question import MOST_UNASKED, context_shortfall
from twostroke.lab.planner.roofline import kv_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.lab.planner.devices import Device
    from twostroke.lab.planner.models import PlannedModel
    from twostroke.lab.planner.planner import Planner

UNITS: Final = 24  # into which the time of a place is divided
_SHARES: Final = (24, 20, 16, 12, 10, 8, 6, 5, 4, 3, 2, 1)  # of a replica
_STREAMS: Final = sorted({round(2 ** (power / 8)) for power in range(97)})  # up to 4,096
_LEAST_GAIN: Final = 1.02  # in requests per second, for which more streams are worth their memory


class DeviceGroup(Frozen):
    """Devices of one kind that work as one; replicas on them share their memory and time.

    `memory_bytes` is what replicas may use, None if it is not known. `usd_per_hour` is for all of
    them. Of `stock` (a name) only so many are there.
    """

    device: Device
    count: int
    memory_bytes: float
    usd_per_hour: float
    stock: str

    @property
    def name(self) -> str:
        """A readable name."""
        return f"{self.count} x {self.device.name}" if self.count > 1 else self.device.name


class PlannedReplica(Frozen):
    """A model on a share of a place's memory and time.

    `model` is its index. `requests_per_s` is the load that it may be given, at most that of the
    model. Latencies hold while all other replicas of the place use their shares, too. TPOT includes
    the prefill of other requests; TTFT waits for none. `bound` says why there are no more streams.
    """

    model: int
    weights: str
    streams: int
    share: int
    memory_bytes: float
    requests_per_s: float
    ttft_s: float
    tpot_s: float
    bound: str


class Shortfall(Frozen):
    """How far a model is from running on a place: the `figure` has `value`, and must be `limit`."""

    place: str
    figure: str
    value: float
    limit: float

    @property
    def times(self) -> float:
        """The value as a multiple of the limit."""
        return self.value / self.limit


class Replicas:
    """The replicas of one model, stored in one way, on any place."""

    def __init__(self, index: int, planner: Planner, load: float, utilization: float) -> None:
        """`load` is in requests per second; a replica is busy for `utilization` of its time."""
        self._index, self._planner = index, planner
        self._load, self._utilization = load, utilization
        self._request_bytes: dict[int, float] = {}  # by devices of a place

    @property
    def model(self) -> PlannedModel:
        """The model."""
        return self._planner.model

    def context_shortfall(self, name: str) -> str:
        """Explain that the context of the model, called `name`, is too short; empty if not."""
        context_length = self.model.program.context_length
        return context_shortfall(name, context_length, self._planner.question)

    def on(self, place: DeviceGroup) -> list[PlannedReplica]:
        """Return the replicas that a place can hold and that meet the objectives."""
        one, weights = self._on(place), self._planner.model.all_bytes
        request = self._bytes(place.count)
        fitting = int((place.memory_bytes - weights) // request)
        if fitting < 1:
            return []
        found: list[PlannedReplica] = []
        for units in _SHARES:
            share = units / UNITS
            for streams, bound in self._counts(one, share, fitting):
                found.append(
                    PlannedReplica(
                        self._index,
                        self._planner.model.stored,
                        streams,
                        units,
                        weights + streams * request,
                        min(share * self._utilization / one.request_s(streams), self._load),
                        one.ttft_s(streams) / share,
                        one.tpot_s(streams) / share,
                        bound,
                    )
                )
        return found

    def shortfall(self, place: DeviceGroup) -> Shortfall:
        """Return why a place holds no replica."""
        one, asked = self._on(place), self._planner.question
        needed = self._planner.model.all_bytes + self._bytes(place.count)
        if needed > place.memory_bytes:
            return Shortfall(place.name, "memory", needed, place.memory_bytes)
        first_s = one.ttft_s(1)
        if asked.ttft_s is not None and first_s > asked.ttft_s:
            return Shortfall(place.name, "TTFT", first_s, asked.ttft_s)
        return Shortfall(place.name, "TPOT", one.tpot_s(1), asked.tpot_s or 0)

    def _counts(self, one: Planner, share: float, fitting: int) -> Iterator[tuple[int, str]]:
        """Yield numbers of streams that are worth their memory, and what bounds the largest."""
        room, bound = self._room(fitting)
        counts = [count for count in _STREAMS if count < room] + [room]
        asked, whole = self._planner.question, len(counts)
        at_tpot = most_under(asked.tpot_s, lambda n: one.tpot_s(counts[n - 1]) / share, whole)
        most = most_under(asked.ttft_s, lambda n: one.ttft_s(counts[n - 1]) / share, at_tpot)
        if most < whole:
            bound = "TTFT" if most < at_tpot else "TPOT"
        found, rate = list[int](), 0.0
        for index, streams in enumerate(counts[:most], 1):
            if streams & (streams - 1) and index < most:
                continue  # powers of two, and the most
            more = share * self._utilization / one.request_s(streams)
            if more >= rate * _LEAST_GAIN:
                found.append(streams)
                rate = more
            if rate >= self._load:
                bound = "load"
                break
        if found and bound != "load" and found[-1] < counts[most - 1]:
            bound = "no gain"
        for streams in found:
            yield streams, bound if streams == found[-1] else "its share"

    def _room(self, fitting: int) -> tuple[int, str]:
        """Return the most streams that are looked at, and why: as a plan's."""
        asked = self._planner.question
        unasked = _STREAMS[-1] if asked.tpot_s is not None else MOST_UNASKED
        limits = (
            (fitting, "memory"),
            (asked.most_decoding or fitting, "prompts"),
            (unasked, "the default"),
        )
        return min(limits, key=lambda one: one[0])

    def _on(self, place: DeviceGroup) -> Planner:
        return self._planner.on(place.device, place.count)

    def _bytes(self, count: int) -> float:
        """Return those of a request on so many devices."""
        if count not in self._request_bytes:
            asked = replace(self._planner.question, count=count)
            num_tokens = asked.prompt + asked.output
            self._request_bytes[count] = kv_bytes(self._planner.model, asked, num_tokens)
        return self._request_bytes[count]
