"""Has the constraints of requests compiled, outside the event loop and the engine's steps.

Tenants take turns by the time that their constraints took.
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

    Found = tuple[Constraint, tuple[str, ...]]

MAX_WAITING: Final = 64  # requests of one tenant
_MAX_KNOWN: Final = 48  # fewer than an engine keeps, which compiles what it forgot out of turn


class Compiler:
    """Has one constraint compiled at a time, and remembers which could be."""

    def __init__(
        self,
        compile_: Callable[[Constraint, float], Awaitable[tuple[str, ...]]],
        limit_s: float,
        is_ready: Callable[[], bool] = lambda: True,
        started: Callable[[], object] = lambda: None,
    ) -> None:
        """Compile with `ServedEngine.compile`; a constraint has `limit_s` seconds in its turn.

        Time in which the engine is not ready does not count. What `started` returns is another
        object when the engine was started again: it then knows no constraint.
        """
        self._compile = compile_
        self._limit_s, self._is_ready = limit_s, is_ready
        self._started, self._knowing = started, started()
        self._turns = FairQueue()
        # What a constraint's grammar does not hold, or why it is refused.
        self._known: OrderedDict[Constraint, tuple[str, ...] | str] = OrderedDict()

    async def compile(self, asked: Constraint | ToolForm, tenant: str = "") -> Found:
        """Return the constraint that was compiled, and its gaps; it waits for a turn of `tenant`.

        Tools whose schema cannot be compiled may have any JSON object as arguments.

        Raises:
            RequestError: the constraint cannot be compiled, or takes too long.
            OverloadedError: too many other constraints of the tenant are waiting.
            EngineStoppedError: the engine no longer runs.
        """
        if not isinstance(asked, ToolForm):
            return asked, await self._gaps(asked, tenant)
        asked = asked.without_refused(self._refusal)
        constraint = asked.constraint()
        try:
            return constraint, await self._gaps(constraint, tenant)
        except RequestError:
            if constraint.alternative is not None:
                await self._gaps(constraint.alternative, tenant)  # its error names its field
            for function in asked.tools.functions:
                with suppress(RequestError):
                    await self._gaps(function.constraint(), tenant)
            free = asked.without_refused(self._refusal)
            if free is asked:
                raise
            constraint = free.constraint()
            return constraint, await self._gaps(constraint, tenant)

    async def _gaps(self, constraint: Constraint, tenant: str) -> tuple[str, ...]:
        if (knowing := self._started()) is not self._knowing:
            self._knowing = knowing
            self._known.clear()
        found = self._known.get(constraint)
        if isinstance(found, tuple):
            self._known.move_to_end(constraint)
            return found
        if (count := self._turns.num_waiting(tenant)) >= MAX_WAITING:
            reason = f"{count} requests of this tenant wait for their schemas to be compiled."
            raise OverloadedError(reason)
        turn = await self._turns.take(tenant)  # a client that leaves meanwhile is not compiled for
        work = asyncio.ensure_future(self._compile(constraint, self._limit_s))
        work.add_done_callback(partial(self._done, constraint, turn))
        was_ready = False
        while not (was_ready and self._is_ready()):
            was_ready = self._is_ready()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limit_s):
                    return await asyncio.shield(work)
        reason = f"took longer than {self._limit_s:g} s to compile: simplify it."
        raise RequestError(reason, field=constraint.param)

    def _done(
        self, constraint: Constraint, turn: FairSlot, work: asyncio.Future[tuple[str, ...]]
    ) -> None:
        """Let the next constraint have its turn, even if nobody waits for this one any more."""
        self._turns.end(turn)
        error = None if work.cancelled() else work.exception()
        if isinstance(error, RequestError) and "why" in error.facts:
            self._known[constraint] = str(error.facts["why"])
        elif error is None and not work.cancelled():
            self._known[constraint] = work.result()
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def _refusal(self, constraint: Constraint) -> str | None:
        found = self._known.get(constraint)
        return found if isinstance(found, str) else None
