"""Decides where requests go, and keeps the accounts that the decisions are made from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.fleet.routing.hash_ring import HashRing
from twostroke.fleet.routing.policy import LOOKS_AT_PREFIXES, POLICIES, RoutingState, mix
from twostroke.fleet.routing.prefix_tree import PrefixTree, TreeEdge

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import numpy.typing as npt

    from twostroke.fleet.routing.prefix_tree import CachedPrefix, Path

MAX_BLOCKS: Final = 1_000_000
_KEPT: Final = 0.95  # of the sums of a pace, at each first token
_FIRST_PACE_S: Final = 1e-6  # for a unit, until something was measured
_PRIOR: Final = 20_000  # units of the fleet's mean pace that each replica's begins with
_OVERHEAD: Final = 2000  # units that the rest of a first token counts as
_TIE_S: Final = 1e-9  # for each request: less than waits differ
_RISE: Final = 1.02  # of a pace, with each whole answer that is slower
_WRITING: Final = 32  # units that a request counts as, as long as its answer is written
_LATE: Final = 0.5  # of the work that should be done by now and is not


class RoutingKey(Frozen):
    """What counts of a prompt: the keys of its blocks, its units, and the hash of its homes.

    A unit is a byte of the prompt's text.
    """

    keys: tuple[int, ...]
    num_units: int
    affinity: int


class RoutedRequest:
    """A request at a replica. `hit` units of its prompt should be there, `best` are anywhere."""

    __slots__ = ("at_s", "best", "has_begun", "hit", "is_over", "missing", "place", "stay",
                 "units_ahead")  # fmt: skip

    def __init__(self, place: int, at_s: float, hit: int, best: int, missing: int) -> None:
        """Begin."""
        self.place, self.at_s, self.hit, self.best, self.missing = place, at_s, hit, best, missing
        self.units_ahead = 0.0
        self.stay: CachedPrefix | None = None
        self.has_begun = self.is_over = False


class Dispatcher:
    """Counts, for each replica, the work that was sent there and has not brought a first token.

    Work is counted in seconds: units that a replica must compute, times its pace, which follows
    from the times of first tokens. `clock` returns seconds. It belongs to one thread.
    """

    def __init__(
        self,
        policy: str,
        clock: Callable[[], float],
        extent: Callable[[int], int],
        most_blocks: int = MAX_BLOCKS,
    ) -> None:
        """Decide by the policy of this name, a key of `POLICIES`.

        `extent` returns the units of a prompt's first blocks, from their number.
        """
        self.known = PrefixTree(most_blocks)
        self.pace_s: list[float] = []  # of a unit, by place
        self.num_units = self.num_hit = self.num_best = 0  # of all prompts
        self._decide, self._looks = POLICIES[policy], policy in LOOKS_AT_PREFIXES
        self._clock, self._extent = clock, extent
        self._number = 0
        self._sums: list[tuple[float, float]] = []  # seconds and units, of each pace
        self._all = (0.0, 0.0)  # of the fleet's
        self._mean_pace_s = _FIRST_PACE_S
        self._knows_first = False  # paces are of first tokens, not of whole answers
        self._free_at_s = np.zeros(0)  # when the work that was sent should be done
        self._pending: list[float] = []  # units without a first token
        self._least_s = np.zeros(0)  # of a wait; inf where no request may go
        self._num_open = np.zeros(0)
        self._is_open: list[bool] = []
        self._ring = HashRing()

    def __len__(self) -> int:
        return len(self.pace_s)

    def join(self, name: str, place: int | None = None) -> int:
        """Take in a replica, shut at first; return its place, `place` if one is free again."""
        if place is None:
            place = len(self.pace_s)
            self.pace_s.append(self._mean_pace_s)
            self._sums.append((0.0, 0.0))
            self._pending.append(0.0)
            self._is_open.append(False)
            for field in ("_free_at_s", "_least_s", "_num_open"):
                setattr(self, field, np.append(getattr(self, field), 0.0))
        salt = 0
        for byte in name.encode():
            salt = mix(salt ^ byte)
        self._ring.join(place, salt)
        self._is_open[place] = False
        self.restart(place)
        return place

    def restart(self, place: int) -> None:
        """Note that a replica holds nothing, and computes nothing, of what was sent before."""
        self.known.begin_epoch(place)
        self._free_at_s[place] = 0.0
        self._expect(place, 0.0)

    def open(self, place: int, *, is_open: bool) -> None:
        """Let a replica have new requests, or no more."""
        self._is_open[place] = is_open
        self._expect(place, self._pending[place])

    def report(self, place: int, work_s: float, horizon_s: float | None) -> None:
        """Take in what a replica says: its queue, and the age of what it evicted last."""
        now_s = self._clock()
        self._free_at_s[place] = max(self._free_at_s[place], now_s + work_s)
        if horizon_s is not None:
            self.known.cut(place, now_s - horizon_s)

    def wait_s(self, place: int) -> float:
        """Return how long a new request would wait at a replica."""
        return max(self._free_at_s.item(place) - self._clock(), self._late_s(place))

    def num_open(self, place: int) -> int:
        """Return how many requests a replica has that have not ended."""
        return int(self._num_open[place])

    def decide(
        self,
        asked: RoutingKey,
        among: npt.NDArray[np.bool_] | None = None,
        tried: Collection[int] = (),
    ) -> RoutedRequest | None:
        """Choose a replica for a request and charge it; None if none is open.

        `among` says by place which replicas suit it, `tried` are those that have failed.
        """
        now_s = self._clock()
        wait_s = self._waits_s(now_s)
        if among is not None:
            wait_s[~among] = np.inf
        for place in tried:
            wait_s[place] = np.inf
        nearest = int(wait_s.argmin())
        if wait_s.item(nearest) == math.inf:
            return None
        longest, held, path = 0, dict[int, int](), list[tuple[TreeEdge, int]]()
        if self._looks:
            path = self.known.find(asked.keys)
            longest, held = self._candidates(path, asked.affinity, wait_s, nearest)
        extent, total, pace_s = self._extent, asked.num_units, self.pace_s
        missing_s = {
            place: (total - extent(num) + _WRITING * self._num_open.item(place)) * pace_s[place]
            for place, num in held.items()
        }
        place = self._decide(RoutingState(self._number, wait_s, self._num_open, missing_s))
        hit = extent(held.get(place, 0))
        ticket = RoutedRequest(place, now_s, hit, extent(longest), total - hit)
        self._number += 1
        self._charge(asked, ticket)
        if self._looks:
            ticket.stay = self.known.add(asked.keys, path, place)
        return ticket

    def _candidates(
        self, path: Path, affinity: int, wait_s: npt.NDArray[np.float64], nearest: int
    ) -> tuple[int, dict[int, int]]:
        """Return the blocks of the longest known prefix, and those that each candidate holds."""
        longest, holders = self.known.longest(path)
        held = {place: longest for place in holders if wait_s.item(place) != math.inf}
        for place in (*self._ring.homes(affinity, wait_s), nearest):  # of equals the first
            if place not in held:
                held[place] = self.known.num_held(path, place)
        return longest, held

    def _charge(self, asked: RoutingKey, ticket: RoutedRequest) -> None:
        place = ticket.place
        ticket.units_ahead = self._pending[place]
        begin_s = max(ticket.at_s, self._free_at_s.item(place))
        self._free_at_s[place] = begin_s + ticket.missing * self.pace_s[place]
        self._num_open[place] += 1
        self._expect(place, ticket.units_ahead + ticket.missing)
        self.num_units += asked.num_units
        self.num_hit += ticket.hit
        self.num_best += ticket.best

    def begin(self, ticket: RoutedRequest, *, is_whole: bool = False) -> None:
        """Note the first token of a request, from which its replica's pace is learned.

        An answer that `is_whole` took longer, for its other tokens. It counts only as long as no
        first token is known, and then the fastest answers do.
        """
        if ticket.has_begun or ticket.is_over:
            return
        now_s, is_first = self._clock(), not is_whole and not self._knows_first
        knew_whole = self._all[1] > 0
        if is_first:
            self._all, self._sums, self._knows_first = (0.0, 0.0), [(0.0, 0.0)] * len(self), True
        if not is_whole:
            self._learn(ticket, now_s - ticket.at_s)
        elif not self._knows_first:
            self._learn_whole(ticket, now_s - ticket.at_s)
        if is_first and knew_whole:  # as the paces of the other replicas are
            self.pace_s = [self._mean_pace_s] * len(self)
        self._settle(ticket, now_s)

    def _learn(self, ticket: RoutedRequest, took_s: float) -> None:
        place = ticket.place
        count = ticket.units_ahead + ticket.missing + _OVERHEAD
        seconds, units = self._all = self._all[0] * _KEPT + took_s, self._all[1] * _KEPT + count
        mean_s = self._mean_pace_s = seconds / units
        own_s, own = self._sums[place]
        own_s, own = self._sums[place] = own_s * _KEPT + took_s, own * _KEPT + count
        self.pace_s[place] = (own_s + mean_s * _PRIOR) / (own + _PRIOR)

    def _learn_whole(self, ticket: RoutedRequest, took_s: float) -> None:
        """Follow the fastest answers of a replica, whose other tokens took the least time."""
        own_s, own = self._sums[ticket.place]
        pace_s = took_s / (ticket.units_ahead + ticket.missing + _OVERHEAD)
        pace_s = min(pace_s, _RISE * own_s / own) if own else pace_s
        self._sums[ticket.place] = pace_s, 1.0
        paces = [seconds for seconds, count in self._sums if count]
        mean_s = self._mean_pace_s = sum(paces) / len(paces)
        self._all = mean_s, 1.0
        self.pace_s = [seconds if count else mean_s for seconds, count in self._sums]

    def end(self, ticket: RoutedRequest) -> None:
        """Note the end of a request, whether it was answered or not."""
        if ticket.is_over:
            return
        if not ticket.has_begun:
            self._settle(ticket, self._clock())
        ticket.is_over = True
        if ticket.stay is not None:
            ticket.stay.used_s = self._clock()
        self._num_open[ticket.place] -= 1
        self._expect(ticket.place, self._pending[ticket.place])

    def _settle(self, ticket: RoutedRequest, now_s: float) -> None:
        """Take a request's work from what is pending."""
        ticket.has_begun = True
        place, pace_s = ticket.place, self.pace_s[ticket.place]
        left = max(0.0, self._pending[place] - ticket.missing)
        self._free_at_s[place] = now_s + left * pace_s
        self._expect(place, left)

    def _expect(self, place: int, pending: float) -> None:
        """Note the units of a replica that have not brought a first token."""
        self._pending[place] = pending
        least_s = self._late_s(place) + _TIE_S * self._num_open.item(place)
        self._least_s[place] = least_s if self._is_open[place] else math.inf

    def _late_s(self, place: int) -> float:
        return _LATE * self._pending[place] * self.pace_s[place]

    def _waits_s(self, now_s: float) -> npt.NDArray[np.float64]:
        waits: npt.NDArray[np.float64] = self._free_at_s - now_s
        np.maximum(waits, self._least_s, out=waits)
        return waits
