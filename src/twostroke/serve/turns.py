"""Turns of tenants at what they share: a few threads, the compiler of constraints.

Tenants take turns by the time that they used (start-time fair queueing, as in `schedule/fair.py`):
one that sends much waits for itself, not others for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from twostroke.core.frozen import Frozen
from twostroke.core.service import BATCH_SERVICE
from twostroke.http.disconnect import while_connected
from twostroke.http.served import served_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from starlette.requests import Request

T = TypeVar("T")


class Turn(Frozen):
    """A turn that began at `began_s`; `who` is whether it is among the last, and a tenant."""

    who: tuple[bool, str]
    began_s: float


class Turns:
    """Up to `most` turns at a time: the next is of the tenant that has used the least time.

    It belongs to the event loop.
    """

    def __init__(self, most: int = 1) -> None:
        """Begin with nobody."""
        self._lines: dict[tuple[bool, str], deque[asyncio.Future[Turn]]] = {}  # who waits
        self._used_s: dict[tuple[bool, str], float] = {}  # on the clocks that are at `_now_s`
        self._now_s = {False: 0.0, True: 0.0}  # the last have a clock of their own
        self._most = self._free = most

    def num_waiting(self, tenant: str) -> int:
        """Return how many of a tenant wait, besides the last and those that were cancelled."""
        return sum(not one.cancelled() for one in self._lines.get((False, tenant), ()))

    async def take(self, tenant: str, *, is_last: bool = False) -> Turn:
        """Wait for a turn, with `is_last` after all others; `end` ends it.

        A caller that is cancelled meanwhile has none.
        """
        waiting: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        who = (is_last, tenant)
        if who not in self._lines:
            self._lines[who] = deque()
            self._used_s[who] = max(self._now_s[is_last], self._used_s.get(who, 0.0))
        self._lines[who].append(waiting)
        self._next()
        try:
            return await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled():
                self.end(waiting.result())
            raise

    def end(self, turn: Turn) -> None:
        """End a turn, and begin the next."""
        self._used_s[turn.who] += time.monotonic() - turn.began_s
        self._free += 1
        self._next()

    def _next(self) -> None:
        """Begin turns while there are some and somebody waits."""
        while self._free and self._lines:
            who = min(self._lines, key=lambda one: (one[0], self._used_s[one]))
            line = self._lines[who]
            waiting = line.popleft()
            if not line:
                del self._lines[who]
            if not waiting.cancelled():
                waiting.set_result(Turn(who, time.monotonic()))
                self._free -= 1
                self._now_s[who[0]] = self._used_s[who]
        if self._free == self._most:
            self._used_s.clear()  # nobody owes anything to those who were not there


class Readers:
    """Threads that read what is long, for tenants in turn. It belongs to the event loop."""

    def __init__(self, num_threads: int) -> None:
        """Start threads when they are needed."""
        self._turns = Turns(num_threads)
        self._threads = ThreadPoolExecutor(num_threads, "twostroke-readers")

    async def run(
        self, tenant: str, work: Callable[..., T], *given: Any, is_last: bool = False
    ) -> T:
        """Return `work(*given)`, done in the turn of a tenant; raises what it raises.

        A caller that is cancelled keeps the turn until the work that has begun ends.
        """
        turn = await self._turns.take(tenant, is_last=is_last)
        loop = asyncio.get_running_loop()

        def ended(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(partial(self._turns.end, turn))

        working = self._threads.submit(work, *given)
        working.add_done_callback(ended)
        return await asyncio.wrap_future(working)

    async def run_for(self, request: Request, work: Callable[..., T], *given: Any) -> T:
        """Return `work(*given)`, done for a request; those of batches come after all others.

        Raises:
            ClientGoneError: the client left.
        """
        served = served_of(request.scope)
        is_line = served.service == BATCH_SERVICE
        working = self.run(served.tenant, work, *given, is_last=is_line)
        return await while_connected(request.receive, working)

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
