"""Keeps a server's keys as the records have them, while it runs."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from twostroke.records import RecordsError
from twostroke.serve.tenants.key import all_keys, newest_change, note_use

if TYPE_CHECKING:
    from sqlite3 import Connection

    from twostroke.records import Records
    from twostroke.serve.http.keys import ApiKeys
    from twostroke.serve.tenants.key import Key

_LOOK_S: Final = 0.5  # a revoked key is refused a little later than this, at the latest
_logger = logging.getLogger("twostroke.serve")


class Upkeep:
    """Looks for changed keys twice a second, in the thread that reads the records.

    Where the records cannot be read, the keys stay as they were, and the log says so once.
    """

    def __init__(self, records: Records | None, keys: ApiKeys | None) -> None:
        """Keep `keys` as `records` have them; nothing happens without both."""
        self._records, self._keys = records, keys
        self._change = -1
        self._fault = ""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the keys, and go on looking."""
        await self._look()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop looking, and write what is left to write."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._look()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._look()

    async def _look(self) -> None:
        if self._records is None or self._keys is None:
            return
        try:
            found = await self._records.read(self._changed)
            if found is not None:
                self._change, keys = found
                self._keys.keep(keys)
            if uses := self._keys.take_uses():
                await self._records.write(lambda db: _note(db, uses))
        except RecordsError as error:
            if str(error) != self._fault:
                _logger.error("API keys stay as they are: %s", error)  # noqa: TRY400
            self._fault = str(error)
        else:
            self._fault = ""

    def _changed(self, db: Connection) -> tuple[int, list[Key]] | None:
        """Return the keys and their newest change, if that is not known."""
        change = newest_change(db)
        return None if change == self._change else (change, [key for key, _ in all_keys(db)])


def _note(db: Connection, uses: dict[str, int]) -> None:
    for id_, minute in uses.items():
        note_use(db, id_, minute)
