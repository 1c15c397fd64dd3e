"""Notices that a replica sends nothing although it was asked for its health."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.fleet.router.upstream import ConnectionPool

_MAX_DOWN_S: Final = 2.0  # of silence before a replica gets no more requests
_MIN_UNANSWERED_S: Final = 1.5  # of an unanswered health check before silence counts
_MAX_EJECTION_INTERVAL_S: Final = 0.5  # between checks, that counts before an ejection
_TICK_S: Final = 0.25
_PAUSED_S: Final = 0.5  # that a tick is late if this process was paused


class SilenceTimer:
    """Measures how long a replica has been silent while a health check is unanswered.

    The timer runs beside the health checks, so the interval and the timeout of the checks do not
    add to the time until a silent replica is given up. Any byte of the replica ends its silence; a
    replica that was not asked may be silent. After a replica was given up, the next check has its
    whole time again.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        eject_s: float,
        on_silence: Callable[[], None],
        on_ejection: Callable[[], None],
    ) -> None:
        """Measure the silence of the replica to which the connections of `pool` lead.

        `on_silence` is called when the replica must get no more requests, and `on_ejection` when it
        has been silent for `eject_s`, so that its running requests must be given up.
        """
        self._pool = pool
        self._eject_s = eject_s
        self._down_s = min(_MAX_DOWN_S, eject_s)
        self._on_silence = on_silence
        self._on_ejection = on_ejection
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._asked_s: float | None = None  # when the first unanswered check was sent
        self._expected_s = 0.0  # the time of the next tick
        self._interval_s = 0.0
        self._was_paused = False  # while the present check was unanswered

    @property
    def silent_s(self) -> float:
        """The seconds since the last byte of the replica."""
        return self._loop.time() - self._pool.heard_s

    @property
    def is_silent(self) -> bool:
        """Whether the replica has been silent too long to get new requests."""
        return self._asked_s is not None and self._loop.time() >= self._down_due_s()

    def start(self, interval_s: float) -> None:
        """Start with a health check that is sent now; go on if an earlier check is unanswered.

        `interval_s` is the time between two checks, for which an idle replica is silent.
        """
        self._interval_s = interval_s
        if self._asked_s is None:
            self._asked_s, self._was_paused = self._loop.time(), False
        if self._timer is None:
            self._schedule()

    def stop(self) -> None:
        """Stop, since the replica has answered a health check."""
        self._asked_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        now_s = self._loop.time()
        due_times_s = self._down_due_s(), self._ejection_due_s()
        next_s = min((due_s for due_s in due_times_s if due_s > now_s), default=math.inf)
        self._expected_s = min(next_s, now_s + _TICK_S)
        self._timer = self._loop.call_at(self._expected_s, self._tick)

    def _tick(self) -> None:
        """Judge the silence, and go on until the replica is given up."""
        self._timer = None
        now_s = self._loop.time()
        is_late = now_s - self._expected_s > _PAUSED_S
        if is_late and not self._was_paused:  # perhaps the whole machine was paused
            self._asked_s, self._was_paused = now_s, True
        if self.is_silent:
            self._on_silence()
        if now_s >= self._ejection_due_s():
            self._on_ejection()
            self._asked_s = None
        else:
            self._schedule()

    def _down_due_s(self) -> float:
        """Return when the replica must get no more requests, if no byte comes until then."""
        return self._due_s(self._down_s, self._interval_s)

    def _ejection_due_s(self) -> float:
        """Return when the replica is given up, if no byte comes until then.

        With many replicas, checks are rare. Then a check must be unanswered for longer, since a
        replica is silent between two checks.
        """
        return self._due_s(self._eject_s, min(self._interval_s, _MAX_EJECTION_INTERVAL_S))

    def _due_s(self, limit_s: float, interval_s: float) -> float:
        assert self._asked_s is not None
        unanswered_s = max(limit_s - interval_s, _MIN_UNANSWERED_S)
        return max(self._pool.heard_s + limit_s, self._asked_s + unanswered_s)
