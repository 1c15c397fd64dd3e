"""Possible replicas of a model on a group of devices: memory, share of time, load, latency."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import field
from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.lab.planner.planner import max_within_limit
from twostroke.lab.planner.question import DEFAULT_MAX_STREAMS, context_shortfall
from twostroke.lab.planner.roofline import request_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.lab.planner.devices import Device
    from twostroke.lab.planner.models import PlannedModel
    from twostroke.lab.planner.planner import Planner

TIME_UNITS: Final = 24  # the time of a device group is divided into these units
_TIME_SHARES: Final = (24, 20, 16, 12, 10, 8, 6, 5, 4, 3, 2, 1)  # of a replica, in time units
_STREAM_COUNTS: Final = sorted({round(2 ** (power / 8)) for power in range(97)})  # 1 to 4,096
_MIN_RATE_RATIO: Final = 1.02  # more streams must raise requests per second by at least 2%


class DeviceGroup(Frozen):
    """Devices of one kind that divide each layer of the models on them (tensor parallelism).

    Replicas on a group share memory and time. `memory_bytes` is the memory that replicas may use,
    and `usd_per_hour` the price, of all devices together. `stock` names the limited supply that the
    devices come from.
    """

    device: Device
    count: int
    memory_bytes: float
    usd_per_hour: float
    stock: str

    @property
    def name(self) -> str:
        """A name of the device group for people, such as "2 x L4"."""
        return f"{self.count} x {self.device.name}" if self.count > 1 else self.device.name


class PlannedReplica(Frozen):
    """A replica of a model that has a share of a device group's memory and time.

    Attributes:
        model: index of the model in the fleet.
        weights: format of its weights.
        streams: most requests that run at the same time.
        time_units: share of the group's time, in units of 1 / `TIME_UNITS`.
        memory_bytes: weights, keys and values.
        requests_per_s: the load that it may be given, at most the model's whole load.
        ttft_s: time to first token without waiting, while other replicas use their shares.
        tpot_s: time per output token, with the prefill of other requests.
        bound: what limits `streams`: "memory", "prompts", "TTFT", "TPOT", "load", "no gain",
            "its share" or "the default".
    """

    model: int
    weights: str
    streams: int
    time_units: int = field(name="share")
    memory_bytes: float
    requests_per_s: float
    ttft_s: float
    tpot_s: float
    bound: str


class Shortfall(Frozen):
    """Why a model cannot run on a device group: a figure exceeds its limit.

    `figure` is "memory" (in bytes), "TTFT" or "TPOT" (in seconds); its `value` is above the
    `limit`.
    """

    group: str
    figure: str
    value: float
    limit: float

    @property
    def times(self) -> float:
        """The figure divided by its limit, such as 1.5 if the model needs half as much again."""
        return self.value / self.limit


class Replicas:
    """Finds the replicas of one model, in one weight format, that fit on a device group."""

    def __init__(self, index: int, planner: Planner, load: float, utilization: float) -> None:
        """Find replicas of the model with this index in the fleet.

        `planner` plans one replica on one device. `load` is the model's load in requests per
        second. A replica is busy for `utilization` of its time.
        """
        self._index = index
        self._planner = planner
        self._load = load
        self._utilization = utilization
        self._request_bytes: dict[int, float] = {}  # by number of devices

    @property
    def model(self) -> PlannedModel:
        """The model whose replicas are found."""
        return self._planner.model

    def context_shortfall(self, name: str) -> str:
        """Explain that the model's context is too short for the requests; "" if it is not.

        `name` is the model's name in the text.
        """
        context_length = self.model.program.context_length
        return context_shortfall(name, context_length, self._planner.question)

    def on_group(self, group: DeviceGroup) -> list[PlannedReplica]:
        """Return the replicas that fit on a device group and meet the latency objectives."""
        planner = self._planner_on(group)
        weight_bytes = self._planner.model.all_bytes
        request_bytes = self._bytes_per_request(group.count)
        num_fitting = int((group.memory_bytes - weight_bytes) // request_bytes)
        if num_fitting < 1:
            return []
        replicas: list[PlannedReplica] = []
        for units in _TIME_SHARES:
            share = units / TIME_UNITS
            for streams, bound in self._stream_counts(planner, share, num_fitting):
                rate = share * self._utilization / planner.request_s(streams)
                replicas.append(
                    PlannedReplica(
                        model=self._index,
                        weights=self._planner.model.stored,
                        streams=streams,
                        time_units=units,
                        memory_bytes=weight_bytes + streams * request_bytes,
                        requests_per_s=min(rate, self._load),
                        ttft_s=planner.ttft_s(streams) / share,
                        tpot_s=planner.tpot_s(streams) / share,
                        bound=bound,
                    )
                )
        return replicas

    def shortfall(self, group: DeviceGroup) -> Shortfall:
        """Return why the model cannot run on a device group: the figure that exceeds its limit."""
        planner = self._planner_on(group)
        question = self._planner.question
        needed = self._planner.model.all_bytes + self._bytes_per_request(group.count)
        if needed > group.memory_bytes:
            return Shortfall(group.name, "memory", value=needed, limit=group.memory_bytes)
        ttft_s = planner.ttft_s(1)
        if question.ttft_s is not None and ttft_s > question.ttft_s:
            return Shortfall(group.name, "TTFT", value=ttft_s, limit=question.ttft_s)
        return Shortfall(group.name, "TPOT", value=planner.tpot_s(1), limit=question.tpot_s or 0)

    def _stream_counts(
        self, planner: Planner, share: float, num_fitting: int
    ) -> Iterator[tuple[int, str]]:
        """Yield useful numbers of streams for a replica, each with the limit that it reaches.

        A number is useful if it serves more requests than smaller numbers. `share` is the replica's
        share of the device group's time, and `num_fitting` the number of requests that fit into its
        memory. Limits are values of `PlannedReplica.bound`.
        """
        limit, bound = self._limit(num_fitting)
        counts = [count for count in _STREAM_COUNTS if count < limit] + [limit]
        question = self._planner.question
        num_for_tpot = max_within_limit(
            question.tpot_s, lambda n: planner.tpot_s(counts[n - 1]) / share, len(counts)
        )
        num_counts = max_within_limit(
            question.ttft_s, lambda n: planner.ttft_s(counts[n - 1]) / share, num_for_tpot
        )
        if num_counts < len(counts):
            bound = "TTFT" if num_counts < num_for_tpot else "TPOT"
        useful: list[int] = []
        rate = 0.0
        for index, streams in enumerate(counts[:num_counts], 1):
            is_power_of_two = streams & (streams - 1) == 0
            if not is_power_of_two and index < num_counts:
                continue
            new_rate = share * self._utilization / planner.request_s(streams)
            if new_rate >= rate * _MIN_RATE_RATIO:
                useful.append(streams)
                rate = new_rate
            if rate >= self._load:
                bound = "load"
                break
        if useful and bound != "load" and useful[-1] < counts[num_counts - 1]:
            bound = "no gain"
        for streams in useful:
            yield streams, bound if streams == useful[-1] else "its share"

    def _limit(self, num_fitting: int) -> tuple[int, str]:
        """Return the maximum number of streams to consider for a replica, and what limits it."""
        question = self._planner.question
        default = _STREAM_COUNTS[-1] if question.tpot_s is not None else DEFAULT_MAX_STREAMS
        limits = (
            (num_fitting, "memory"),
            (question.max_decoding_streams or num_fitting, "prompts"),
            (default, "the default"),
        )
        return min(limits, key=lambda limit: limit[0])

    def _planner_on(self, group: DeviceGroup) -> Planner:
        return self._planner.on_devices(group.device, group.count)

    def _bytes_per_request(self, count: int) -> float:
        """Return the bytes of a request's KV cache and states, on `count` devices together."""
        if count not in self._request_bytes:
            question = replace(self._planner.question, count=count)
            num_tokens = question.prompt + question.output
            model = self._planner.model
            self._request_bytes[count] = request_bytes(model, question, num_tokens)
        return self._request_bytes[count]
