"""Stores responses that later requests may continue, separately for each tenant.

A store with a journal also writes each change to a database, which is read at the next start. A
client that deletes a response waits until the deletion is on the disk; all other changes are
written in the background, some milliseconds later.
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

_OVERHEAD_BYTES: Final = 1000  # memory of a response besides its JSON
_ITEM_BYTES: Final = 200  # memory of an item's entry in the index besides its id
_LOG_INTERVAL_S: Final = 10.0  # between two log lines about a failing disk
_INSERT_ANSWER: Final = """
    INSERT OR IGNORE INTO answers
        (id, tenant, kind, previous, is_found, items, asked, answer, row_digest)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
# Ids come from this server or from a router, but never may a tenant change another's answer.
_OF_TENANT: Final = "WHERE id = ? AND tenant = ?"
_DELETE_ANSWER: Final = f"DELETE FROM answers {_OF_TENANT}"  # noqa: S608 constants
_HIDE_ANSWER: Final = f"UPDATE answers SET is_found = 0 {_OF_TENANT}"  # noqa: S608 constants
_UPDATE_ANSWER: Final = f"UPDATE answers SET answer = ?, row_digest = ? {_OF_TENANT}"  # noqa: S608
_SELECT_ANSWERS: Final = f"""
    SELECT {is_intact_in_sql("answers")},
        id, tenant, kind, previous, is_found, items, asked, answer FROM answers ORDER BY seq
"""  # noqa: S608 constants
_DAMAGED: Final = [None, None, None]  # stands for the content of a damaged row
_MAX_NAMED_ANSWERS: Final = 20  # in one line of the log
_logger = logging.getLogger("twostroke.serve")


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A stored response, with its request and a link to the response that it continues.

    Conversations and chat completions are stored in the same form. A removed response cannot be
    found any more, but stays in memory while a later response continues it.

    Attributes:
        id: the response's id.
        request_items: the request's new items, as a JSON list.
        answer: the response as the client got it, as JSON.
        item_ids: the ids of all items of the request and of the answer.
        previous: the preceding response in the conversation.
        kind: the type of the stored object (`RESPONSE`, `CONVERSATION` or a protocol's name);
            lookups name it.
        is_open: whether the response has not ended; its final form will replace it.
        is_damaged: whether the record was damaged or missing; the object is then a placeholder.
        num_holders: the number of references to this response: the store's entry, and responses
            that continue it.
        num_bytes: the memory of this response in the store.
        total_bytes: the memory of the conversation up to and including this response.
        total_items: the items of the conversation up to and including this response.
    """

    id: str
    request_items: bytes
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
        """Compute the response's memory and the size of the conversation that ends with it."""
        index_bytes = len(self.item_ids) * _ITEM_BYTES + sum(map(len, self.item_ids))
        self.num_bytes = len(self.request_items) + len(self.answer) + index_bytes + _OVERHEAD_BYTES
        previous = self.previous
        self.total_bytes = self.num_bytes + (previous.total_bytes if previous else 0)
        self.total_items = len(self.item_ids) + (previous.total_items if previous else 0)

    def conversation(self) -> Iterator[StoredResponse]:
        """Return the responses of the conversation, from the first to this response.

        Raises:
            DamagedRowError: an earlier response is damaged or missing, so the conversation has
                a gap.
        """
        newest_first: list[StoredResponse] = []
        response: StoredResponse | None = self
        while response is not None:
            if response.is_damaged:
                raise DamagedRowError(
                    f"The record of '{response.id}', which '{self.id}' continues, is damaged or "
                    "missing: restore a backup of the server's records, or begin another "
                    "conversation."
                )
            newest_first.append(response)
            response = response.previous
        return reversed(newest_first)


@dataclass(slots=True)
class _TenantResponses:
    """One tenant's stored responses, by id (the oldest first) and by the ids of their items."""

    by_id: dict[str, StoredResponse] = field(default_factory=dict)
    by_item_id: dict[str, StoredResponse] = field(default_factory=dict)
    num_bytes: int = 0

    def oldest_except(self, spared: StoredResponse | None) -> StoredResponse | None:
        return next((response for response in self.by_id.values() if response is not spared), None)

    def hold(self, response: StoredResponse | None) -> list[StoredResponse]:
        """Add a reference to a response, so that it stays in memory.

        The first reference to a response also holds its predecessors in the conversation, and
        counts their memory. Returns the responses that had no reference before, the newest first.
        """
        added: list[StoredResponse] = []
        while response is not None:
            response.num_holders += 1
            if response.num_holders > 1:
                break
            self.num_bytes += response.num_bytes
            added.append(response)
            response = response.previous
        return added

    def release(self, response: StoredResponse | None) -> list[StoredResponse]:
        """Drop a reference to a response; return the responses that have no reference any more.

        The last reference to a response also drops its reference to its predecessor in the
        conversation.
        """
        freed: list[StoredResponse] = []
        while response is not None:
            response.num_holders -= 1
            if response.num_holders:
                break
            self.num_bytes -= response.num_bytes
            freed.append(response)
            response = response.previous
        return freed


class ResponseStore:
    """Stores the newest responses of all tenants, up to a number and a size in memory.

    Over a limit, the tenant with the most responses (or bytes) loses its oldest response. A
    conversation that is too large is not stored. Several threads may use the store.
    """

    def __init__(self, max_responses: int, max_bytes: int, journal: Journal | None = None) -> None:
        """Create an empty store for at most `max_responses` responses and `max_bytes` bytes.

        A store with `max_responses` 0 stores nothing. Responses are in memory; with a journal they
        also outlive the process.
        """
        self.journal = journal
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self.responses_by_tenant: dict[str, _TenantResponses] = {}  # without empty entries
        self.lock = Lock()

    def __len__(self) -> int:
        """The number of stored responses that clients can look up."""
        return sum(len(responses.by_id) for responses in self.responses_by_tenant.values())

    @property
    def num_bytes(self) -> int:
        """The memory in bytes of all stored responses and their predecessors."""
        return sum(responses.num_bytes for responses in self.responses_by_tenant.values())

    async def load(self, end: Callable[[bytes], bytes | None] = lambda _answer: None) -> None:
        """Restore the responses that an earlier process wrote to the journal.

        `end` gets the JSON of each response. It returns the final JSON of a response that had not
        ended when that process stopped, and None for a response that needs no change.
        """
        if self.journal is not None:
            await self.journal.load(self, end)

    def add(self, tenant: str, response: StoredResponse) -> list[StoredResponse]:
        """Add a response without checking the limits; the caller holds the lock.

        Returns the response and its predecessors that are newly in memory.
        """
        responses = self.responses_by_tenant.setdefault(tenant, _TenantResponses())
        responses.by_id[response.id] = response
        responses.by_item_id |= dict.fromkeys(response.item_ids, response)
        return responses.hold(response)

    def evict(self, newest: StoredResponse | None) -> None:
        """Remove the largest tenant's oldest responses until the limits hold.

        `newest` is never removed.
        """
        while (has_many := len(self) > self.max_responses) or self.num_bytes > self.max_bytes:
            sizes = {
                (tenant, oldest.id): len(responses.by_id) if has_many else responses.num_bytes
                for tenant, responses in self.responses_by_tenant.items()
                if (oldest := responses.oldest_except(newest)) is not None
            }
            if not sizes:
                return
            self.remove(*max(sizes, key=sizes.__getitem__))

    def remove(self, tenant: str, id_: str) -> None:
        """Remove a stored response; the caller holds the lock."""
        responses = self.responses_by_tenant[tenant]
        response = responses.by_id.pop(id_)
        for item in response.item_ids:
            if responses.by_item_id.get(item) is response:
                del responses.by_item_id[item]
        freed = responses.release(response)
        if self.journal is not None and freed:
            self.journal.drop(tenant, (freed_response.id for freed_response in freed))
        elif self.journal is not None:
            self.journal.hide(tenant, id_)
        if not responses.by_id:
            del self.responses_by_tenant[tenant]

    def swap(self, tenant: str, old: StoredResponse, new: StoredResponse) -> None:
        """Replace the stored response `old` with `new`, as the newest; the caller holds the lock.

        Then evicts responses over the limits.
        """
        tenant_responses = self.responses_by_tenant[tenant]
        del tenant_responses.by_id[old.id]
        new_responses = self.add(tenant, new)
        freed_responses = tenant_responses.release(old)
        if self.journal is not None:
            self.journal.put(tenant, new_responses, new)
            freed_ids = {response.id for response in freed_responses}
            self.journal.drop(tenant, freed_ids - {new.id})
        self.evict(new)


class Tenant(Frozen):
    """One tenant, which sent a request, with access to its stored responses."""

    name: str
    store: ResponseStore

    def fits(self, response: StoredResponse) -> bool:
        """Return whether a response, with its whole conversation, is small enough to be stored."""
        return (
            self.store.max_responses > 0
            and response.total_bytes <= min(self.store.max_bytes, MAX_CONVERSATION_BYTES)
            and response.total_items <= MAX_CONVERSATION_ITEMS
        )

    def put(self, response: StoredResponse) -> bool:
        """Store a response as the tenant's newest; return False if it is too large to be stored.

        It replaces a response with the same id: a stream that continues has the id of its response.
        """
        if not self.fits(response):
            return False
        with self.store.lock:
            if response.id in self._responses.by_id:
                self.store.remove(self.name, response.id)
            added = self.store.add(self.name, response)
            if self.store.journal is not None:
                self.store.journal.put(self.name, added, response)
            self.store.evict(response)
        return True

    def find(self, id_: str, kind: str = RESPONSE) -> StoredResponse | None:
        """Return the tenant's stored object with an id and a kind; None if it is not stored."""
        with self.store.lock:
            response = self._responses.by_id.get(id_)
        return response if response is not None and response.kind == kind else None

    def all(self, kind: str) -> list[StoredResponse]:
        """Return all of the tenant's stored objects of a kind, the oldest first."""
        with self.store.lock:
            return [
                response for response in self._responses.by_id.values() if response.kind == kind
            ]

    def replace(self, response: StoredResponse, answer: bytes) -> None:
        """Replace the JSON of a stored response that no later response continues."""
        new = StoredResponse(
            response.id, response.request_items, answer, response.item_ids, kind=response.kind
        )
        with self.store.lock:
            responses = self._responses
            if responses.by_id.get(response.id) is response:
                responses.by_id[response.id] = new
                responses.hold(new)
                responses.release(response)
                if self.store.journal is not None:
                    self.store.journal.change(self.name, response, answer)
                self.store.evict(new)

    def supersede(self, old: StoredResponse, new: StoredResponse) -> bool:
        """Replace the stored response `old` with `new`, which has the same id, as the newest.

        Returns False, and changes nothing, if `new` is too large or `old` is not stored any more.
        """
        if not self.fits(new):
            return False
        with self.store.lock:
            if self._responses.by_id.get(old.id) is not old:
                return False
            self.store.swap(self.name, old, new)
        return True

    def find_item(self, id_: str) -> StoredResponse | None:
        """Return the tenant's stored response that has the item `id_`; None if it is not stored."""
        with self.store.lock:
            return self._responses.by_item_id.get(id_)

    def remove(self, id_: str) -> bool:
        """Remove a stored response of the tenant; return whether it was stored."""
        with self.store.lock:
            is_stored = id_ in self._responses.by_id
            if is_stored:
                self.store.remove(self.name, id_)
            return is_stored

    async def forget(self, id_: str) -> None:
        """Delete a stored response on a client's request, in the database first.

        Raises:
            RecordsError: the database cannot be written; the response stays.
        """
        if self.store.journal is not None:
            await asyncio.wrap_future(self.store.journal.hide(self.name, id_))
        self.remove(id_)

    @property
    def _responses(self) -> _TenantResponses:
        return self.store.responses_by_tenant.get(self.name) or _TenantResponses()


class Journal:
    """Writes the changes of a response store to the database, so that it outlives the process.

    Changes are written in the order of the calls. Callers hold the store's lock.
    """

    def __init__(self, records: Records) -> None:
        """Prepare to write stored responses to the database of `records`."""
        self._records = records
        self._last_logged_s = -_LOG_INTERVAL_S

    def put(self, tenant: str, added: Sequence[StoredResponse], newest: StoredResponse) -> None:
        """Write responses to the database; `added` has the newest first.

        Clients can look up only `newest`. The other responses are its predecessors in the
        conversation.
        """
        rows = [
            (
                response.id,
                tenant,
                response.kind,
                response.previous.id if response.previous is not None else None,
                response is newest,
                encode_json(response.item_ids),
                response.request_items,
                response.answer,
                _digest(tenant, response),
            )
            for response in reversed(added)
        ]
        ids = [(response.id, tenant) for response in added]

        def write(db: Connection) -> None:
            db.executemany(_DELETE_ANSWER, ids)
            db.executemany(_INSERT_ANSWER, rows)

        self._write(write)

    def change(self, tenant: str, response: StoredResponse, answer: bytes) -> None:
        """Replace the JSON of a stored response in the database."""
        values = (answer, _digest(tenant, response, answer), response.id, tenant)
        self._write(lambda db: db.execute(_UPDATE_ANSWER, values))

    def hide(self, tenant: str, id_: str) -> Future[Any]:
        """Make a stored response in the database unavailable to clients.

        Its row stays for the responses that continue it.
        """
        return self._write(lambda db: db.execute(_HIDE_ANSWER, (id_, tenant)))

    def drop(self, tenant: str, ids: Iterable[str]) -> None:
        """Delete responses from the database."""
        rows = [(id_, tenant) for id_ in ids]
        if rows:
            self._write(lambda db: db.executemany(_DELETE_ANSWER, rows))

    async def load(self, store: ResponseStore, end: Callable[[bytes], bytes | None]) -> None:
        """Restore the database's responses into an empty store, within the store's limits.

        A failure is logged, and leaves the store empty. `end` completes responses that had not
        ended, as in `ResponseStore.load`.
        """
        try:
            rows = await self._records.read_long(partial(_read_rows, path=self._records.path))
        except RecordsError as error:
            _logger.error("Stored answers are not there: %s", error)  # noqa: TRY400 the sentence is enough
            return
        responses: dict[str, StoredResponse] = {}
        tenants: dict[str, str] = {}  # by id of a response
        for id_, tenant, kind, previous_id, is_found, *content in rows:
            if content == _DAMAGED:
                responses[id_] = _placeholder(id_, kind)
                continue
            if previous_id is not None and previous_id not in responses:
                responses[previous_id] = _placeholder(previous_id, kind)
            item_ids, request_items, answer = content
            ended_answer = end(answer)
            response = StoredResponse(
                id=id_,
                request_items=request_items,
                answer=answer if ended_answer is None else ended_answer,
                item_ids=item_ids,
                previous=responses.get(previous_id),
                kind=kind,
            )
            responses[id_] = response
            tenants[id_] = tenant
            if ended_answer is not None:
                self.change(tenant, response, ended_answer)
            if is_found and store.max_responses:
                store.add(tenant, response)
        is_damaged = any(response.is_damaged for response in responses.values())
        if is_damaged:
            self._log_incomplete(responses.values())
        with store.lock:
            if not is_damaged:  # a damaged response may continue a response that seems unused
                for id_, response in responses.items():
                    if not response.num_holders:
                        self.drop(tenants[id_], (id_,))
            store.evict(None)

    def _log_incomplete(self, responses: Iterable[StoredResponse]) -> None:
        """Log which restored responses cannot be continued, since an earlier record is damaged."""
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
        def run(db: Connection) -> None:
            work(db)

        future = self._records.post(run)
        future.add_done_callback(self._log_failure)
        return future

    def _log_failure(self, future: Future[Any]) -> None:
        error = future.exception()
        now_s = time.monotonic()
        if error is None or now_s - self._last_logged_s < _LOG_INTERVAL_S:
            return
        self._last_logged_s = now_s
        _logger.error("Stored answers will be missing after a restart: %s", error)


def _placeholder(id_: str, kind: str) -> StoredResponse:
    """Build the object that takes the place of a response whose database row is damaged."""
    return StoredResponse(id_, b"", b"", (), kind=kind, is_damaged=True)


def _digest(tenant: str, response: StoredResponse, answer: bytes | None = None) -> str:
    """Return the digest with which a stored response's database row is checked for damage.

    `answer` is the JSON to write in place of the response's own; None for its own.
    """
    previous = response.previous
    return row_digest(
        (
            response.id,
            tenant,
            response.kind,
            previous.id if previous is not None else None,
            encode_json(response.item_ids),
            response.request_items,
            response.answer if answer is None else answer,
        )
    )


def _read_rows(db: Connection, path: Path) -> list[tuple[Any, ...]]:
    """Return the database rows of all stored responses, the oldest first, with decoded item ids.

    A damaged row is logged, and returned with `_DAMAGED` as its content.
    """
    rows = []
    for is_intact, id_, *facts, items, request, answer in db.execute(_SELECT_ANSWERS):
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
