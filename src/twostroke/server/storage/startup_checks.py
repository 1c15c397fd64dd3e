"""Checks a database for damage when it is opened: ids, indexes, and a cut-off log."""

from __future__ import annotations

import os
import sqlite3
from typing import TYPE_CHECKING, Final

from twostroke.server.storage.row_digests import COLUMNS, is_intact_in_sql, row_digest

if TYPE_CHECKING:
    from pathlib import Path
    from sqlite3 import Connection

# Tables with a rowid and a unique id, and the noun for a row in messages.
NOUNS: Final = {
    "files": "file",
    "batches": "batch",
    "keys": "key",
    "uploads": "upload",
    "answers": "stored answer",
}


def stored_ids(db: Connection, table: str) -> set[str]:
    """Return the ids of all rows of a table, including damaged ids.

    SQLite stores each id in the row and in an index; if damage made them differ, both are returned.
    """
    return {*_ids_in_rows(db, table).values(), *_ids_in_index(db, table).values()}


def restore_ids(db: Connection) -> list[str]:
    """Repair damaged ids and indexes of the database where possible.

    Returns a log message for each fault, whether it was repaired or not.
    """
    faults: list[str] = []
    for table, noun in NOUNS.items():
        row_ids = _ids_in_rows(db, table)
        index_ids = _ids_in_index(db, table)
        lost_ids = [index_ids[row] for row in index_ids.keys() - row_ids.keys()]
        faults += [f"The record of {noun} {id_} is lost: restore a backup" for id_ in lost_ids]
        table_faults = _structure_faults(db, table, "quick_check")
        index_faults = _structure_faults(db, table, "integrity_check") - table_faults
        faults += [f"The table {table} is damaged ({fault})" for fault in sorted(table_faults)]
        if lost_ids or table_faults or not index_faults:
            continue  # the index may be the only place that still has an id
        faults += _restore_table(db, table, noun=noun, row_ids=row_ids, index_ids=index_ids)
    return faults


def _restore_table(
    db: Connection, table: str, noun: str, row_ids: dict[int, str], index_ids: dict[int, str]
) -> list[str]:
    """Repair the damaged ids and indexes of a table; only call this if no row is missing.

    Of an id in the row and another id in the index, the id that matches the row's digest is right.
    If neither matches, nothing in the table is repaired.

    Args:
        db: the database.
        table: the name of the table.
        noun: the noun for a row in log messages.
        row_ids: the ids in the rows, by row number.
        index_ids: the ids in the index, by row number.

    Returns:
        A log message for each fault.
    """
    true_ids: dict[int, str] = {}
    faults: list[str] = []
    undecided: list[str] = []
    for row, index_id in index_ids.items():
        row_id = row_ids[row]
        if row_id == index_id:
            continue
        if _is_intact(db, table, row, index_id):
            true_ids[row] = index_id
            faults.append(f"The id of {noun} {index_id} was damaged ({row_id}) and is restored")
        elif _is_intact(db, table, row, row_id):
            reason = f"was damaged in the index ({index_id}) and is restored"
            faults.append(f"The id of {noun} {row_id} {reason}")
        else:
            undecided.append(f"The record of {noun} {row_id} or {index_id} is damaged")
    if undecided:
        return undecided
    try:
        _rebuild_indexes(db, table, true_ids)
    except sqlite3.Error as error:
        return [f"The table {table} is damaged ({error})"]
    return faults or [f"An index of the table {table} was damaged and is made again"]


def _rebuild_indexes(db: Connection, table: str, true_ids: dict[int, str]) -> None:
    """Rebuild a table's indexes and correct its damaged ids, in one transaction.

    `true_ids` has the correct ids, by row number.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        db.execute(f"REINDEX {table}")  # first: an update looks for the old id in the index
        for row, id_ in true_ids.items():
            db.execute(f"UPDATE {table} SET id = ? WHERE rowid = ?", (id_, row))  # noqa: S608 constants
        db.execute("COMMIT")
    except BaseException:  # also an interrupt: no transaction may stay open
        db.execute("ROLLBACK")
        raise


def _ids_in_rows(db: Connection, table: str) -> dict[int, str]:
    return dict(db.execute(f"SELECT rowid, id FROM {table} NOT INDEXED"))  # noqa: S608 constants


def _ids_in_index(db: Connection, table: str) -> dict[int, str]:
    index = f"sqlite_autoindex_{table}_1"
    return dict(db.execute(f"SELECT rowid, id FROM {table} INDEXED BY {index}"))  # noqa: S608 constants


def _structure_faults(db: Connection, table: str, check: str) -> set[str]:
    """Return the faults that SQLite's own check finds in a table.

    `check` is `quick_check` or `integrity_check`. Only `integrity_check` reads the indexes.
    """
    return {text for (text,) in db.execute(f"PRAGMA {check}({table})")} - {"ok"}


def _is_intact(db: Connection, table: str, row: int, id_: str) -> bool:
    """Whether a row's values, with the id `id_`, match the digest that was written with the row.

    False for rows without a digest.
    """
    columns = ", ".join(f"CAST({column} AS BLOB)" for column in COLUMNS[table][1:])
    query = f"SELECT row_digest, {columns} FROM {table} NOT INDEXED WHERE rowid = ?"  # noqa: S608 constants
    digest, *values = db.execute(query, (row,)).fetchone()
    return bool(digest == row_digest((id_, *values)))


def has_damaged_rows(db: Connection, table: str) -> bool:
    """Whether any row of a database table differs from the row that was written."""
    query = f"SELECT 1 FROM {table} NOT INDEXED WHERE NOT {is_intact_in_sql(table)} LIMIT 1"  # noqa: S608 constants
    return db.execute(query).fetchone() is not None


# https://sqlite.org/fileformat2.html#the_write_ahead_log
_HEADER_BYTES: Final = 32
_FRAME_HEADER_BYTES: Final = 24
_SALT: Final = slice(8, 16)  # of a frame header; equal in all frames since the log was last reset


def is_log_cut_off(db: Connection, path: Path) -> bool:
    """Whether the end of the database's write-ahead log is damaged, so that SQLite ignores it.

    SQLite stops reading at the first frame with a wrong checksum, so a flipped bit hides all later
    writes. Call this after the database at `path` is opened and before the first write.
    """
    [_, num_read, _] = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    [page_size] = db.execute("PRAGMA page_size").fetchone()
    salts = _frame_salts(path.with_name(f"{path.name}-wal"), page_size)
    if num_read <= 0:
        return bool(salts)
    return salts[0] in salts[num_read:]


def _frame_salts(path: Path, page_size: int) -> list[bytes]:
    """Return the salt of each frame of a database's write-ahead log.

    Salts show which frames are current: all frames since the last reset of the log have the same
    salt. The list is empty if the log does not exist.
    """
    frame_bytes = _FRAME_HEADER_BYTES + page_size
    salts: list[bytes] = []
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return salts
    try:
        offset = _HEADER_BYTES
        while len(header := os.pread(file, _FRAME_HEADER_BYTES, offset)) == _FRAME_HEADER_BYTES:
            salts.append(header[_SALT])
            offset += frame_bytes
    finally:
        os.close(file)
    return salts
