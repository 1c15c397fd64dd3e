"""Digests of database rows, by which a server notices a row that the disk has damaged."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from twostroke.server.storage.folder import RecordsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from sqlite3 import Connection

# The columns that a row's digest covers, by table; the first columns identify the row. Columns such
# as `is_found` and `last_used` are updated alone and are not covered: clients do not see them.
COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "files": (
        "id",
        "tenant",
        "purpose",
        "filename",
        "bytes",
        "created_at",
        "expires_at",
        "digest",
    ),
    "batches": ("id", "tenant", "protocol", "input_file", "body"),
    "results": ("batch", "line", "kind", "body"),
    "keys": ("id", "name", "body"),
    "usage": (
        "day",
        "key",
        "tenant",
        "model",
        "is_batch",
        "requests",
        "input",
        "cached",
        "output",
    ),
    "costs": (
        "day",
        "upstream",
        "model",
        "currency",
        "requests",
        "input",
        "cached",
        "output",
        "nanos",
    ),
    "cost_estimates": (
        "day",
        "upstream",
        "model",
        "currency",
        "estimated_requests",
        "estimated_nanos",
    ),
    "answers": ("id", "tenant", "kind", "previous", "items", "asked", "answer"),
    "uploads": ("id", "tenant", "expires_at", "body"),
}
_CHECKED_AT_START: Final = {"files": "file", "batches": "batch", "keys": "key", "uploads": "upload"}
_DIGEST_BYTES: Final = 8  # against accidents, not against people who can write the database


class DamagedRowError(RecordsError):
    """A database row has other values than were written; a retry does not help."""

    http_status = 500
    code = "record_damaged"


def row_digest(values: Iterable[str | bytes | int | None]) -> str:
    """Return the BLAKE2b digest of a database row's values, in hexadecimal digits.

    The digest is stored with the row. The values are in the order of `COLUMNS`.
    """
    row_hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for value in values:
        data = b"" if value is None else value if isinstance(value, bytes) else _as_bytes(value)
        row_hash.update(b"%d:" % (-1 if value is None else len(data)))
        row_hash.update(data)
    return row_hash.hexdigest()


def digest_in_sql(table: str) -> str:
    """Return the SQL expression that computes the digest of a row of `table`."""
    # A damaged text may not be UTF-8, so SQLite passes bytes.
    values = ", ".join(f"CAST({table}.{column} AS BLOB)" for column in COLUMNS[table])
    return f"row_digest({values})"


def is_intact_in_sql(table: str) -> str:
    """Return the SQL condition that a row of `table` still has the values that were written.

    Rows of earlier versions have no digest and count as intact.
    """
    return f"({table}.row_digest = '' OR {table}.row_digest = {digest_in_sql(table)})"


def damaged_rows(db: Connection) -> Iterator[str]:
    """Yield a log message for each damaged row of a file, batch, API key or upload."""
    for table, noun in _CHECKED_AT_START.items():
        query = f"SELECT id FROM {table} NOT INDEXED WHERE NOT {is_intact_in_sql(table)}"  # noqa: S608 constants
        for (id_,) in db.execute(query):
            yield f"The record of {noun} {id_} is damaged and left out: restore a backup"


def use_row_digests(db: Connection) -> None:
    """Give a database connection the SQL function `row_digest`, which queries for damage use.

    Text that is not UTF-8 no longer fails a query, since damaged rows may have such text.
    """
    db.create_function("row_digest", -1, lambda *values: row_digest(values), deterministic=True)
    db.text_factory = _as_text


def _as_bytes(value: str | int) -> bytes:
    """Encode a database value as bytes, as SQLite's `CAST(value AS BLOB)` does."""
    return (value if isinstance(value, str) else str(int(value))).encode()


def _as_text(data: bytes) -> str:
    return data.decode(errors="replace")
