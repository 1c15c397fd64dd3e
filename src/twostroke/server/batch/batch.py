"""A batch as it is kept: what was asked for, how far it is, and when each status began."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from msgspec import field

from twostroke.core.frozen import Frozen
from twostroke.server.storage.row_digests import DamagedRowError, is_intact_in_sql, row_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from sqlite3 import Connection

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
_MOST_DROPPED: Final = 1000  # results or batches at once, and
_MOST_DROPPED_BYTES: Final = 4 << 20
ENDED: Final = frozenset(("failed", "completed", "expired", "cancelled"))


class LineError(Frozen):
    """What is wrong with a line of the input, by its number from 1; None for the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


NO_KEY: Final = LineError(
    "no_valid_key", "The batch was cancelled: its tenant has no API key that is still valid."
)
NO_ROOM: Final = LineError(
    "no_room",
    "The results do not fit beside the tenant's other files, which have a limit in bytes: delete "
    "some, and send the requests that were not executed again.",
)
NO_INPUT: Final = LineError(
    "input_file_missing", "The input file is missing from the server's records: upload it again."
)
CHANGED_INPUT: Final = LineError(
    "input_file_changed",
    "The input file was damaged or changed on the server after it was uploaded. The batch's "
    "results so far are kept. Upload the file again, and send the remaining requests in a new "
    "batch.",
)
BROKEN: Final = LineError(
    "internal_error", "The server met an error of its own, which its log has, and ended the batch."
)


class Batch(Frozen, kw_only=True):
    """A batch. Times are Unix times in seconds.

    Attributes:
        key: the id of the key that made it; empty for none, or one of a file.
        protocol: whose form its objects and results have.
        endpoint: the path of each line.
        input_file: the id of the file with its lines.
        input_digest: the digest of the lines that were checked; empty before the check.
        window: the time that it may take, as the client wrote it.
        expires_at: when the rest of its lines will not be run.
        boot, deadline_s: the same, in seconds since the machine's start with this id.
        output_expires_after_s: how long the files with results are kept; None for no limit.
        since: when each status began.
        ends_as: the last status, once no more lines are run.
        total: lines; 0 before they are counted.
        completed, failed: lines with and without success, once all have ended.
        unrun: lines that failed because the batch ended before they did.
        output_file, error_file: ids of the files with results; named before they are written, so
            that writing them again after a crash replaces them.
        errors: why the input was refused, or the batch was cancelled; `num_errors` counts those
            that are left out, too.
    """

    id: str
    tenant: str
    key: str = ""
    protocol: str
    endpoint: str
    input_file: str
    window: str
    expires_at: float
    boot: str = ""
    deadline_s: float = 0.0
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    status: Status = "validating"
    since: dict[str, float] = field(default_factory=dict)
    ends_as: Status | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    unrun: int = 0
    input_digest: str = ""
    output_file: str | None = None
    error_file: str | None = None
    errors: tuple[LineError, ...] = ()
    num_errors: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.status not in ENDED


_INTACT: Final = is_intact_in_sql("batches")
_LISTED: Final = f"id, body, {_INTACT}"
_RESULT_INTACT: Final = is_intact_in_sql("results")
_COUNT_RESULTS: Final = (
    f"SELECT line, kind, length(body), {_RESULT_INTACT} FROM results WHERE batch = ?"  # noqa: S608 constants
)
_RESULTS: Final = f"""
    SELECT line, kind = 'ok', body, {_RESULT_INTACT} FROM results WHERE batch = ? ORDER BY line
"""  # noqa: S608 constants
_KEEP_RESULT: Final = f"""
    INSERT INTO results (batch, line, kind, body, row_digest) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE
        SET kind = excluded.kind, body = excluded.body, row_digest = excluded.row_digest
        WHERE NOT {_RESULT_INTACT}
"""  # noqa: S608 constants
_DAMAGE: Final = (msgspec.MsgspecError, UnicodeDecodeError, TypeError)
_decoder: Final = msgspec.json.Decoder(Batch)  # made before threads use it
_logger = logging.getLogger("twostroke.serve")


def insert(db: Connection, batch: Batch) -> None:
    """Keep a new batch."""
    db.execute(
        "INSERT INTO batches (id, tenant, protocol, is_open, input_file, body, row_digest) "
        "VALUES (?, ?, ?, 1, ?, ?, ?)",
        (*_values(batch), row_digest(_values(batch))),
    )


def update(db: Connection, batch: Batch) -> None:
    """Keep the new state of a batch."""
    db.execute(
        "UPDATE batches SET is_open = ?, body = ?, row_digest = ? WHERE id = ?",
        (batch.is_open, _values(batch)[-1], row_digest(_values(batch)), batch.id),
    )


def find(db: Connection, id_: str, tenant: str, protocol: str) -> Batch | None:
    """Return a tenant's batch; None if there is none with this id."""
    found = db.execute(
        f"SELECT body, {_INTACT} FROM batches WHERE id = ? AND tenant = ? AND protocol = ?",  # noqa: S608 constants
        (id_, tenant, protocol),
    ).fetchone()
    if found is None:
        return None
    try:
        return _decode(*found)
    except _DAMAGE:
        reason = "The record of batch '{id}' is damaged: restore a backup of the server's records."
        raise DamagedRowError(reason.format(id=id_)) from None


def open_batches(db: Connection) -> list[Batch]:
    """Return the batches of all tenants that have not ended, oldest first.

    A batch with a damaged record is left out, so that the other batches run.
    """
    return _readable(db.execute(f"SELECT {_LISTED} FROM batches WHERE is_open ORDER BY seq"))  # noqa: S608 constants


def count_open(db: Connection, tenant: str) -> int:
    """Return how many batches of a tenant have not ended."""
    query = "SELECT count(*) FROM batches WHERE is_open AND tenant = ?"
    [count] = db.execute(query, (tenant,)).fetchone()
    return int(count)


def page(
    db: Connection,
    tenant: str,
    protocol: str,
    cursor: str | None,
    count: int,
    *,
    is_older: bool = True,
) -> list[Batch] | None:
    """Return up to `count` of a tenant's batches next to `cursor`, the newest first.

    They are the older ones or the newer ones; without a cursor, the newest. None if the cursor is
    not the id of such a batch. A batch whose record is damaged is left out.
    """
    order, than = ("DESC", "<") if is_older else ("ASC", ">")
    query = f"SELECT {_LISTED} FROM batches WHERE tenant = ? AND protocol = ?"  # noqa: S608 constants
    values = [tenant, protocol]
    if cursor is not None:
        one = "SELECT seq FROM batches WHERE id = ? AND tenant = ? AND protocol = ?"
        found = db.execute(one, (cursor, tenant, protocol)).fetchone()
        if found is None:
            return None
        query, values = f"{query} AND seq {than} ?", [*values, found[0]]
    rows = db.execute(f"{query} ORDER BY seq {order} LIMIT ?", (*values, count))
    batches = _readable(rows)
    return batches if is_older else batches[::-1]


def delete(db: Connection, batch: Batch) -> None:
    """Delete a batch and the records of its files."""
    db.execute("DELETE FROM batches WHERE id = ?", (batch.id,))
    db.execute("DELETE FROM files WHERE id IN (?, ?)", (batch.input_file, batch.output_file))


def forget_oldest(db: Connection, tenant: str, protocol: str, most: int) -> None:
    """Delete the oldest batches of a tenant that have ended, but not their files, over `most`."""
    query = "SELECT count(*) FROM batches WHERE tenant = ? AND protocol = ?"
    [count] = db.execute(query, (tenant, protocol)).fetchone()
    query = (
        "DELETE FROM batches WHERE seq IN (SELECT seq FROM batches "
        "WHERE tenant = ? AND protocol = ? AND NOT is_open ORDER BY seq LIMIT ?)"
    )
    over = min(max(0, count - most), _MOST_DROPPED)  # more may be there after an update
    db.execute(query, (tenant, protocol, over))


def count_results(db: Connection, id_: str) -> tuple[set[int], int, int]:
    """Return the lines of a batch that have results, how many failures, and bytes, these are.

    A line with a damaged result has none, and runs again.
    """
    rows = db.execute(_COUNT_RESULTS, (id_,)).fetchall()
    for line, *_ in (row for row in rows if not row[3]):
        _logger.error("The result of line %d of batch %s is damaged: it runs again.", line, id_)
    rows = [row[:3] for row in rows if row[3]]
    num_failed, num_bytes = sum(kind != "ok" for _, kind, _ in rows), sum(row[2] for row in rows)
    return {line for line, _, _ in rows}, num_failed, num_bytes


def num_results(db: Connection, id_: str) -> int:
    """Return how many lines of a batch have results that are not damaged."""
    query = f"SELECT count(*) FROM results WHERE batch = ? AND {_RESULT_INTACT}"  # noqa: S608 constants
    [count] = db.execute(query, (id_,)).fetchone()
    return int(count)


def keep_result(db: Connection, id_: str, line: int, body: bytes, *, is_ok: bool) -> None:
    """Keep the result of a line; a line has only one, which replaces a damaged one."""
    kind = "ok" if is_ok else "failed"
    digest = row_digest((id_, line, kind, body))
    db.execute(_KEEP_RESULT, (id_, line, kind, body, digest))


def count_death(db: Connection, id_: str, line: int) -> int:
    """Count that the engine died while it computed a line; return how often it did."""
    query = "INSERT INTO deaths VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET count = count + 1"
    [count] = db.execute(f"{query} RETURNING count", (id_, line)).fetchone()
    return int(count)


def results(db: Connection, id_: str) -> Iterator[tuple[int, bool, bytes]]:
    """Yield the results of a batch by line: number, success, result; no damaged ones."""
    for line, is_ok, body, is_intact in db.execute(_RESULTS, (id_,)):
        if is_intact and isinstance(body, bytes):
            yield line, is_ok, body
        else:
            _logger.error("The result of line %d of batch %s is damaged.", line, id_)


def end(db: Connection, batch: Batch) -> None:
    """Keep the last state of a batch, whose results are in its files: `drop_results` has them."""
    update(db, batch)
    db.execute("DELETE FROM deaths WHERE batch = ?", (batch.id,))


def drop_results(db: Connection) -> bool:
    """Drop some results of a batch that has ended; return whether there were any."""
    id_ = ""
    while True:  # one look in the index for each batch with results
        query = "SELECT batch FROM results WHERE batch > ? ORDER BY batch LIMIT 1"
        if (found := db.execute(query, (id_,)).fetchone()) is None:
            return False
        [id_] = found
        if _has_ended(db, id_):
            break
    query = "SELECT line, length(body) FROM results WHERE batch = ? ORDER BY line LIMIT ?"
    num_bytes = 0
    for line, size in db.execute(query, (id_, _MOST_DROPPED)).fetchall():
        db.execute("DELETE FROM results WHERE batch = ? AND line = ?", (id_, line))
        if (num_bytes := num_bytes + size) >= _MOST_DROPPED_BYTES:
            break
    return True


def _has_ended(db: Connection, id_: str) -> bool:
    """Return whether a batch has certainly ended: its record says so, or was deleted."""
    query = f"SELECT body, {_INTACT} FROM batches WHERE id = ? AND NOT is_open"  # noqa: S608 constants
    row = db.execute(query, (id_,)).fetchone()
    if row is None:
        query = f"SELECT 1 FROM batches WHERE id = ? OR NOT {_INTACT} LIMIT 1"  # noqa: S608 constants
        return db.execute(query, (id_,)).fetchone() is None
    try:
        return not _decode(*row).is_open
    except _DAMAGE:
        return False


def _values(batch: Batch) -> tuple[str | bytes, ...]:
    """Return the values of a batch's row that its digest covers."""
    body = msgspec.json.encode(batch)
    return batch.id, batch.tenant, batch.protocol, batch.input_file, body


def _readable(rows: Iterable[tuple[str, bytes, int]]) -> list[Batch]:
    """Return the batches of the rows; a row with a damaged record is logged and left out."""
    batches = []
    for id_, body, is_intact in rows:
        try:
            batches.append(_decode(body, is_intact))
        except _DAMAGE:
            _logger.error("The record of batch %s is damaged: restore a backup.", id_)  # noqa: TRY400
    return batches


def _decode(body: object, is_intact: int) -> Batch:
    if not isinstance(body, bytes) or not is_intact:
        raise msgspec.DecodeError("the record is damaged")
    return _decoder.decode(body)
