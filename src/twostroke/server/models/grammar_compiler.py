"""Compiles the constraints of answers, such as JSON schemas, before requests start."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import OverloadedError, RequestError
from twostroke.core.message_text import counted_noun
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


class GrammarCompiler:
    """Has an engine compile the constraints of answers, such as JSON schemas, one at a time.

    The server compiles a constraint before its request starts, so that a slow schema delays no
    other request. Tenants take turns. The engine keeps the compiled grammars; this object caches,
    for each schema, the rules that its grammar does not enforce.
    """

    def __init__(
        self,
        compile_: Callable[[Constraint, float], Awaitable[tuple[str, ...]]],
        limit_s: float,
        is_ready: Callable[[], bool] = lambda: True,
        engine_start_of: Callable[[], object] = lambda: None,
    ) -> None:
        """Create the compiler of one engine's constraints.

        Args:
            compile_: compiles a constraint in the engine (`ServedEngine.compile`); its second
                argument is the time limit in seconds.
            limit_s: the maximum seconds for one constraint. Time in which the engine is not
                ready does not count.
            is_ready: returns whether the engine is ready.
            engine_start_of: returns another object after each start of the engine, which then
                has no compiled constraints.
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
        """Compile the constraint of a request, or of its tools, when it is the tenant's turn.

        A tool whose schema cannot be compiled takes any JSON object as arguments.

        Returns:
            The constraint, and the schema rules that its grammar does not enforce.

        Raises:
            RequestError: the constraint cannot be compiled, or takes too long.
            OverloadedError: too many constraints of the tenant wait.
            EngineStoppedError: the engine no longer runs.
        """
        if not isinstance(requested, ToolForm):
            return requested, await self._unenforced_keywords(requested, tenant)
        requested = requested.without_refused(self._refusal)
        constraint = requested.constraint()
        try:
            return constraint, await self._unenforced_keywords(constraint, tenant)
        except RequestError:
            if constraint.alternative is not None:
                await self._unenforced_keywords(
                    constraint.alternative, tenant
                )  # its own error names the field
            for function in requested.tools.functions:
                with suppress(RequestError):
                    await self._unenforced_keywords(requested.function_constraint(function), tenant)
            relaxed = requested.without_refused(self._refusal)
            if relaxed is requested:
                raise
            constraint = relaxed.constraint()
            return constraint, await self._unenforced_keywords(constraint, tenant)

    async def _unenforced_keywords(self, constraint: Constraint, tenant: str) -> tuple[str, ...]:
        """Compile a constraint; return the schema rules that its grammar does not enforce.

        A cached result is returned without compiling again.
        """
        if (engine_start := self._engine_start_of()) is not self._engine_start:
            self._engine_start = engine_start
            self._results.clear()
        result = self._results.get(constraint)
        if isinstance(result, tuple):
            self._results.move_to_end(constraint)
            return result
        if (count := self._queue.num_waiting(tenant)) >= MAX_WAITING:
            requests = counted_noun(
                count, "request of this tenant waits", "requests of this tenant wait"
            )
            reason = f"{requests} for schemas to be compiled."
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
        """Cache the result of a compilation, and let the next constraint be compiled.

        This also happens if the client that waits for the result has disconnected.
        """
        self._queue.end(slot)
        error = None if work.cancelled() else work.exception()
        if isinstance(error, RequestError) and "why" in error.facts:
            self._results[constraint] = str(error.facts["why"])
        elif error is None and not work.cancelled():
            self._results[constraint] = work.result()
        if len(self._results) > _MAX_CACHED_RESULTS:
            self._results.popitem(last=False)

    def _refusal(self, constraint: Constraint) -> str | None:
        """Return why an earlier compilation of a constraint failed; None if no failure is known."""
        result = self._results.get(constraint)
        return result if isinstance(result, str) else None
