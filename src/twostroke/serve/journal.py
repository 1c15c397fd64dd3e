"""Stored answers in a server's records: each change of the store is written, and read at a start.

Nothing waits for the disk but a client that deletes: what is stored is there some milliseconds
later.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.json_lines import encode_json
from twostroke.records import RecordsError
from twostroke.serve.store import Kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future
    from sqlite3 import Connection

    from twostroke.records import Records
    from twostroke.serve.store import Store

_QUIET_S: Final = 10.0  # between two lines of the log about a failing disk
_PUT: Final = "INSERT OR REPLACE INTO answers VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)"
_ALL: Final = """
    SELECT id, tenant, kind, previous, is_found, items, asked, answer FROM answers ORDER BY seq
"""
_logger = logging.getLogger("twostroke.serve")


class Journal:
    """Writes the changes of one store in their order; its callers hold the store's lock."""

    def __init__(self, records: Records) -> None:
        """Write to `records`."""
        self._records = records
        self._said_s = -_QUIET_S

    def put(self, tenant: str, held: Sequence[Kept], found: Kept) -> None:
        """Keep answers, of which the newest, `found`, comes first and can be found."""
        rows = [
            (
                kept.id,
                tenant,
                kept.kind,
                kept.previous.id if kept.previous is not None else None,
                kept is found,
                encode_json(kept.item_ids),
                kept.asked,
                kept.answer,
            )
            for kept in reversed(held)
        ]
        self._write(lambda db: db.executemany(_PUT, rows))

    def change(self, id_: str, answer: bytes) -> None:
        """Replace an answer."""
        values = (answer, id_)
        self._write(lambda db: db.execute("UPDATE answers SET answer = ? WHERE id = ?", values))

    def hide(self, id_: str) -> Future[Any]:
        """Let an answer be found no more; it stays for those that continue it."""
        return self._write(
            lambda db: db.execute("UPDATE answers SET is_found = 0 WHERE id = ?", (id_,))
        )

    def drop(self, ids: Iterable[str]) -> None:
        """Delete answers."""
        rows = [(id_,) for id_ in ids]
        if rows:
            self._write(lambda db: db.executemany("DELETE FROM answers WHERE id = ?", rows))

    async def load(self, store: Store, end: Callable[[bytes], bytes | None]) -> None:
        """Put stored answers into an empty store, within its bounds; the log says if that fails.

        `end` is described at `Store.load`.
        """
        try:
            rows = await self._records.read_long(_rows)
        except RecordsError as error:
            _logger.error("Stored answers are not there: %s", error)  # noqa: TRY400 the sentence is enough
            return
        known: dict[str, Kept] = {}
        for id_, tenant, kind, previous, is_found, item_ids, asked, answer in rows:
            if previous is not None and previous not in known:
                continue  # the disk failed when that was written
            if (ended_answer := end(answer)) is not None:
                self.change(id_, ended_answer)
                answer = ended_answer  # noqa: PLW2901 the row is not needed any more
            response = Kept(id_, asked, answer, item_ids, previous=known.get(previous), kind=kind)
            known[id_] = response
            if is_found and store.max_answers:
                store.shelve(tenant, response)
        with store.lock:
            self.drop(id_ for id_, *_ in rows if id_ not in known or not known[id_].num_holders)
            store.evict(None)

    def _write(self, work: Callable[[Connection], object]) -> Future[Any]:
        def do(db: Connection) -> None:
            work(db)

        done = self._records.post(do)
        done.add_done_callback(self._note)
        return done

    def _note(self, done: Future[Any]) -> None:
        if (error := done.exception()) is None or time.monotonic() - self._said_s < _QUIET_S:
            return
        self._said_s = time.monotonic()
        _logger.error("Stored answers will be missing after a restart: %s", error)


def _rows(db: Connection) -> list[tuple[Any, ...]]:
    """Return all answers, the oldest first, with the ids of their items.

    An answer whose record is damaged is left out, so that the others are there.
    """
    rows = []
    for id_, *facts, items, request, answer in db.execute(_ALL):
        try:
            item_ids = msgspec.json.decode(items, type=tuple[str, ...])
            for document in (request, answer):
                bytes.decode(document)
                msgspec.json.decode(document, type=msgspec.Raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, TypeError):
            _logger.error("The record of stored answer %s is damaged: restore a backup.", id_)  # noqa: TRY400
            continue
        rows.append((id_, *facts, item_ids, request, answer))
    return rows
