"""Finds out whether SQLite has left out a part of its log of writes, which it does silently."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path
    from sqlite3 import Connection

# https://sqlite.org/fileformat2.html#the_write_ahead_log
_HEADER_BYTES: Final = 32
_FRAME_HEADER_BYTES: Final = 24
_SALT: Final = slice(8, 16)  # of a frame's header: all frames of one round of the log share it


def is_log_cut_off(db: Connection, path: Path) -> bool:
    """Return whether the log of the database `path` has frames that SQLite does not read.

    SQLite ends at the first frame with a wrong checksum, so a flipped bit hides all later writes.
    Call this when the database was opened, before the first write.
    """
    [_, num_read, _] = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    [page_size] = db.execute("PRAGMA page_size").fetchone()
    salts = _frame_salts(path.with_name(f"{path.name}-wal"), page_size)
    if num_read <= 0:
        return bool(salts)
    return salts[0] in salts[num_read:]


def _frame_salts(path: Path, page_size: int) -> list[bytes]:
    """Return the salt of each frame of a log; empty without a log."""
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
