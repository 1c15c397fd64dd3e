"""What a server keeps: its records, the runner of its batches, and their routes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from twostroke.http.errors import UnknownPathError
from twostroke.serve.batches import files, messages, openai
from twostroke.serve.batches.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from starlette.routing import Route
    from starlette.types import ASGIApp

    from twostroke.http.ignored import Ignored
    from twostroke.http.keys import ApiKeys
    from twostroke.http.limits import Limits
    from twostroke.http.served import ServedRequest
    from twostroke.records import Records

FORMS = {openai.PROTOCOL: openai.FORM, messages.PROTOCOL: messages.FORM}


class Keeping:
    """The files and batches of one server; without records, their routes say how to get them."""

    def __init__(
        self,
        records: Records | None,
        limits: Limits,
        room: Callable[[], int],
        keys: ApiKeys | None = None,
    ) -> None:
        """Keep in `records`.

        `room` is how many lines of batches may be in the engine. Before each line `keys` are asked
        whether its tenant still has a valid one.
        """
        self._records = records
        self._limits = limits
        self._runner = None
        if records is not None:
            may_run = keys.has_valid if keys is not None else lambda _tenant: True
            self._runner = Runner(records, FORMS, limits, room, may_run)
        self._stopping: asyncio.Task[None] | None = None

    def routes(self, note: Callable[[Iterable[Ignored], ServedRequest], None]) -> list[Route]:
        """Return the routes; `note` takes a request's ignored fields."""

        def both() -> tuple[Records, Runner]:
            if self._records is None or self._runner is None:
                message = "This server keeps no files or batches: start it with --records DIR."
                raise UnknownPathError(message)
            return self._records, self._runner

        rooms = self._runner.rooms if self._runner is not None else files.Rooms(self._limits)
        return [
            *files.routes(lambda: both()[0], rooms, self._limits),
            *openai.routes(both, self._limits, note),
            *messages.MessageBatches(both, rooms, self._limits).routes(),
        ]

    async def start(self, app: ASGIApp) -> None:
        """Go on with the batches that have not ended."""
        if self._runner is not None:
            await self._runner.start(app)

    def drain(self) -> None:
        """Stop the lines of batches, which the next server runs."""
        if self._runner is not None and self._stopping is None:
            self._stopping = asyncio.create_task(self._runner.stop())

    async def stop(self) -> None:
        """Wait until no line runs."""
        self.drain()
        if self._stopping is not None:
            await self._stopping
