"""What to do next with a pool's replicas: pure functions of what is known of them."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence


class Phase(StrEnum):
    """Where a replica is in its life."""

    STARTING = "starting"  # placed, or waiting for a place, or loading its model
    READY = "ready"  # answers requests
    DRAINING = "draining"  # ends its answers and takes no new ones


class ReplicaView(Frozen):
    """A replica as the choice sees it.

    `is_current` says that it was started from the pool as it is now. `num_running` are the requests
    that it has not answered.
    """

    name: str
    phase: Phase
    is_current: bool
    num_running: int = 0


class Actions(Frozen):
    """How many replicas to start, and the names of those to drain."""

    num_starts: int = 0
    drains: tuple[str, ...] = ()


def choose(replicas: Sequence[ReplicaView], wanted: int, *, has_room: bool = True) -> Actions:
    """Return what brings a pool closer to `wanted` replicas of its current version.

    An update goes one by one: one replica more than wanted is started, and once it is ready, an old
    one is drained, so that there are never fewer ready ones than before; without room for one more,
    the old one goes first. Where there are too many, those that are not ready go first, then those
    with the least to do.
    """
    alive = [one for one in replicas if one.phase is not Phase.DRAINING]
    current = [one for one in alive if one.is_current]
    old = sorted((one for one in alive if not one.is_current), key=_cost)
    num_starting = sum(one.phase is Phase.STARTING for one in current)
    num_ready = len(current) - num_starting
    if old:
        num_spare = max(
            sum(one.phase is Phase.STARTING for one in old),
            num_ready + len(old) - wanted,
            num_starting > 0 and not has_room,
        )
        room = wanted + 1 - len(current) - (len(old) - min(len(old), num_spare))
        num_starts = max(0, min(room, wanted - len(current)))
        return Actions(num_starts, tuple(one.name for one in old[:num_spare]))
    spare = sorted(current, key=_cost)[: max(0, len(current) - wanted)]
    return Actions(max(0, wanted - len(current)), tuple(one.name for one in spare))


def _cost(one: ReplicaView) -> tuple[bool, int, str]:
    """Return what draining a replica costs, for comparison."""
    return one.phase is Phase.READY, one.num_running, one.name


class Steady:
    """A number of replicas that rises at once, and falls when fewer have sufficed for a while."""

    def __init__(self, window_s: float) -> None:
        """Look at the last `window_s` seconds."""
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()  # falling numbers, each with its last time

    def take(self, wanted: int, now_s: float) -> int:
        """Take in what is wanted now; return the most that was wanted within the window."""
        while self._seen and self._seen[-1][1] <= wanted:
            self._seen.pop()
        self._seen.append((now_s, wanted))
        while self._seen[0][0] < now_s - self._window_s:
            self._seen.popleft()
        return self._seen[0][1]
