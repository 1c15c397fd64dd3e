"""Turns of tenants at what they share: a few threads, the compiler of constraints.

Tenants take turns by the time that they used (start-time fair queueing, as in
`engine/scheduler/queue.py`): one that sends much waits for itself, not others for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from twostroke.core.cancellation import cancellable
from twostroke.core.frozen import Frozen
from twostroke.core.request import BATCH_SERVICE_TIER
from twostroke.server.http.request_context import served_of
from twostroke.server.http.responses import while_connected

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from starlette.requests import Request

T = TypeVar("T")


class FairSlot(Frozen):
    """A turn that began at `began_s`; `who` is whether it is among the last, and a tenant."""

    who: tuple[bool, str]
    began_s: float


class FairQueue:
    """Up to `max_turns` turns at a time: the next is of the tenant that has used the least time.

    It belongs to the event loop.
    """

    def __init__(self, max_turns: int = 1, max_per_tenant: int | None = None) -> None:
        """Begin without tenants; each that has a name gets at most `max_per_tenant` at a time."""
        self._lines: dict[tuple[bool, str], deque[asyncio.Future[FairSlot]]] = {}  # who waits
        self._used_s: dict[tuple[bool, str], float] = {}  # on the clocks that are at `_now_s`
        self._now_s = {False: 0.0, True: 0.0}  # the last have a clock of their own
        self._max_turns = max_turns
        self._free = max_turns
        self._max_per_tenant = max_turns if max_per_tenant is None else max_per_tenant
        self._num_turns: Counter[tuple[bool, str]] = Counter()  # that have begun

    def num_waiting(self, tenant: str) -> int:
        """Return how many of a tenant wait, besides the last and those that were cancelled."""
        return sum(not one.cancelled() for one in self._lines.get((False, tenant), ()))

    async def take(self, tenant: str, *, is_last: bool = False) -> FairSlot:
        """Wait for a turn, with `is_last` after all others; `end` ends it.

        A caller that is cancelled meanwhile has none.
        """
        waiting: asyncio.Future[FairSlot] = asyncio.get_running_loop().create_future()
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

    def end(self, turn: FairSlot) -> None:
        """End a turn, and begin the next."""
        self._used_s[turn.who] += time.monotonic() - turn.began_s
        self._num_turns[turn.who] -= 1
        self._free += 1
        self._next()

    def _may_begin(self, key: tuple[bool, str]) -> bool:
        """Return whether a tenant may have another turn now; clients without a key may have all."""
        return not key[1] or self._num_turns[key] < self._max_per_tenant

    def _next(self) -> None:
        """Begin turns while there are some and somebody waits."""
        while self._free and (waiting_tenants := [*filter(self._may_begin, self._lines)]):
            tenant_key = min(waiting_tenants, key=lambda key: (key[0], self._used_s[key]))
            line = self._lines[tenant_key]
            waiting = line.popleft()
            if not line:
                del self._lines[tenant_key]
            if not waiting.cancelled():
                waiting.set_result(FairSlot(tenant_key, time.monotonic()))
                self._free -= 1
                self._num_turns[tenant_key] += 1
                self._now_s[tenant_key[0]] = self._used_s[tenant_key]
        if self._free == self._max_turns:
            self._num_turns.clear()
            self._used_s.clear()  # nobody owes anything to those who were not there


class Readers:
    """Threads that do long work for tenants in turn. It belongs to the event loop.

    Of several threads one is left for other tenants, whatever a tenant with a name sends.
    """

    def __init__(self, num_threads: int) -> None:
        """Start threads when they are needed."""
        self._turns = FairQueue(num_threads, max(1, num_threads - 1))
        self._threads = ThreadPoolExecutor(num_threads, "twostroke-readers")

    async def run(
        self, tenant: str, work: Callable[..., T], *given: Any, is_last: bool = False
    ) -> T:
        """Return `work(*given)`, done in the turn of a tenant; raises what it raises.

        If the caller is cancelled, work that calls `check_not_cancelled` ends soon; the turn is
        kept until the work has ended.
        """
        turn = await self._turns.take(tenant, is_last=is_last)
        loop = asyncio.get_running_loop()

        def ended(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(partial(self._turns.end, turn))

        is_abandoned = threading.Event()

        def work_while_wanted() -> T:
            with cancellable(is_abandoned):
                return work(*given)

        working = self._threads.submit(work_while_wanted)
        working.add_done_callback(ended)
        try:
            return await asyncio.wrap_future(working)
        except asyncio.CancelledError:
            is_abandoned.set()
            raise

    async def run_for(self, request: Request, work: Callable[..., T], *given: Any) -> T:
        """Return `work(*given)`, done for a request; those of batches come after all others.

        Raises:
            ClientGoneError: the client left.
        """
        served = served_of(request.scope)
        is_line = served.service == BATCH_SERVICE_TIER
        working = self.run(served.tenant, work, *given, is_last=is_line)
        return await while_connected(request.receive, working)

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
