"""Has the constraints of requests compiled, outside the event loop and the engine's steps."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from twostroke.chat.tool_form import ToolForm
from twostroke.core.errors import OverloadedError, RequestError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from twostroke.core.constraint import Constraint

    Found = tuple[Constraint, tuple[str, ...]]

MAX_WAITING: Final = 64
_MAX_KNOWN: Final = 256


class Compiler:
    """Has one constraint compiled at a time, and remembers which could be."""

    def __init__(
        self,
        compile_: Callable[[Constraint], Awaitable[tuple[str, ...]]],
        limit_s: float,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """Compile with `ServedEngine.compile`; a constraint has `limit_s` seconds in its turn.

        Time in which the engine is not ready does not count.
        """
        self._compile = compile_
        self._limit_s, self._is_ready = limit_s, is_ready
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        # What a constraint's grammar does not hold, or why it is refused.
        self._known: OrderedDict[Constraint, tuple[str, ...] | str] = OrderedDict()

    async def compile(self, asked: Constraint | ToolForm) -> Found:
        """Return the constraint that was compiled, and its gaps.

        Tools whose schema cannot be compiled may have any JSON object as arguments.

        Raises:
            RequestError: the constraint cannot be compiled, or takes too long.
            OverloadedError: too many other constraints are waiting.
            EngineStoppedError: the engine no longer runs.
        """
        if not isinstance(asked, ToolForm):
            return asked, await self._gaps(asked)
        asked = asked.without_refused(self._refusal)
        constraint = asked.constraint()
        try:
            return constraint, await self._gaps(constraint)
        except RequestError:
            if constraint.alternative is not None:
                await self._gaps(constraint.alternative)  # its error names its field
            for function in asked.tools.functions:
                with suppress(RequestError):
                    await self._gaps(function.constraint())
            free = asked.without_refused(self._refusal)
            if free is asked:
                raise
            constraint = free.constraint()
            return constraint, await self._gaps(constraint)

    async def _gaps(self, constraint: Constraint) -> tuple[str, ...]:
        found = self._known.get(constraint)
        if isinstance(found, tuple):
            self._known.move_to_end(constraint)
            return found
        if self._num_waiting >= MAX_WAITING:
            message = f"{self._num_waiting} requests wait for their schemas to be compiled."
            raise OverloadedError(message)
        self._num_waiting += 1
        try:
            await self._turn.acquire()  # a client that leaves while it waits is not compiled for
            work = asyncio.ensure_future(self._compile(constraint))
            work.add_done_callback(partial(self._done, constraint))
            was_ready = False
            while not (was_ready and self._is_ready()):
                was_ready = self._is_ready()
                with suppress(TimeoutError):
                    return await asyncio.wait_for(asyncio.shield(work), self._limit_s)
            reason = f"took longer than {self._limit_s:g} s to compile: simplify it."
            raise RequestError(reason, field=constraint.param)
        finally:
            self._num_waiting -= 1

    def _done(self, constraint: Constraint, work: asyncio.Future[tuple[str, ...]]) -> None:
        """Let the next constraint have its turn, even if nobody waits for this one any more."""
        self._turn.release()
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
