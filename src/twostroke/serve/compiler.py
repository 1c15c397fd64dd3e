"""Compiles the constraints of requests, outside the event loop and the engine."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from twostroke.chat.tool_form import ToolForm
from twostroke.core.errors import OverloadedError, RequestError

if TYPE_CHECKING:
    from twostroke.core.constraint import Constraint
    from twostroke.sample.grammar import GrammarMatcher, Grammars

MAX_WAITING = 64


class Compiler:
    """Compiles one constraint at a time; a constraint in the cache is returned at once."""

    def __init__(self, grammars: Grammars, limit_s: float) -> None:
        """Compile with `grammars`; each constraint has `limit_s` seconds, without its queueing."""
        self._grammars = grammars
        self._limit_s = limit_s
        self._thread = ThreadPoolExecutor(1, "twostroke-compile")
        self._num_waiting = 0

    async def grammar(self, asked: Constraint | ToolForm) -> GrammarMatcher:
        """Return the compiled constraint; requests use copies of it as their matchers.

        Tools whose schema cannot be compiled may have any JSON object as arguments.

        Raises:
            RequestError: the constraint cannot be compiled, or takes too long.
            OverloadedError: too many other constraints are waiting.
        """
        if isinstance(asked, ToolForm):
            asked = asked.without_refused(partial(self._grammars.refusal, only_known=True))
        constraint = asked.constraint() if isinstance(asked, ToolForm) else asked
        if known := self._grammars.known(constraint):
            return known
        if self._num_waiting >= MAX_WAITING:
            message = f"{self._num_waiting} requests wait for their schemas to be compiled."
            raise OverloadedError(message)
        loop, has_begun = asyncio.get_running_loop(), asyncio.Event()

        def compile_() -> GrammarMatcher:
            loop.call_soon_threadsafe(has_begun.set)
            return self._compile(constraint, asked)

        self._num_waiting += 1
        work = loop.run_in_executor(self._thread, compile_)
        try:
            await has_begun.wait()
            return await asyncio.wait_for(work, self._limit_s)
        except TimeoutError:
            reason = f"took longer than {self._limit_s:g} s to compile: simplify it."
            raise RequestError(reason, field=constraint.param) from None
        finally:
            self._num_waiting -= 1
            work.cancel()  # if the client left before its turn

    def close(self) -> None:
        """Drop the queue, and end the thread after the current constraint."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, constraint: Constraint, asked: Constraint | ToolForm) -> GrammarMatcher:
        try:
            return self._grammars.compile(constraint)
        except RequestError:
            if not isinstance(asked, ToolForm):
                raise
            if constraint.alternative is not None:
                self._grammars.compile(constraint.alternative)  # its error names its field
            free = asked.without_refused(self._grammars.refusal)
            if free is asked:
                raise
            return self._grammars.compile(free.constraint())
