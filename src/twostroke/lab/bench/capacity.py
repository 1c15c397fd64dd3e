"""Searches for the goodput capacity: the highest rate at which enough requests meet objectives."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec.structs import replace

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    # Measures a rate in requests per second; None sends one request at a time.
    MeasureRate = Callable[[float | None], Awaitable["LoadPoint"]]

DEFAULT_GOOD_SHARE: Final = 0.9
MAX_RATE_RATIO: Final = 1.05  # the search ends when two rates differ by less
_MAX_HALVINGS: Final = 6
_MAX_DOUBLINGS: Final = 20
_NUM_BLOCKS: Final = 20  # of consecutive requests, for the interval of a share
_MIN_BLOCK: Final = 5  # requests
_INTERVAL_WIDTH: Final = 1.96  # standard deviations of a 95% interval

# Why a search ended.
CAPACITY_FOUND, OBJECTIVES_MISSED, CLIENT_LIMITED, TOO_FEW_REQUESTS, INTERRUPTED = (
    "found",
    "objectives missed",
    "client limited",
    "too few requests",
    "interrupted",
)


class ShareEstimate(Frozen):
    """The share of requests that met the objectives, with its 95% interval."""

    value: float
    low: float
    high: float


class LoadPoint(Frozen):
    """The figures of one load of a search.

    Attributes:
        rate: scheduled requests per second; None for a closed loop.
        num_clients: clients of a closed loop; None for an open loop.
        num_requests: requests that were planned.
        mean_e2e_s: mean time of a completed request; infinite if none completed.
        good: the share of requests that met the objectives, with its interval; None without
            objectives.
        is_growing: whether more requests arrived than ended.
        is_client_limited: whether the client used up its core, or requests missed the objectives
            because of the client.
    """

    rate: float | None
    num_clients: int | None
    num_requests: int
    mean_e2e_s: float
    good: ShareEstimate | None = None
    is_growing: bool = False
    is_client_limited: bool = False

    def meets(self, share: float) -> bool:
        """Whether at least `share` of the requests met the objectives, and no queue grew."""
        return self.good is not None and self.good.value >= share and not self.is_growing

    def surely_meets(self, share: float) -> bool:
        """Whether the load meets the objectives by more than chance."""
        return self.meets(share) and self.good is not None and self.good.low >= share

    def surely_misses(self, share: float) -> bool:
        """Whether the load misses the objectives by more than chance, or a queue grew."""
        return self.is_growing or (self.good is not None and self.good.high < share)


class GoodputCapacity(Frozen):
    """The result of a search for the goodput capacity.

    Attributes:
        rate: the highest measured rate at which enough requests met the objectives; None if there
            is none.
        low, high: the interval of the capacity: the highest rate that met the objectives by more
            than chance, and the lowest rate that missed them by more than chance. Without such a
            rate, `low` is 0 and `high` is None.
        share: the share of requests that must meet the objectives.
        end: why the search ended, such as `CAPACITY_FOUND`.
    """

    rate: float | None
    low: float
    high: float | None
    share: float
    end: str

    @property
    def is_known(self) -> bool:
        """Whether the search found the capacity, and not only a bound of it."""
        return self.end == CAPACITY_FOUND


class SearchInterruptedError(Exception):
    """The user ended the search."""


class CapacitySearch:
    """A search for the capacity, by doubling and bisection of the rate.

    Attributes:
        points: the loads measured so far.
    """

    def __init__(self, measure: MeasureRate, share: float) -> None:
        """Search by calling `measure` with rates; `share` of requests must meet the objectives.

        `measure(rate)` runs a load of `rate` requests per second; with None, a closed loop of one
        client.
        """
        self._measure_rate = measure
        self._share = share
        self._alone: LoadPoint | None = None  # one request at a time
        self.points: list[LoadPoint] = []

    async def run(self, start_rate: float | None = None) -> GoodputCapacity:
        """Return the highest request rate that meets the objectives.

        First a closed loop with one request at a time is measured. Then rates are measured, in
        requests per second, from `start_rate` on; the default is 1 / (mean seconds of a request).
        The rate is doubled or halved until one rate meets the objectives and another does not, and
        the interval between them is bisected.
        """
        try:
            return self.result(await self._search(start_rate))
        except SearchInterruptedError:
            return self.result(INTERRUPTED)

    async def _search(self, start_rate: float | None) -> str:
        """Measure rates until the capacity is known; return why the search ended."""
        self._alone = await self._measure(None)
        if not self._meets(self._alone):
            return OBJECTIVES_MISSED
        point = await self._measure(start_rate or 1 / self._alone.mean_e2e_s)
        if self._meets(point):
            end = await self._raise_rate(point)
        else:
            end = await self._lower_rate(point)
        return end or await self._bisect()

    async def _raise_rate(self, point: LoadPoint) -> str:
        """Double the rate until a load misses the objectives; if that fails, return why."""
        assert self._alone is not None
        for _ in range(_MAX_DOUBLINGS):
            rate = 2 * (point.rate or 0.0)
            if point.num_requests / rate < self._alone.mean_e2e_s:
                return TOO_FEW_REQUESTS
            point = await self._measure(rate)
            if not self._meets(point):
                return CLIENT_LIMITED if point.is_client_limited else ""
        return TOO_FEW_REQUESTS

    async def _lower_rate(self, point: LoadPoint) -> str:
        """Halve the rate until a load meets the objectives; if that fails, return why."""
        for _ in range(_MAX_HALVINGS):
            point = await self._measure((point.rate or 0.0) / 2)
            if self._meets(point):
                return ""
        return CLIENT_LIMITED if point.is_client_limited else OBJECTIVES_MISSED

    async def _bisect(self) -> str:
        low, high = self._bracket()
        while high / low > MAX_RATE_RATIO:
            point = await self._measure(math.sqrt(low * high))
            if not self._meets(point) and point.is_client_limited:
                return CLIENT_LIMITED
            low, high = self._bracket()
        return CAPACITY_FOUND

    def _bracket(self) -> tuple[float, float]:
        """Return (the highest good rate below the lowest bad rate, the lowest bad rate).

        A good rate meets the objectives, a bad rate misses them.
        """
        rates = [(point.rate, self._meets(point)) for point in self.points if point.rate]
        high = min((rate for rate, meets in rates if not meets), default=math.inf)
        low = max((rate for rate, meets in rates if meets and rate < high), default=0.0)
        return low, high

    async def _measure(self, rate: float | None) -> LoadPoint:
        # The mean rate of random arrivals can differ a little from the wanted rate.
        point = replace(await self._measure_rate(rate), rate=rate)
        self.points.append(point)
        return point

    def _meets(self, point: LoadPoint) -> bool:
        return point.meets(self._share)

    def result(self, end: str) -> GoodputCapacity:
        """Return the capacity that the points so far show; `end` is why the search ended."""
        rated = [point for point in self.points if point.rate is not None]
        rate, _ = self._bracket()
        surely_good = [p.rate or 0.0 for p in rated if p.surely_meets(self._share)]
        surely_bad = [
            point.rate or 0.0
            for point in rated
            if point.surely_misses(self._share) and not point.is_client_limited
        ]
        high = min((at for at in surely_bad if at > rate), default=None)
        low = max((at for at in surely_good if at <= rate), default=0.0)
        return GoodputCapacity(rate=rate or None, low=low, high=high, share=self._share, end=end)


def estimate_share(are_good: Sequence[bool]) -> ShareEstimate:
    """Return the share of good requests, with its interval.

    `are_good` is in the order of arrival. The interval is Wilson's. Requests that wait in the same
    queue succeed or fail together. If the shares of consecutive blocks of requests therefore differ
    by more than chance, the interval is as wide as with fewer requests.
    """
    values = np.asarray(are_good, np.float64)
    share, count = float(values.mean()), float(len(values))
    size = len(values) // _NUM_BLOCKS
    if size >= _MIN_BLOCK and 0 < share < 1:
        blocks = values[: size * _NUM_BLOCKS].reshape(_NUM_BLOCKS, size).mean(axis=1)
        count /= max(1.0, float(blocks.var(ddof=1)) * size / (share * (1 - share)))
    square = _INTERVAL_WIDTH**2 / count
    middle = (share + square / 2) / (1 + square)
    half = (
        _INTERVAL_WIDTH
        / (1 + square)
        * math.sqrt(share * (1 - share) / count + square / (4 * count))
    )
    return ShareEstimate(share, max(0.0, middle - half), min(1.0, middle + half))
