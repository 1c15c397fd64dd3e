"""Dispatches requests to replicas, and estimates the pending work of each replica."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.fleet.routing.hash_ring import HashRing
from twostroke.fleet.routing.policy import POLICIES, PREFIX_POLICIES, RoutingState, mix
from twostroke.fleet.routing.prefix_tree import PrefixTree, TreeEdge

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import numpy.typing as npt

    from twostroke.fleet.routing.prefix_tree import CachedPrefix, Path

MAX_BLOCKS: Final = 1_000_000  # of the prefix tree
_SUM_DECAY: Final = 0.95  # of the sums of seconds and units, at each first token
_DEFAULT_UNIT_S: Final = 1e-6  # seconds per unit without measurements
_PRIOR_UNITS: Final = 20_000  # weight of the fleet's mean in the average of a replica
_OVERHEAD_UNITS: Final = 2000  # for the part of a first token that does not depend on the prompt
_TIE_BREAK_S: Final = 1e-9  # for each open request, much less than waits differ
_MAX_SLOWDOWN: Final = 1.02  # of a replica's seconds per unit, with each slower whole answer
_DECODE_UNITS: Final = 32  # by which each running request slows down a prefill
_MAX_OVERDUE_WORK_RATIO: Final = 0.5  # of pending work that counts though it should be done


class RoutingKey(Frozen):
    """The facts about a request from which a dispatcher chooses the replica.

    A unit of the prompt is a byte of its text.

    Attributes:
        block_keys: a hash for each block of the prompt (512 or 2048 bytes), by which the prefix
            tree finds the prompt.
        num_units: the length of the prompt in units.
        affinity: a 64-bit hash, by which prompts that are in no replica's cache are spread.
    """

    block_keys: tuple[int, ...]
    num_units: int
    affinity: int


class RoutedRequest:
    """A dispatcher's record of a request that was sent to a replica.

    A unit of the prompt is a byte of its text.

    Attributes:
        index: the index of the replica.
        sent_s: when the request was sent, on the dispatcher's clock.
        hit_units: units of the prompt that the chosen replica should have in its cache.
        best_hit_units: units of the prompt in the cache of the replica with the longest cached
            prefix.
        missing_units: units of the prompt that the chosen replica must prefill.
        units_ahead: units of earlier prompts that the replica had to prefill first.
        cached_prefix: the prompt's entry in the prefix tree; None if the policy uses no
            prefixes.
        has_first_token, has_ended: whether the first token has come, and the request has ended.
    """

    __slots__ = (
        "best_hit_units",
        "cached_prefix",
        "has_ended",
        "has_first_token",
        "hit_units",
        "index",
        "missing_units",
        "sent_s",
        "units_ahead",
    )

    def __init__(
        self,
        index: int,
        sent_s: float,
        *,
        hit_units: int,
        best_hit_units: int,
        missing_units: int,
    ) -> None:
        """Create the record of a request that has no first token yet."""
        self.index = index
        self.sent_s = sent_s
        self.hit_units = hit_units
        self.best_hit_units = best_hit_units
        self.missing_units = missing_units
        self.units_ahead = 0.0
        self.cached_prefix: CachedPrefix | None = None
        self.has_first_token = False
        self.has_ended = False


class _Choice(Frozen):
    """A policy's choice of a replica for a request.

    Attributes:
        index: the index of the replica.
        wait_s: the seconds until the request would start there.
        hit_units: the units of the prompt that are in the replica's prefix cache.
        longest: the longest cached prefix of any replica, in blocks.
        path: the prompt's path in the prefix tree.
    """

    index: int
    wait_s: float
    hit_units: int
    longest: int
    path: Path


class Dispatcher:
    """Chooses a replica for each request by a policy. Belongs to one thread.

    For each replica it counts the pending work: prompts that were sent there and have no first
    token yet. Work is measured in seconds: units to prefill, times the replica's seconds per unit,
    which are learned from the times of first tokens. A unit is a byte of a prompt's text.

    Attributes:
        prefix_tree: which replicas were sent which prompts.
        unit_s: seconds per unit, by index of the replica.
        num_units, num_hit_units, num_best_hit_units: sums of the prompts' lengths, of `hit_units`
            and of `best_hit_units` (see `RoutedRequest`) over all requests.
    """

    def __init__(
        self,
        policy: str,
        clock: Callable[[], float],
        units_of_blocks: Callable[[int], int],
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        """Choose replicas by a routing policy.

        Args:
            policy: the name of the policy, a key of `POLICIES`.
            clock: returns the time in seconds.
            units_of_blocks: returns the number of units of a prompt's first blocks, given the
                number of blocks.
            max_blocks: the maximum number of blocks in the prefix tree.
        """
        self.prefix_tree = PrefixTree(max_blocks)
        self.unit_s: list[float] = []
        self.num_units = 0
        self.num_hit_units = 0
        self.num_best_hit_units = 0
        self._policy = POLICIES[policy]
        self._uses_prefixes = policy in PREFIX_POLICIES
        self._clock = clock
        self._units_of_blocks = units_of_blocks
        self._request_number = 0
        self._sums: list[tuple[float, float]] = []  # decayed seconds and units of each replica
        self._fleet_sum = (0.0, 0.0)
        self._mean_unit_s = _DEFAULT_UNIT_S
        self._has_first_tokens = False  # measurements are of first tokens, not of whole answers
        self._free_at_s = np.zeros(0)  # when the pending work should be done
        self._pending_units: list[float] = []
        self._min_wait_s = np.zeros(0)  # inf for closed replicas
        self._num_open = np.zeros(0)  # requests that have not ended
        self._num_waiting = np.zeros(0)  # requests in the queues, as replicas reported last
        self._is_open: list[bool] = []
        self._ring = HashRing()

    def __len__(self) -> int:
        """Return the number of replicas."""
        return len(self.unit_s)

    def add_replica(self, name: str, index: int | None = None) -> int:
        """Add a replica, which gets no requests before `set_open`; return its index.

        Pass the index of a removed replica as `index` to use it again; None for a new index.
        """
        if index is None:
            index = len(self.unit_s)
            self.unit_s.append(self._mean_unit_s)
            self._sums.append((0.0, 0.0))
            self._pending_units.append(0.0)
            self._is_open.append(False)
            self._free_at_s = np.append(self._free_at_s, 0.0)
            self._min_wait_s = np.append(self._min_wait_s, 0.0)
            self._num_open = np.append(self._num_open, 0.0)
            self._num_waiting = np.append(self._num_waiting, 0.0)
        salt = 0
        for byte in name.encode():
            salt = mix(salt ^ byte)
        self._ring.add(index, salt)
        self._is_open[index] = False
        self.reset(index)
        return index

    def reset(self, index: int) -> None:
        """Forget the cached prompts and the pending work of a replica, since it was restarted."""
        self.prefix_tree.reset(index)
        self._free_at_s[index] = 0.0
        self._num_waiting[index] = 0.0
        self._set_pending(index, 0.0)

    def set_open(self, index: int, *, is_open: bool) -> None:
        """Open a replica for new requests, or close it."""
        self._is_open[index] = is_open
        self._set_pending(index, self._pending_units[index])

    def report(
        self, index: int, work_s: float, horizon_s: float | None, num_waiting: int = 0
    ) -> None:
        """Apply a replica's report of its queued work and of the evictions from its prefix cache.

        `work_s` is the time to prefill the queue, which has `num_waiting` requests. Pages that were
        last used longer than `horizon_s` ago have been evicted; None if no page has been evicted.
        """
        now_s = self._clock()
        self._free_at_s[index] = max(self._free_at_s[index], now_s + work_s)
        self._num_waiting[index] = num_waiting
        if horizon_s is not None:
            self.prefix_tree.evict_before(index, now_s - horizon_s)

    @property
    def mean_unit_s(self) -> float:
        """The seconds per unit of a replica that has not been measured yet."""
        return self._mean_unit_s

    def wait_s(self, index: int) -> float:
        """Return the seconds that a new request would wait at a replica."""
        return max(self._free_at_s.item(index) - self._clock(), self._overdue_s(index))

    def num_open(self, index: int) -> int:
        """Return the number of requests at a replica that have not ended."""
        return int(self._num_open[index])

    def decide(
        self,
        key: RoutingKey,
        allowed: npt.NDArray[np.bool_] | None = None,
        excluded: Collection[int] = (),
    ) -> RoutedRequest | None:
        """Choose a replica for a request by the policy, and count the request's work there.

        Returns the record of the request, for which the caller calls `record_first_token` and
        `end`; None if no replica is open. `allowed`, shape (replicas,), says which replicas suit
        the request; None for all. `excluded` are the indices of replicas that may not be chosen,
        for example because they have failed.
        """
        if not self.unit_s:
            return None
        now_s = self._clock()
        choice = self._choose(key, now_s, allowed, excluded)
        if choice is None:
            return None
        index = choice.index
        routed = RoutedRequest(
            index,
            now_s,
            hit_units=choice.hit_units,
            best_hit_units=self._units_of_blocks(choice.longest),
            missing_units=key.num_units - choice.hit_units,
        )
        self._request_number += 1
        self._add_work(key, routed)
        if self._uses_prefixes:
            routed.cached_prefix = self.prefix_tree.add(key.block_keys, choice.path, index)
        return routed

    def expected_first_token_s(
        self,
        key: RoutingKey,
        allowed: npt.NDArray[np.bool_] | None = None,
        excluded: Collection[int] = (),
    ) -> float:
        """Return the seconds after which the first token of a request is expected.

        This is the sum of the wait at the replica that `decide` would choose, and of the time to
        prefill the part of the prompt that is not in the replica's prefix cache. The arguments are
        as for `decide`. Returns infinity if no replica is open.
        """
        choice = self._choose(key, self._clock(), allowed, excluded)
        if choice is None:
            return math.inf
        missing_units = key.num_units - choice.hit_units
        return choice.wait_s + self._prefill_s(choice.index, missing_units)

    def _choose(
        self,
        key: RoutingKey,
        now_s: float,
        allowed: npt.NDArray[np.bool_] | None,
        excluded: Collection[int],
    ) -> _Choice | None:
        """Return the replica that the policy chooses, without counting the request's work there.

        `decide` describes the arguments. None if no replica is open.
        """
        wait_s = self._waits_s(now_s)
        if allowed is not None:
            wait_s[~allowed] = np.inf
        for index in excluded:
            wait_s[index] = np.inf
        nearest = int(wait_s.argmin())
        if wait_s.item(nearest) == math.inf:
            return None
        longest = 0
        cached_blocks: dict[int, int] = {}
        path: list[tuple[TreeEdge, int]] = []
        if self._uses_prefixes:
            path = self.prefix_tree.find(key.block_keys)
            longest, cached_blocks = self._candidates(path, key.affinity, wait_s, nearest)
        units_of_blocks, total = self._units_of_blocks, key.num_units
        prefill_s = {
            index: self._prefill_s(index, total - units_of_blocks(num_blocks))
            for index, num_blocks in cached_blocks.items()
        }
        index = self._policy(
            RoutingState(self._request_number, wait_s, self._num_open, self._num_waiting, prefill_s)
        )
        hit_units = units_of_blocks(cached_blocks.get(index, 0))
        return _Choice(index, wait_s.item(index), hit_units, longest, path)

    def _prefill_s(self, index: int, num_units: int) -> float:
        """Return the seconds in which a replica prefills units of a prompt.

        Each request that has not ended there slows prefill down.
        """
        return (num_units + _DECODE_UNITS * self._num_open.item(index)) * self.unit_s[index]

    def _candidates(
        self, path: Path, affinity: int, wait_s: npt.NDArray[np.float64], nearest: int
    ) -> tuple[int, dict[int, int]]:
        """Return a prompt's longest cached prefix, and the cached blocks of each candidate.

        The candidates, from which the policy chooses, are the replicas with the longest prefix, the
        preferred replicas of the hash ring, and the `nearest` replica. Lengths are in blocks. Of
        candidates with equal cost, the policy takes the first.

        Args:
            path: the prompt's path in the prefix tree.
            affinity: the prompt's hash for the hash ring.
            wait_s: shape (replicas,): seconds until a new request would start; inf if closed.
            nearest: the index of a replica that is a candidate in any case.
        """
        longest, holders = self.prefix_tree.longest_prefix(path)
        cached_blocks = {index: longest for index in holders if wait_s.item(index) != math.inf}
        for index in (*self._ring.preferred(affinity, wait_s), nearest):
            if index not in cached_blocks:
                cached_blocks[index] = self.prefix_tree.num_cached(path, index)
        return longest, cached_blocks

    def _add_work(self, key: RoutingKey, routed: RoutedRequest) -> None:
        index = routed.index
        routed.units_ahead = self._pending_units[index]
        start_s = max(routed.sent_s, self._free_at_s.item(index))
        self._free_at_s[index] = start_s + routed.missing_units * self.unit_s[index]
        self._num_open[index] += 1
        self._set_pending(index, routed.units_ahead + routed.missing_units)
        self.num_units += key.num_units
        self.num_hit_units += routed.hit_units
        self.num_best_hit_units += routed.best_hit_units

    def record_first_token(self, routed: RoutedRequest, *, is_whole_answer: bool = False) -> None:
        """Record that the first token of a request has come, and learn the replica's speed.

        With `is_whole_answer` the replica did not stream, so the time includes the decoding of the
        whole answer. Such times are used only until the first token of any stream has been
        measured, and of these times only the fastest count.
        """
        if routed.has_first_token or routed.has_ended:
            return
        now_s = self._clock()
        is_first_measured = not is_whole_answer and not self._has_first_tokens
        had_whole_answers = self._fleet_sum[1] > 0
        if is_first_measured:
            self._fleet_sum = (0.0, 0.0)
            self._sums = [(0.0, 0.0)] * len(self)
            self._has_first_tokens = True
        if not is_whole_answer:
            self._learn_first_token(routed, now_s - routed.sent_s)
        elif not self._has_first_tokens:
            self._learn_whole_answer(routed, now_s - routed.sent_s)
        if is_first_measured and had_whole_answers:
            # The other replicas' values are of whole answers, which are not comparable.
            self.unit_s = [self._mean_unit_s] * len(self)
        self._remove_work(routed, now_s)

    def _learn_first_token(self, routed: RoutedRequest, took_s: float) -> None:
        index = routed.index
        num_units = routed.units_ahead + routed.missing_units + _OVERHEAD_UNITS
        self._fleet_sum = _decayed_sum(self._fleet_sum, took_s, num_units)
        self._sums[index] = _decayed_sum(self._sums[index], took_s, num_units)
        fleet_s, fleet_units = self._fleet_sum
        own_s, own_units = self._sums[index]
        self._mean_unit_s = fleet_s / fleet_units
        prior_s = self._mean_unit_s * _PRIOR_UNITS
        self.unit_s[index] = (own_s + prior_s) / (own_units + _PRIOR_UNITS)

    def _learn_whole_answer(self, routed: RoutedRequest, took_s: float) -> None:
        """Learn a replica's speed from its fastest answers, whose decoding took the least time.

        `took_s` is the time from sending the request to the end of the answer.
        """
        own_s, own_units = self._sums[routed.index]
        unit_s = took_s / (routed.units_ahead + routed.missing_units + _OVERHEAD_UNITS)
        if own_units:
            unit_s = min(unit_s, _MAX_SLOWDOWN * own_s / own_units)
        self._sums[routed.index] = unit_s, 1.0
        measured = [seconds for seconds, num_units in self._sums if num_units]
        mean_unit_s = sum(measured) / len(measured)
        self._mean_unit_s = mean_unit_s
        self._fleet_sum = mean_unit_s, 1.0
        self.unit_s = [seconds if num_units else mean_unit_s for seconds, num_units in self._sums]

    def end(self, routed: RoutedRequest) -> None:
        """Record that a request has ended, answered or not: its replica has one request less."""
        if routed.has_ended:
            return
        if not routed.has_first_token:
            self._remove_work(routed, self._clock())
        routed.has_ended = True
        if routed.cached_prefix is not None:
            routed.cached_prefix.used_s = self._clock()
        self._num_open[routed.index] -= 1
        self._set_pending(routed.index, self._pending_units[routed.index])

    def _remove_work(self, routed: RoutedRequest, now_s: float) -> None:
        """Remove a request from its replica's pending work, after its first token or its end."""
        routed.has_first_token = True
        index = routed.index
        num_left = max(0.0, self._pending_units[index] - routed.missing_units)
        self._free_at_s[index] = now_s + num_left * self.unit_s[index]
        self._set_pending(index, num_left)

    def _set_pending(self, index: int, num_units: float) -> None:
        self._pending_units[index] = num_units
        min_wait_s = self._overdue_s(index) + _TIE_BREAK_S * self._num_open.item(index)
        self._min_wait_s[index] = min_wait_s if self._is_open[index] else math.inf

    def _overdue_s(self, index: int) -> float:
        """Return the minimum wait in seconds for which a replica's pending work counts.

        The minimum counts if all pending work should be done by now, but first tokens are still
        missing.
        """
        return _MAX_OVERDUE_WORK_RATIO * self._pending_units[index] * self.unit_s[index]

    def _waits_s(self, now_s: float) -> npt.NDArray[np.float64]:
        waits: npt.NDArray[np.float64] = self._free_at_s - now_s
        np.maximum(waits, self._min_wait_s, out=waits)
        return waits


def _decayed_sum(
    total: tuple[float, float], seconds: float, num_units: float
) -> tuple[float, float]:
    """Add a measured time and its units to decayed sums, in which older values lose weight.

    `total` has the sum of the seconds and the sum of the units; the result has the new sums.
    """
    return total[0] * _SUM_DECAY + seconds, total[1] * _SUM_DECAY + num_units
