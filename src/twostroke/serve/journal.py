"""Stored answers in a server's records: each change of the store is written, and read at a start.

Nothing waits for the disk but a client that deletes: what is stored is there some milliseconds
later.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.json_lines import encode_json
from twostroke.records import RecordsError
from twostroke.records.row_digests import is_intact_in_sql, row_digest
from twostroke.serve.store import Kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future
    from pathlib import Path
    from sqlite3 import Connection

    from twostroke.records import Records
    from twostroke.serve.store import Store

_QUIET_S: Final = 10.0  # between two lines of the log about a failing disk
_PUT: Final = """
    INSERT OR REPLACE INTO answers
        (id, tenant, kind, previous, is_found, items, asked, answer, row_digest)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_CHANGE: Final = "UPDATE answers SET answer = ?, row_digest = ? WHERE id = ?"
_ALL: Final = f"""
    SELECT {is_intact_in_sql("answers")},
        id, tenant, kind, previous, is_found, items, asked, answer FROM answers ORDER BY seq
"""  # noqa: S608 constants
_DAMAGED: Final = [None, None, None]  # the content of a row
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
                _digest(tenant, kept),
            )
            for kept in reversed(held)
        ]
        self._write(lambda db: db.executemany(_PUT, rows))

    def change(self, tenant: str, response: Kept, answer: bytes) -> None:
        """Replace the answer of a stored response."""
        values = (answer, _digest(tenant, response, answer), response.id)
        self._write(lambda db: db.execute(_CHANGE, values))

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
            rows = await self._records.read_long(partial(_rows, path=self._records.path))
        except RecordsError as error:
            _logger.error("Stored answers are not there: %s", error)  # noqa: TRY400 the sentence is enough
            return
        known: dict[str, Kept] = {}
        for id_, tenant, kind, previous, is_found, *content in rows:
            if content == _DAMAGED:
                known[id_] = Kept(id_, b"", b"", (), kind=kind, is_damaged=True)
                continue
            if previous is not None and previous not in known:
                continue  # the disk failed when that was written
            item_ids, request_items, answer = content
            ended_answer = end(answer)
            response = Kept(
                id=id_,
                asked=request_items,
                answer=answer if ended_answer is None else ended_answer,
                item_ids=item_ids,
                previous=known.get(previous),
                kind=kind,
            )
            known[id_] = response
            if ended_answer is not None:
                self.change(tenant, response, ended_answer)
            if is_found and store.max_answers:
                store.shelve(tenant, response)
        with store.lock:
            self.drop(id_ for id_, *_ in rows if id_ not in known or _is_unused(known[id_]))
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


def _is_unused(response: Kept) -> bool:
    return not (response.num_holders or response.is_damaged)


def _digest(tenant: str, response: Kept, answer: bytes | None = None) -> str:
    """Return the digest of a response's row, with another answer if there is one."""
    previous = response.previous
    return row_digest(
        (
            response.id,
            tenant,
            response.kind,
            previous.id if previous is not None else None,
            encode_json(response.item_ids),
            response.asked,
            response.answer if answer is None else answer,
        )
    )


def _rows(db: Connection, path: Path) -> list[tuple[Any, ...]]:
    """Return all answers, the oldest first, with the ids of their items.

    Of an answer whose record is damaged, no content is returned, so that the others are there.
    """
    rows = []
    for is_intact, id_, *facts, items, request, answer in db.execute(_ALL):
        try:
            item_ids = msgspec.json.decode(items, type=tuple[str, ...])
            for document in (request, answer):
                bytes.decode(document)
                msgspec.json.decode(document, type=msgspec.Raw)
            if not is_intact:
                raise msgspec.DecodeError("its digest is another")
        except (msgspec.MsgspecError, UnicodeDecodeError, TypeError):
            reason = (
                "The record of stored answer %s is damaged and left out: restore a backup of %s."
            )
            _logger.error(reason, id_, path)  # noqa: TRY400 the sentence is enough
            rows.append((id_, *facts, *_DAMAGED))
            continue
        rows.append((id_, *facts, item_ids, request, answer))
    return rows
