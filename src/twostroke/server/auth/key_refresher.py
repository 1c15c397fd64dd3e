"""Keeps a server's keys as the records have them, and its usage in the records."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from twostroke.server.auth.key import all_keys, newest_change, note_use
from twostroke.server.auth.usage import add
from twostroke.server.storage import RecordsError

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from sqlite3 import Connection

    from twostroke.server.auth.keys import ApiKeys
    from twostroke.server.auth.usage import Rows, UsageBook
    from twostroke.server.http.api_key import Key
    from twostroke.server.storage import Records

_LOOK_S: Final = 0.5  # a revoked key is refused a little later than this, at the latest
_LOOKS: Final = 4  # after so many, usage is written: what a kill may lose
_logger = logging.getLogger("twostroke.serve")


class KeyRefresher:
    """Looks for changed keys twice a second, in the thread that reads the records.

    Every two seconds it writes what was used. Where the records cannot be read, the keys stay as
    they were; where they cannot be written, usage is kept for the next time. The log says so once.
    """

    def __init__(self, records: Records | None, keys: ApiKeys | None, usage: UsageBook) -> None:
        """Keep `keys` and `usage` in `records`; without records nothing happens."""
        self._records, self._keys, self._usage = records, keys, usage
        self._change = -1
        self._faults: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the keys, and go on looking."""
        if self._records is not None:
            await self._look(self._records)
            self._task = asyncio.create_task(self._run(self._records))

    async def stop(self) -> None:
        """Stop looking, and write what is left to write."""
        if self._task is not None and self._records is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._look(self._records, writes=True)
            if not self._usage.is_empty:
                _logger.error("Usage that was not written is lost.")

    async def _run(self, records: Records) -> None:
        number = 0
        while True:
            await asyncio.sleep(_LOOK_S)
            number += 1
            await self._look(records, writes=number % _LOOKS == 0)

    async def _look(self, records: Records, *, writes: bool = False) -> None:
        await self._try("Keys stay as they are", self._read(records))
        if writes:
            await self._try("Usage waits", self._write(records))

    async def _try(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        """Do one part; if it fails as it did the last time, nothing is said."""
        try:
            await work
        except RecordsError as error:
            if str(error) != self._faults.get(what):
                _logger.error("%s: %s", what, error)  # noqa: TRY400
            self._faults[what] = str(error)
        except Exception:  # without upkeep, keys that are revoked would go on being accepted
            _logger.exception("%s", what)
        else:
            self._faults.pop(what, None)

    async def _read(self, records: Records) -> None:
        if self._keys is not None and (found := await records.read(self._changed)) is not None:
            self._change, keys = found
            self._keys.keep(keys)

    async def _write(self, records: Records) -> None:
        uses = self._keys.take_uses() if self._keys is not None else {}
        if not uses and self._usage.is_empty:
            return
        rows = self._usage.take()
        try:
            await records.write(lambda db: _note(db, uses, rows))
        except RecordsError:
            self._usage.put_back(rows)
            if self._keys is not None:
                self._keys.put_back(uses)
            raise

    def _changed(self, db: Connection) -> tuple[int, list[Key]] | None:
        """Return the keys and their newest change, if that is not known."""
        change = newest_change(db)
        return None if change == self._change else (change, [key for key, _ in all_keys(db)])


def _note(db: Connection, uses: dict[str, int], rows: Rows) -> None:
    for id_, minute in uses.items():
        note_use(db, id_, minute)
    add(db, rows)
