"""Reloads a server's API keys from its database, and writes key usage to the database."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from twostroke.server.auth.stored_keys import all_keys, newest_change, store_last_use
from twostroke.server.auth.usage import add
from twostroke.server.storage import RecordsError

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from sqlite3 import Connection

    from twostroke.server.auth.keys import ApiKeys
    from twostroke.server.auth.usage import Rows, UsageBook
    from twostroke.server.http.api_key import Key
    from twostroke.server.storage import Records

_REFRESH_S: Final = 0.5  # a revoked key is refused after about this time
_REFRESHES_PER_WRITE: Final = 4  # a kill loses at most the usage of these refreshes
_logger = logging.getLogger("twostroke.serve")


class KeyRefresher:
    """Keeps a server's API keys current, and stores how much they are used.

    Changed keys are read from the database twice a second, and usage is written every two seconds.
    If the database cannot be read, the keys stay unchanged; if it cannot be written, usage waits
    for the next write. The same error is logged once.
    """

    def __init__(self, records: Records | None, keys: ApiKeys | None, usage: UsageBook) -> None:
        """Prepare to refresh `keys` from the database of `records`, and to write `usage` there.

        Without `records`, all methods do nothing.
        """
        self._records = records
        self._keys = keys
        self._usage = usage
        self._last_change = -1
        self._logged_errors: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the API keys, and start to refresh them regularly."""
        if self._records is not None:
            await self._refresh(self._records)
            self._task = asyncio.create_task(self._run(self._records))

    async def stop(self) -> None:
        """Stop refreshing API keys, and write the usage that is not written yet."""
        if self._task is not None and self._records is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._refresh(self._records, writes=True)
            if not self._usage.is_empty:
                _logger.error("Usage that was not written is lost.")

    async def _run(self, records: Records) -> None:
        number = 0
        while True:
            await asyncio.sleep(_REFRESH_S)
            number += 1
            await self._refresh(records, writes=number % _REFRESHES_PER_WRITE == 0)

    async def _refresh(self, records: Records, *, writes: bool = False) -> None:
        """Read changed API keys from the database; with `writes`, also write usage to it."""
        await self._try("Keys stay as they are", self._read(records))
        if writes:
            await self._try("Usage waits", self._write(records))

    async def _try(self, consequence: str, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which uses the database; log a failure together with its `consequence`.

        An error that repeats the last error of this consequence is not logged again.
        """
        try:
            await work
        except RecordsError as error:
            if str(error) != self._logged_errors.get(consequence):
                _logger.error("%s: %s", consequence, error)  # noqa: TRY400
            self._logged_errors[consequence] = str(error)
        except Exception:  # otherwise refreshing would end, and revoked keys would stay valid
            _logger.exception("%s", consequence)
        else:
            self._logged_errors.pop(consequence, None)

    async def _read(self, records: Records) -> None:
        if self._keys is not None and (changed := await records.read(self._changed)) is not None:
            self._last_change, keys = changed
            self._keys.replace_stored(keys)

    async def _write(self, records: Records) -> None:
        uses = self._keys.take_uses() if self._keys is not None else {}
        if not uses and self._usage.is_empty:
            return
        rows = self._usage.take()
        try:
            await records.write(lambda db: _store_usage(db, uses, rows))
        except RecordsError:
            self._usage.put_back(rows)
            if self._keys is not None:
                self._keys.put_back(uses)
            raise

    def _changed(self, db: Connection) -> tuple[int, list[Key]] | None:
        """Return all API keys of the database if any key has changed, else None.

        The keys come with the number of the newest change.
        """
        change = newest_change(db)
        return None if change == self._last_change else (change, [key for key, _ in all_keys(db)])


def _store_usage(db: Connection, uses: dict[str, int], rows: Rows) -> None:
    for id_, minute in uses.items():
        store_last_use(db, id_, minute)
    add(db, rows)
