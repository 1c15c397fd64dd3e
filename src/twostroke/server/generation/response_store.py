"""A store of responses that later requests may continue: bounded, by tenant.

With records, each change of the store is also written to a database, which is read at the next
start. Only a client that deletes a response waits for the disk: others are stored some
milliseconds later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.frozen import Frozen
from twostroke.core.json_io import encode_json
from twostroke.server.storage import RecordsError
from twostroke.server.storage.row_digests import DamagedRowError, is_intact_in_sql, row_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path
    from sqlite3 import Connection

    from twostroke.server.storage import Records

MAX_CONVERSATION_BYTES: Final = 8 * 1024 * 1024
MAX_CONVERSATION_ITEMS: Final = 10_000
RESPONSE: Final = "response"
CONVERSATION: Final = "conversation"

_OVERHEAD_BYTES: Final = 1000  # of a response, besides its JSON
_ITEM_BYTES: Final = 200  # of an item in the index, besides its id
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
_MAX_NAMED_ANSWERS: Final = 20  # in one line of the log
_logger = logging.getLogger("twostroke.serve")


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One stored response, with its request and the response that it continues.

    A removed response cannot be found, but keeps its memory as long as a later one continues it.

    Attributes:
        id: the response's id.
        asked: JSON, a list of the request's own items.
        answer: JSON, as the client got it.
        item_ids: ids of all items, of the request and of the answer.
        previous: the response before this one in the conversation.
        kind: the protocol of the response, which alone finds it.
        is_open: whether it has not ended; another one will take its place.
        is_damaged: its record was damaged; it stands for what later responses continue.
        num_holders: references to it: its entry in the store, and the responses that continue it.
        num_bytes: its share of the store's memory.
        total_bytes: memory of the conversation up to here.
        total_items: items of the conversation up to here.
    """

    id: str
    asked: bytes
    answer: bytes
    item_ids: tuple[str, ...]
    previous: StoredResponse | None = None
    kind: str = RESPONSE
    is_open: bool = False
    is_damaged: bool = False
    num_holders: int = 0
    num_bytes: int = field(init=False)
    total_bytes: int = field(init=False)
    total_items: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute sizes."""
        index = len(self.item_ids) * _ITEM_BYTES + sum(map(len, self.item_ids))
        self.num_bytes = len(self.asked) + len(self.answer) + index + _OVERHEAD_BYTES
        before = self.previous
        self.total_bytes = self.num_bytes + (before.total_bytes if before else 0)
        self.total_items = len(self.item_ids) + (before.total_items if before else 0)

    def conversation(self) -> Iterator[StoredResponse]:
        """Iterate over the conversation up to here, from its first response on.

        Raises:
            DamagedRowError: a response is damaged, so that the conversation has a gap.
        """
        found: list[StoredResponse] = []
        step: StoredResponse | None = self
        while step is not None:
            if step.is_damaged:
                raise DamagedRowError(
                    f"The record of '{step.id}', which '{self.id}' continues, is damaged or "
                    "missing: restore a backup of the server's records, or begin another "
                    "conversation."
                )
            found.append(step)
            step = step.previous
        return reversed(found)


@dataclass(slots=True)
class _TenantResponses:
    """One tenant's responses by id, the oldest first, and by the ids of their items."""

    answers: dict[str, StoredResponse] = field(default_factory=dict)
    items: dict[str, StoredResponse] = field(default_factory=dict)
    num_bytes: int = 0

    def oldest_but(self, spared: StoredResponse | None) -> StoredResponse | None:
        return next((kept for kept in self.answers.values() if kept is not spared), None)

    def hold(self, kept: StoredResponse | None) -> list[StoredResponse]:
        """Add a reference; the first one counts the memory of the response and those before it.

        Returns those whose memory was not counted before, the newest first.
        """
        counted: list[StoredResponse] = []
        while kept is not None:
            kept.num_holders += 1
            if kept.num_holders > 1:
                break
            self.num_bytes += kept.num_bytes
            counted.append(kept)
            kept = kept.previous
        return counted

    def release(self, kept: StoredResponse | None) -> list[StoredResponse]:
        """Drop a reference; free the memory with the last one. Returns those that are freed."""
        freed: list[StoredResponse] = []
        while kept is not None:
            kept.num_holders -= 1
            if kept.num_holders:
                break
            self.num_bytes -= kept.num_bytes
            freed.append(kept)
            kept = kept.previous
        return freed


class ResponseStore:
    """Keeps the newest responses of all tenants, within bounds.

    Over a bound, the tenant with the most loses its oldest. A conversation that is too large is
    not stored. Safe to use from several threads.
    """

    def __init__(self, max_answers: int, max_bytes: int, journal: Journal | None = None) -> None:
        """Store at most `max_answers` responses of `max_bytes` together; 0 stores none.

        They are in memory, and with a journal outlive the process.
        """
        self.journal = journal
        self.max_answers = max_answers
        self.max_bytes = max_bytes
        self.shelves: dict[str, _TenantResponses] = {}  # by tenant; none is empty
        self.lock = Lock()

    def __len__(self) -> int:
        """The number of responses that can be found."""
        return sum(len(shelf.answers) for shelf in self.shelves.values())

    @property
    def num_bytes(self) -> int:
        """The memory of all responses, and of those that they continue."""
        return sum(shelf.num_bytes for shelf in self.shelves.values())

    async def load(self, end: Callable[[bytes], bytes | None] = lambda _answer: None) -> None:
        """Read the journal's responses.

        `end` returns a new JSON for a response that had not ended; None for all others.
        """
        if self.journal is not None:
            await self.journal.load(self, end)

    def shelve(self, tenant: str, kept: StoredResponse) -> list[StoredResponse]:
        """Add a response, whatever the bounds; return what takes memory for it."""
        shelf = self.shelves.setdefault(tenant, _TenantResponses())
        shelf.answers[kept.id] = kept
        shelf.items |= dict.fromkeys(kept.item_ids, kept)
        return shelf.hold(kept)

    def evict(self, newest: StoredResponse | None) -> None:
        """Remove the oldest response of the largest tenant until in bounds; `newest` stays."""
        while (has_many := len(self) > self.max_answers) or self.num_bytes > self.max_bytes:
            sizes = {
                (tenant, oldest.id): len(shelf.answers) if has_many else shelf.num_bytes
                for tenant, shelf in self.shelves.items()
                if (oldest := shelf.oldest_but(newest)) is not None
            }
            if not sizes:
                return
            self.remove(*max(sizes, key=sizes.__getitem__))

    def remove(self, tenant: str, id_: str) -> None:
        """Remove a response, which is stored; the caller holds the lock."""
        shelf = self.shelves[tenant]
        kept = shelf.answers.pop(id_)
        for item in kept.item_ids:
            if shelf.items.get(item) is kept:
                del shelf.items[item]
        freed = shelf.release(kept)
        if self.journal is not None and freed:
            self.journal.drop(one.id for one in freed)
        elif self.journal is not None:
            self.journal.hide(id_)
        if not shelf.answers:
            del self.shelves[tenant]

    def swap(self, tenant: str, old: StoredResponse, new: StoredResponse) -> None:
        """Store `new` in the place of `old`, which is stored; the caller holds the lock."""
        tenant_responses = self.shelves[tenant]
        del tenant_responses.answers[old.id]
        new_responses = self.shelve(tenant, new)
        freed_responses = tenant_responses.release(old)
        if self.journal is not None:
            self.journal.put(tenant, new_responses, new)
            freed_ids = {response.id for response in freed_responses}
            self.journal.drop(freed_ids - {new.id})
        self.evict(new)


class Tenant(Frozen):
    """The sender of a request, with a view of the store."""

    name: str
    store: ResponseStore

    def fits(self, kept: StoredResponse) -> bool:
        """Whether a response, with its conversation, is within the bounds."""
        return (
            self.store.max_answers > 0
            and kept.total_bytes <= min(self.store.max_bytes, MAX_CONVERSATION_BYTES)
            and kept.total_items <= MAX_CONVERSATION_ITEMS
        )

    def put(self, kept: StoredResponse) -> bool:
        """Store a response as the newest; return whether it fits."""
        if not self.fits(kept):
            return False
        with self.store.lock:
            held = self.store.shelve(self.name, kept)
            if self.store.journal is not None:
                self.store.journal.put(self.name, held, kept)
            self.store.evict(kept)
        return True

    def find(self, id_: str, kind: str = RESPONSE) -> StoredResponse | None:
        """Return a response of this tenant; None if it is not stored."""
        with self.store.lock:
            found = self._shelf.answers.get(id_)
        return found if found is not None and found.kind == kind else None

    def all(self, kind: str) -> list[StoredResponse]:
        """Return the responses of this tenant and kind, the oldest first."""
        with self.store.lock:
            return [kept for kept in self._shelf.answers.values() if kept.kind == kind]

    def replace(self, kept: StoredResponse, answer: bytes) -> None:
        """Store another answer in the place of a response that nothing continues."""
        new = StoredResponse(kept.id, kept.asked, answer, kept.item_ids, kind=kept.kind)
        with self.store.lock:
            shelf = self._shelf
            if shelf.answers.get(kept.id) is kept:
                shelf.answers[kept.id] = new
                shelf.hold(new)
                shelf.release(kept)
                if self.store.journal is not None:
                    self.store.journal.change(self.name, kept, answer)
                self.store.evict(new)

    def supersede(self, old: StoredResponse, new: StoredResponse) -> bool:
        """Store `new` as the newest in the place of `old`, which has the same id.

        Returns whether that was possible: `new` fits, and `old` is still stored.
        """
        if not self.fits(new):
            return False
        with self.store.lock:
            if self._shelf.answers.get(old.id) is not old:
                return False
            self.store.swap(self.name, old, new)
        return True

    def find_item(self, id_: str) -> StoredResponse | None:
        """Return the response of this tenant that an item belongs to; None if not stored."""
        with self.store.lock:
            return self._shelf.items.get(id_)

    def remove(self, id_: str) -> bool:
        """Remove a response of this tenant; return whether it was stored."""
        with self.store.lock:
            is_there = id_ in self._shelf.answers
            if is_there:
                self.store.remove(self.name, id_)
            return is_there

    async def forget(self, id_: str) -> None:
        """Remove a response of this tenant for good; raises RecordsError, and then it stays."""
        if self.store.journal is not None:
            await asyncio.wrap_future(self.store.journal.hide(id_))
        self.remove(id_)

    @property
    def _shelf(self) -> _TenantResponses:
        return self.store.shelves.get(self.name) or _TenantResponses()


class Journal:
    """Writes the changes of one store in their order; its callers hold the store's lock."""

    def __init__(self, records: Records) -> None:
        """Write to `records`."""
        self._records = records
        self._said_s = -_QUIET_S

    def put(self, tenant: str, held: Sequence[StoredResponse], found: StoredResponse) -> None:
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

    def change(self, tenant: str, response: StoredResponse, answer: bytes) -> None:
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

    async def load(self, store: ResponseStore, end: Callable[[bytes], bytes | None]) -> None:
        """Put stored answers into an empty store, within its bounds; the log says if that fails.

        `end` is described at `ResponseStore.load`.
        """
        try:
            rows = await self._records.read_long(partial(_rows, path=self._records.path))
        except RecordsError as error:
            _logger.error("Stored answers are not there: %s", error)  # noqa: TRY400 the sentence is enough
            return
        known: dict[str, StoredResponse] = {}
        for id_, tenant, kind, previous_id, is_found, *content in rows:
            if content == _DAMAGED:
                known[id_] = _stand_in(id_, kind)
                continue
            if previous_id is not None and previous_id not in known:
                known[previous_id] = _stand_in(previous_id, kind)
            item_ids, request_items, answer = content
            ended_answer = end(answer)
            response = StoredResponse(
                id=id_,
                asked=request_items,
                answer=answer if ended_answer is None else ended_answer,
                item_ids=item_ids,
                previous=known.get(previous_id),
                kind=kind,
            )
            known[id_] = response
            if ended_answer is not None:
                self.change(tenant, response, ended_answer)
            if is_found and store.max_answers:
                store.shelve(tenant, response)
        is_damaged = any(response.is_damaged for response in known.values())
        if is_damaged:
            self._name_incomplete(known.values())
        with store.lock:
            if not is_damaged:  # a damaged response may continue a response that seems unused
                self.drop(id_ for id_, response in known.items() if not response.num_holders)
            store.evict(None)

    def _name_incomplete(self, responses: Iterable[StoredResponse]) -> None:
        """Log which responses cannot be continued, as their conversations have gaps."""
        incomplete_ids: list[str] = []
        damaged_ids: set[str] = set()
        for response in responses:  # each response comes after its predecessor
            if response.is_damaged:
                damaged_ids.add(response.id)
            elif response.previous is not None and response.previous.id in damaged_ids:
                damaged_ids.add(response.id)
                incomplete_ids.append(response.id)
        if incomplete_ids:
            _logger.error(
                "Stored answers can be read but not continued, as the record of an earlier answer "
                "is damaged or missing in %s: %s%s.",
                self._records.path,
                ", ".join(incomplete_ids[:_MAX_NAMED_ANSWERS]),
                " and others" if len(incomplete_ids) > _MAX_NAMED_ANSWERS else "",
            )

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


def _stand_in(id_: str, kind: str) -> StoredResponse:
    """Return a placeholder for a response whose record is damaged or missing."""
    return StoredResponse(id_, b"", b"", (), kind=kind, is_damaged=True)


def _digest(tenant: str, response: StoredResponse, answer: bytes | None = None) -> str:
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
