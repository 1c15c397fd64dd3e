"""Notices that a replica sends nothing although a health check asks for an answer."""

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

    The timer is independent of the interval and the timeout of the health checks, so these do not
    add to the time until a silent replica is given up. Any byte from the replica ends its silence;
    a replica may be silent while no health check waits for an answer. After a replica was given up,
    the time for the next health check starts at zero.
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
        """The seconds since the last byte from the replica."""
        return self._loop.time() - self._pool.heard_s

    @property
    def is_silent(self) -> bool:
        """Whether the replica has been silent too long to get new requests."""
        return self._asked_s is not None and self._loop.time() >= self._down_due_s()

    def start(self, interval_s: float) -> None:
        """Start the timer for a health check that is sent now.

        If an earlier check is still unanswered, the timer continues. `interval_s` is the time
        between two checks; an idle replica is silent for this time.
        """
        self._interval_s = interval_s
        if self._asked_s is None:
            self._asked_s, self._was_paused = self._loop.time(), False
        if self._timer is None:
            self._schedule()

    def stop(self) -> None:
        """Stop the timer, since the replica has answered a health check."""
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
        """Check how long the replica has been silent, and continue until it is given up."""
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
        """Return when the replica must get no more requests, if no byte arrives until then."""
        return self._due_s(self._down_s, self._interval_s)

    def _ejection_due_s(self) -> float:
        """Return when the replica is given up, if no byte arrives until then.

        With many replicas, checks are rare, and an idle replica is silent between two checks. A
        check must then be unanswered for longer.
        """
        return self._due_s(self._eject_s, min(self._interval_s, _MAX_EJECTION_INTERVAL_S))

    def _due_s(self, limit_s: float, interval_s: float) -> float:
        assert self._asked_s is not None
        unanswered_s = max(limit_s - interval_s, _MIN_UNANSWERED_S)
        return max(self._pool.heard_s + limit_s, self._asked_s + unanswered_s)
