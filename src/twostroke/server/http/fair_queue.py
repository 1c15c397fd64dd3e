"""Fair queues: tenants take turns at threads, the grammar compiler and other resources."""

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
    """A granted turn at the resource of a `FairQueue`, which the caller must end.

    Attributes:
        key: whether the caller has low priority (`is_last`), and the tenant's name.
        began_s: the monotonic time at which the slot was granted.
    """

    key: tuple[bool, str]
    began_s: float


class FairQueue:
    """Lets tenants take turns at a shared resource, such as a thread pool.

    At most `max_slots` calls use the resource at a time. The next slot goes to the waiting tenant
    that has used the resource for the least time. Call the methods only in the event loop's thread.
    """

    def __init__(self, max_slots: int = 1, max_per_tenant: int | None = None) -> None:
        """Create a queue with `max_slots` slots, at most `max_per_tenant` of them for one tenant.

        None means no limit per tenant. The tenant with the empty name, of requests without an API
        key, may use all slots.
        """
        self._waiting: dict[tuple[bool, str], deque[asyncio.Future[FairSlot]]] = {}
        self._used_s: dict[tuple[bool, str], float] = {}  # on the clocks `_now_s`
        self._now_s = {False: 0.0, True: 0.0}  # virtual clocks: normal and low priority
        self._max_slots = max_slots
        self._free = max_slots
        self._max_per_tenant = max_slots if max_per_tenant is None else max_per_tenant
        self._num_slots: Counter[tuple[bool, str]] = Counter()

    def num_waiting(self, tenant: str) -> int:
        """Count a tenant's calls in the queue, without low-priority and cancelled calls."""
        return sum(not future.cancelled() for future in self._waiting.get((False, tenant), ()))

    async def take(self, tenant: str, *, is_last: bool = False) -> FairSlot:
        """Wait for a slot of the resource, and return it; the caller gives it back with `end`.

        With `is_last` the call has low priority: it waits until no normal call waits. A cancelled
        call does not keep a slot.
        """
        waiting: asyncio.Future[FairSlot] = asyncio.get_running_loop().create_future()
        key = (is_last, tenant)
        if key not in self._waiting:
            self._waiting[key] = deque()
            self._used_s[key] = max(self._now_s[is_last], self._used_s.get(key, 0.0))
        self._waiting[key].append(waiting)
        self._next()
        try:
            return await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled():
                self.end(waiting.result())
            raise

    def end(self, slot: FairSlot) -> None:
        """Give a slot back, and grant it to the next waiting call."""
        self._used_s[slot.key] += time.monotonic() - slot.began_s
        self._num_slots[slot.key] -= 1
        self._free += 1
        self._next()

    def _may_begin(self, key: tuple[bool, str]) -> bool:
        """Return whether the tenant in `key` may take another slot now.

        The tenant with the empty name, of requests without an API key, is not limited.
        """
        return not key[1] or self._num_slots[key] < self._max_per_tenant

    def _next(self) -> None:
        """Grant the free slots to the calls that wait, in fair order."""
        while self._free and (waiting_tenants := [*filter(self._may_begin, self._waiting)]):
            tenant_key = min(waiting_tenants, key=lambda key: (key[0], self._used_s[key]))
            futures = self._waiting[tenant_key]
            waiting = futures.popleft()
            if not futures:
                del self._waiting[tenant_key]
            if not waiting.cancelled():
                waiting.set_result(FairSlot(tenant_key, time.monotonic()))
                self._free -= 1
                self._num_slots[tenant_key] += 1
                self._now_s[tenant_key[0]] = self._used_s[tenant_key]
        if self._free == self._max_slots:
            self._num_slots.clear()
            self._used_s.clear()  # times do not matter to tenants that come later


class Readers:
    """A thread pool for long work, such as decoding large bodies, in which tenants take turns.

    If there are several threads, no named tenant uses all of them. Call the methods only in the
    event loop's thread.
    """

    def __init__(self, num_threads: int) -> None:
        """Create the pool of `num_threads` threads, which start when they are needed."""
        self._queue = FairQueue(num_threads, max(1, num_threads - 1))
        self._threads = ThreadPoolExecutor(num_threads, "twostroke-readers")

    async def run(
        self, tenant: str, work: Callable[..., T], *arguments: Any, is_last: bool = False
    ) -> T:
        """Run `work(*arguments)` in a thread when it is the tenant's turn, and return its result.

        With `is_last` the work waits until no work without `is_last` waits. If the caller is
        cancelled, work that calls `check_wanted` now and then ends soon. The slot is given back
        when the work has ended.
        """
        slot = await self._queue.take(tenant, is_last=is_last)
        loop = asyncio.get_running_loop()

        def give_back(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed, so no caller waits
                loop.call_soon_threadsafe(partial(self._queue.end, slot))

        is_abandoned = threading.Event()

        def work_while_wanted() -> T:
            with cancellable(is_abandoned):
                return work(*arguments)

        future = self._threads.submit(work_while_wanted)
        future.add_done_callback(give_back)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            is_abandoned.set()
            raise

    async def run_for(self, request: Request, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work(*arguments)` in a thread for an HTTP request, and return its result.

        The work of a batch request waits until no other work waits.

        Raises:
            ClientGoneError: the client disconnected.
        """
        served_request = served_of(request.scope)
        is_batch = served_request.service_tier == BATCH_SERVICE_TIER
        future = self.run(served_request.tenant, work, *arguments, is_last=is_batch)
        return await while_connected(request.receive, future)

    def close(self) -> None:
        """Stop the threads after their current work, and drop work that waits."""
        self._threads.shutdown(wait=False, cancel_futures=True)
