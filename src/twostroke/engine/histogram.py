"""Distributions in a fixed number of buckets, and their percentiles."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_DECADE: Final = (
    *("1", "1.1", "1.25", "1.4", "1.6", "1.8", "2", "2.25", "2.5", "2.8"),
    *("3.2", "3.6", "4", "4.5", "5", "5.6", "6.3", "7.1", "8", "9"),
)

# From 10 microseconds to hours, twenty to a decade: percentiles have an error of at most 6%.
TIME_BOUNDS_S: Final = tuple(float(f"{step}e{power}") for power in range(-5, 4) for step in _DECADE)
ROW_BOUNDS: Final = tuple(float(2**power) for power in range(15))


BOUNDS: Final = {"seconds": TIME_BOUNDS_S, "rows": ROW_BOUNDS}


class Distribution(Frozen):
    """`counts[i]` values are at most `bounds[i]` and above the previous bound; the last are above.

    `sum` is the sum of all values, `unit` a name in `BOUNDS`.
    """

    unit: str
    counts: tuple[int, ...]
    sum: float

    @property
    def bounds(self) -> tuple[float, ...]:
        """The upper bounds of all buckets but the last."""
        return BOUNDS[self.unit]

    def __sub__(self, earlier: Distribution) -> Distribution:
        """Return what was counted since `earlier`."""
        pairs = zip(self.counts, earlier.counts, strict=True)
        counts = tuple([late - early for late, early in pairs])
        return Distribution(self.unit, counts, self.sum - earlier.sum)

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """The mean; None without values."""
        count = self.count
        return self.sum / count if count else None

    def percentile(self, share: float) -> float | None:
        """Return about the value that `share` of all values are below; None without values.

        Values are assumed to lie evenly within a bucket.
        """
        below = list(accumulate(self.counts))
        if not below[-1]:
            return None
        rank = share * below[-1]
        place = bisect_left(below, rank) if rank else bisect_right(below, 0)
        before = below[place - 1] if place else 0
        low = self.bounds[place - 1] if place else 0.0
        high = self.bounds[min(place, len(self.bounds) - 1)]
        return low + (high - low) * (rank - before) / self.counts[place]

    def cumulative(self, bounds: Sequence[float]) -> Iterator[tuple[float, int]]:
        """Yield how many values are at most each of `bounds`, a part of the distribution's own."""
        below = list(accumulate(self.counts))
        for bound in bounds:
            yield bound, below[bisect_left(self.bounds, bound)]


class Histogram:
    """Counts values into buckets. Not thread-safe."""

    __slots__ = ("_bounds", "_counts", "_read", "_sum", "_unit")

    def __init__(self, unit: str = "seconds") -> None:
        """Have a bucket up to each of the unit's `BOUNDS`, and one above."""
        self._unit, self._bounds = unit, BOUNDS[unit]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._read: Distribution | None = None

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count
        self._read = None

    def read(self) -> Distribution:
        """Return the counts so far: the same ones again if nothing was counted since."""
        if self._read is None:
            self._read = Distribution(self._unit, tuple(self._counts), self._sum)
        return self._read
