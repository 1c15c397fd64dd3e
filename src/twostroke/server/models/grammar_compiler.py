"""Compiles the constraints of requests outside the event loop and the engine's steps.

Tenants take turns; the tenant whose constraints have taken the least time is next.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import OverloadedError, RequestError
from twostroke.engine.chat.tools import ToolForm
from twostroke.server.http.fair_queue import FairQueue

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from twostroke.core.constraint import Constraint
    from twostroke.server.http.fair_queue import FairSlot

    Compiled = tuple[Constraint, tuple[str, ...]]

MAX_WAITING: Final = 64  # constraints of one tenant
_MAX_CACHED_RESULTS: Final = (
    48  # fewer than the engine caches, so cached constraints need no compilation
)


class Compiler:
    """Compiles one constraint at a time, and caches the results."""

    def __init__(
        self,
        compile_: Callable[[Constraint, float], Awaitable[tuple[str, ...]]],
        limit_s: float,
        is_ready: Callable[[], bool] = lambda: True,
        engine_start_of: Callable[[], object] = lambda: None,
    ) -> None:
        """Compile with `ServedEngine.compile`, for at most `limit_s` seconds each.

        Time in which the engine is not ready does not count. `engine_start_of` returns another
        object after each start of the engine, which then has no compiled constraints.
        """
        self._compile = compile_
        self._limit_s = limit_s
        self._is_ready = is_ready
        self._engine_start_of = engine_start_of
        self._engine_start = engine_start_of()
        self._queue = FairQueue()
        # The rules that a constraint's grammar does not enforce, or why the constraint is refused.
        self._results: OrderedDict[Constraint, tuple[str, ...] | str] = OrderedDict()

    async def compile(self, requested: Constraint | ToolForm, tenant: str = "") -> Compiled:
        """Compile a constraint in the tenant's turn; return it, and the rules it does not enforce.

        A tool whose schema cannot be compiled takes any JSON object as arguments.

        Raises:
            RequestError: the constraint cannot be compiled, or takes too long.
            OverloadedError: too many constraints of the tenant wait.
            EngineStoppedError: the engine no longer runs.
        """
        if not isinstance(requested, ToolForm):
            return requested, await self._gaps(requested, tenant)
        requested = requested.without_refused(self._refusal)
        constraint = requested.constraint()
        try:
            return constraint, await self._gaps(constraint, tenant)
        except RequestError:
            if constraint.alternative is not None:
                await self._gaps(constraint.alternative, tenant)  # its own error names the field
            for function in requested.tools.functions:
                with suppress(RequestError):
                    await self._gaps(function.constraint(), tenant)
            relaxed = requested.without_refused(self._refusal)
            if relaxed is requested:
                raise
            constraint = relaxed.constraint()
            return constraint, await self._gaps(constraint, tenant)

    async def _gaps(self, constraint: Constraint, tenant: str) -> tuple[str, ...]:
        """Compile a constraint, if it is not cached; return the rules it does not enforce."""
        if (engine_start := self._engine_start_of()) is not self._engine_start:
            self._engine_start = engine_start
            self._results.clear()
        result = self._results.get(constraint)
        if isinstance(result, tuple):
            self._results.move_to_end(constraint)
            return result
        if (count := self._queue.num_waiting(tenant)) >= MAX_WAITING:
            reason = f"{count} requests of this tenant wait for their schemas to be compiled."
            raise OverloadedError(reason)
        slot = await self._queue.take(tenant)  # a disconnect while waiting ends here
        work = asyncio.ensure_future(self._compile(constraint, self._limit_s))
        work.add_done_callback(partial(self._store_result, constraint, slot))
        was_ready = False
        while not (was_ready and self._is_ready()):
            was_ready = self._is_ready()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limit_s):
                    return await asyncio.shield(work)
        reason = f"took longer than {self._limit_s:g} s to compile: simplify it."
        raise RequestError(reason, field=constraint.param)

    def _store_result(
        self, constraint: Constraint, slot: FairSlot, work: asyncio.Future[tuple[str, ...]]
    ) -> None:
        """Cache a result, and let the next constraint have its turn, even after a disconnect."""
        self._queue.end(slot)
        error = None if work.cancelled() else work.exception()
        if isinstance(error, RequestError) and "why" in error.facts:
            self._results[constraint] = str(error.facts["why"])
        elif error is None and not work.cancelled():
            self._results[constraint] = work.result()
        if len(self._results) > _MAX_CACHED_RESULTS:
            self._results.popitem(last=False)

    def _refusal(self, constraint: Constraint) -> str | None:
        """Return why a constraint is refused; None if that is not known."""
        result = self._results.get(constraint)
        return result if isinstance(result, str) else None
