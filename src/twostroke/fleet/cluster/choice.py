"""Chooses which replicas of a pool to start and to drain, and which machines to avoid."""

from __future__ import annotations

import time
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

AVOID_S: Final = 600.0  # longer than any cloud's notice


class Phase(StrEnum):
    """The phase of a replica's life: starting, ready or draining."""

    STARTING = "starting"  # waits for a machine, or loads its model
    READY = "ready"  # answers requests
    DRAINING = "draining"  # completes its answers and accepts no new requests


class ReplicaView(Frozen):
    """The properties of a replica from which `choose` decides.

    Attributes:
        name: the replica's name.
        phase: the phase of the replica's life.
        is_current: whether the replica has the pool's present version.
        num_running: requests that the replica has not answered.
    """

    name: str
    phase: Phase
    is_current: bool
    num_running: int = 0


class Actions(Frozen):
    """The next actions in a pool: how many replicas to start, and which to drain, by name."""

    num_starts: int = 0
    drains: tuple[str, ...] = ()


def choose(replicas: Sequence[ReplicaView], num_wanted: int, *, has_room: bool = True) -> Actions:
    """Return the starts and drains that bring a pool closer to `num_wanted` current replicas.

    An update replaces replicas one by one. It starts one replica more than wanted, and drains an
    old replica as soon as the new replica is ready, so that the number of ready replicas never
    falls. Without room for an additional replica (`has_room`), an old replica is drained first. If
    there are too many replicas, replicas that are not ready are drained first, then the replicas
    with the fewest requests.
    """
    alive = [replica for replica in replicas if replica.phase is not Phase.DRAINING]
    current = [replica for replica in alive if replica.is_current]
    old = sorted((replica for replica in alive if not replica.is_current), key=_drain_cost)
    num_starting = sum(replica.phase is Phase.STARTING for replica in current)
    num_ready = len(current) - num_starting
    if old:
        num_drains = max(
            sum(replica.phase is Phase.STARTING for replica in old),
            num_ready + len(old) - num_wanted,
            num_starting > 0 and not has_room,
        )
        num_old_left = len(old) - min(len(old), num_drains)
        room = num_wanted + 1 - len(current) - num_old_left
        num_starts = max(0, min(room, num_wanted - len(current)))
        return Actions(num_starts, tuple(replica.name for replica in old[:num_drains]))
    surplus = sorted(current, key=_drain_cost)[: max(0, len(current) - num_wanted)]
    num_starts = max(0, num_wanted - len(current))
    return Actions(num_starts, tuple(replica.name for replica in surplus))


def _drain_cost(replica: ReplicaView) -> tuple[bool, int, str]:
    """Return a sort key for replicas: the replica with the least key is drained first."""
    return replica.phase is Phase.READY, replica.num_running, replica.name


class ScaleDownDelay:
    """Delays the reduction of a pool's number of replicas.

    The number rises at once, and falls after fewer replicas have been enough for a while: it is the
    maximum over a sliding window.
    """

    def __init__(self, window_s: float) -> None:
        """Use the maximum number of replicas in the last `window_s` seconds."""
        self._window_s = window_s
        self._maxima: deque[tuple[float, int]] = deque()  # latest time and number, falling numbers

    def update(self, num_wanted: int, now_s: float) -> int:
        """Note how many replicas are wanted now; return the maximum of the last `window_s`."""
        while self._maxima and self._maxima[-1][1] <= num_wanted:
            self._maxima.pop()
        self._maxima.append((now_s, num_wanted))
        while self._maxima[0][0] < now_s - self._window_s:
            self._maxima.popleft()
        return self._maxima[0][1]


class EndingMachines:
    """The machines that may be taken away soon, because a server there drained by itself.

    Such a drain is no proof: an operator may have sent SIGTERM, or the cloud may withdraw its
    notice. So a machine that is still there ten minutes later (`AVOID_S`) is used again. Machines
    are named by their ids in the Ray cluster.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with no machine to avoid; `clock` returns monotonic seconds."""
        self._clock = clock
        self._noted_s: dict[str, float] = {}  # by the id of the machine

    def add(self, machine: str) -> None:
        """Note that a server of a machine drains by itself."""
        self._noted_s[machine] = self._clock()

    def to_avoid(self, alive_machines: AbstractSet[str]) -> set[str]:
        """Return the machines on which no replica should start now.

        Empty if all machines in `alive_machines` may be taken away: a replica on such a machine is
        better than no replica.
        """
        oldest_s = self._clock() - AVOID_S
        self._noted_s = {
            machine: noted_s
            for machine, noted_s in self._noted_s.items()
            if noted_s > oldest_s and machine in alive_machines
        }
        ending = set(self._noted_s)
        return ending if ending < alive_machines else set()
