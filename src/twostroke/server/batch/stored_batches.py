"""Batches in the database: their attributes, their status, and the results of their requests."""

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
_MAX_DROPPED_ROWS: Final = 1000  # results or batches deleted in one transaction
_MAX_DROPPED_BYTES: Final = 4 << 20
ENDED_STATUSES: Final = frozenset(("failed", "completed", "expired", "cancelled"))


class LineError(Frozen):
    """An error in a batch's input file, or the reason why the batch ended early.

    `line` counts from 1, and is None for an error of the whole file.
    """

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
    "internal_error", "An internal error, which the server's log has, ended the batch."
)


class Batch(Frozen, kw_only=True):
    """The state of a batch as the database stores it. Times are Unix times in seconds.

    Attributes:
        id: the batch's id.
        tenant: the owner.
        key: the id of the API key that created the batch; empty without a key, or for a key
            from a file.
        protocol: the protocol of its objects and results.
        endpoint: the path of each request.
        input_file: the id of the input file, which has a request in each line.
        input_digest: the digest of the validated lines; empty before validation.
        window: the time that the batch may take, as the client wrote it.
        expires_at: the deadline at which the remaining requests expire.
        boot, deadline_s: the deadline in seconds after the machine's boot, and the id of this boot.
        output_expires_after_s: how long the files with results are stored; None for no limit.
        metadata: the client's labels.
        since: when each status began.
        ends_as: the final status, once no more requests are sent.
        total: the number of requests; 0 before they are counted.
        completed, failed: requests with and without success, once all have ended.
        unrun: failed requests that were not run because the batch ended early.
        output_file, error_file: ids of the files with results. They are chosen before the files
            are written, so writing them again after a crash replaces them.
        errors: why the input was refused, or the batch was cancelled.
        num_errors: the number of errors, including errors that `errors` leaves out.
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
        """Whether the batch has not ended."""
        return self.status not in ENDED_STATUSES


_INTACT: Final = is_intact_in_sql("batches")
_BATCH_COLUMNS: Final = f"id, body, {_INTACT}"
_RESULT_INTACT: Final = is_intact_in_sql("results")
_COUNT_RESULTS: Final = (
    f"SELECT line, kind, length(body), {_RESULT_INTACT} FROM results WHERE batch = ?"  # noqa: S608 constants
)
_RESULTS: Final = f"""
    SELECT line, kind = 'ok', body, {_RESULT_INTACT} FROM results WHERE batch = ? ORDER BY line
"""  # noqa: S608 constants
_INSERT_RESULT: Final = f"""
    INSERT INTO results (batch, line, kind, body, row_digest) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE
        SET kind = excluded.kind, body = excluded.body, row_digest = excluded.row_digest
        WHERE NOT {_RESULT_INTACT}
"""  # noqa: S608 constants
_DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, TypeError)
_decoder: Final = msgspec.json.Decoder(Batch)  # created before threads use it
_logger = logging.getLogger("twostroke.serve")


def insert(db: Connection, batch: Batch) -> None:
    """Add a new batch to the database."""
    db.execute(
        "INSERT INTO batches (id, tenant, protocol, is_open, input_file, body, row_digest) "
        "VALUES (?, ?, ?, 1, ?, ?, ?)",
        (*_values(batch), row_digest(_values(batch))),
    )


def update(db: Connection, batch: Batch) -> None:
    """Replace a batch's state in the database."""
    db.execute(
        "UPDATE batches SET is_open = ?, body = ?, row_digest = ? WHERE id = ?",
        (batch.is_open, _values(batch)[-1], row_digest(_values(batch)), batch.id),
    )


def find(db: Connection, id_: str, tenant: str, protocol: str) -> Batch | None:
    """Return a tenant's batch from the database; None if it has no such batch in the protocol.

    Raises:
        DamagedRowError: the batch's database row is damaged.
    """
    row = db.execute(
        f"SELECT body, {_INTACT} FROM batches WHERE id = ? AND tenant = ? AND protocol = ?",  # noqa: S608 constants
        (id_, tenant, protocol),
    ).fetchone()
    if row is None:
        return None
    try:
        return _decode(*row)
    except _DECODE_ERRORS:
        reason = "The record of batch '{id}' is damaged: restore a backup of the server's records."
        raise DamagedRowError(reason.format(id=id_)) from None


def open_batches(db: Connection) -> list[Batch]:
    """Return all batches that have not ended, the oldest first, for a server that starts.

    Damaged rows are logged and left out.
    """
    return _readable(db.execute(f"SELECT {_BATCH_COLUMNS} FROM batches WHERE is_open ORDER BY seq"))  # noqa: S608 constants


def count_open(db: Connection, tenant: str) -> int:
    """Return how many of a tenant's batches have not ended."""
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
    """Return up to `count` of a tenant's batches on one side of a cursor, newest first.

    The batches are older than the batch with the id `cursor` or, without `is_older`, newer. If the
    cursor is None, they are the newest. Returns None if no batch has the cursor's id. Damaged rows
    are left out.
    """
    order = "DESC" if is_older else "ASC"
    comparison = "<" if is_older else ">"
    query = f"SELECT {_BATCH_COLUMNS} FROM batches WHERE tenant = ? AND protocol = ?"  # noqa: S608 constants
    values = [tenant, protocol]
    if cursor is not None:
        cursor_query = "SELECT seq FROM batches WHERE id = ? AND tenant = ? AND protocol = ?"
        row = db.execute(cursor_query, (cursor, tenant, protocol)).fetchone()
        if row is None:
            return None
        query = f"{query} AND seq {comparison} ?"
        values.append(row[0])
    rows = db.execute(f"{query} ORDER BY seq {order} LIMIT ?", (*values, count))
    batches = _readable(rows)
    return batches if is_older else batches[::-1]


def delete(db: Connection, batch: Batch) -> None:
    """Delete the database rows of a batch, of its input file and of its output file."""
    db.execute("DELETE FROM batches WHERE id = ?", (batch.id,))
    db.execute("DELETE FROM files WHERE id IN (?, ?)", (batch.input_file, batch.output_file))


def delete_oldest_ended(db: Connection, tenant: str, protocol: str, max_batches: int) -> None:
    """Delete the rows of a tenant's oldest batches, so that at most `max_batches` remain.

    Batches that have not ended stay, and so do the files of deleted batches.
    """
    query = "SELECT count(*) FROM batches WHERE tenant = ? AND protocol = ?"
    [count] = db.execute(query, (tenant, protocol)).fetchone()
    query = (
        "DELETE FROM batches WHERE seq IN (SELECT seq FROM batches "
        "WHERE tenant = ? AND protocol = ? AND NOT is_open ORDER BY seq LIMIT ?)"
    )
    # An older version may have left more than one.
    num_excess = min(max(0, count - max_batches), _MAX_DROPPED_ROWS)
    db.execute(query, (tenant, protocol, num_excess))


def count_results(db: Connection, id_: str) -> tuple[set[int], int, int]:
    """Count a batch's stored results, when a server continues the batch.

    A damaged result does not count, so its request runs again.

    Returns:
        The input lines that have results, the number of failures, and the results' total bytes.
    """
    rows = db.execute(_COUNT_RESULTS, (id_,)).fetchall()
    for line, *_ in (row for row in rows if not row[3]):
        _logger.error("The result of line %d of batch %s is damaged: it runs again.", line, id_)
    intact_rows = [row[:3] for row in rows if row[3]]
    lines = {line for line, _, _ in intact_rows}
    num_failed = sum(kind != "ok" for _, kind, _ in intact_rows)
    num_bytes = sum(size for _, _, size in intact_rows)
    return lines, num_failed, num_bytes


def num_results(db: Connection, id_: str) -> int:
    """Count a batch's stored results that are not damaged."""
    query = f"SELECT count(*) FROM results WHERE batch = ? AND {_RESULT_INTACT}"  # noqa: S608 constants
    [count] = db.execute(query, (id_,)).fetchone()
    return int(count)


def insert_result(db: Connection, id_: str, line: int, body: bytes, *, is_ok: bool) -> None:
    """Store the result of a batch request, unless an intact result is already stored.

    `line` is the number of the request's line in the input file.
    """
    kind = "ok" if is_ok else "failed"
    digest = row_digest((id_, line, kind, body))
    db.execute(_INSERT_RESULT, (id_, line, kind, body, digest))


def count_death(db: Connection, id_: str, line: int) -> int:
    """Count that the engine died during a batch request; return how often it has died so far."""
    query = "INSERT INTO deaths VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET count = count + 1"
    [count] = db.execute(f"{query} RETURNING count", (id_, line)).fetchone()
    return int(count)


def results(db: Connection, id_: str) -> Iterator[tuple[int, bool, bytes]]:
    """Yield a batch's stored results in the order of its input lines.

    Each result has its line number, whether the request succeeded, and the JSON. Damaged results
    are logged and left out.
    """
    for line, is_ok, body, is_intact in db.execute(_RESULTS, (id_,)):
        if is_intact and isinstance(body, bytes):
            yield line, is_ok, body
        else:
            _logger.error("The result of line %d of batch %s is damaged.", line, id_)


def end(db: Connection, batch: Batch) -> None:
    """Store the final state of a batch, whose results are now in files.

    After that, `drop_results` may delete its results from the database.
    """
    update(db, batch)
    db.execute("DELETE FROM deaths WHERE batch = ?", (batch.id,))


def drop_results(db: Connection) -> bool:
    """Delete some stored results of a batch that has ended, since they are in its files.

    Returns False if no results are left to delete. The caller repeats the call, so that other
    writes come in between.
    """
    id_ = ""
    while True:  # one index lookup for each batch with results
        query = "SELECT batch FROM results WHERE batch > ? ORDER BY batch LIMIT 1"
        if (row := db.execute(query, (id_,)).fetchone()) is None:
            return False
        [id_] = row
        if _has_ended(db, id_):
            break
    query = "SELECT line, length(body) FROM results WHERE batch = ? ORDER BY line LIMIT ?"
    num_bytes = 0
    for line, size in db.execute(query, (id_, _MAX_DROPPED_ROWS)).fetchall():
        db.execute("DELETE FROM results WHERE batch = ? AND line = ?", (id_, line))
        if (num_bytes := num_bytes + size) >= _MAX_DROPPED_BYTES:
            break
    return True


def _has_ended(db: Connection, id_: str) -> bool:
    """Return whether a batch has certainly ended, so that its stored results can be deleted.

    True if the batch's intact row says so, or if the row was deleted. A batch whose row is damaged
    may still be open.
    """
    query = f"SELECT body, {_INTACT} FROM batches WHERE id = ? AND NOT is_open"  # noqa: S608 constants
    row = db.execute(query, (id_,)).fetchone()
    if row is None:
        query = f"SELECT 1 FROM batches WHERE id = ? OR NOT {_INTACT} LIMIT 1"  # noqa: S608 constants
        return db.execute(query, (id_,)).fetchone() is None
    try:
        return not _decode(*row).is_open
    except _DECODE_ERRORS:
        return False


def _values(batch: Batch) -> tuple[str | bytes, ...]:
    """Return the columns of a batch's database row that the row's digest protects."""
    body = msgspec.json.encode(batch)
    return batch.id, batch.tenant, batch.protocol, batch.input_file, body


def _readable(rows: Iterable[tuple[str, bytes, int]]) -> list[Batch]:
    """Decode the batches of database rows; a damaged row is logged and left out."""
    batches = []
    for id_, body, is_intact in rows:
        try:
            batches.append(_decode(body, is_intact))
        except _DECODE_ERRORS:
            _logger.error("The record of batch %s is damaged: restore a backup.", id_)  # noqa: TRY400
    return batches


def _decode(body: object, is_intact: int) -> Batch:
    if not isinstance(body, bytes) or not is_intact:
        raise msgspec.DecodeError("the record is damaged")
    return _decoder.decode(body)
