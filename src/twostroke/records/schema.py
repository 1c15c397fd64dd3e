"""The tables of the database. Each version is a script that changes the one before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.records.errors import RecordsError

if TYPE_CHECKING:
    from pathlib import Path
    from sqlite3 import Connection

# `seq` orders by arrival, whatever the clock does. `body` is JSON. Never change a script that was
# released: append another.
MIGRATIONS: Final = (
    """
    CREATE TABLE files (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        purpose TEXT NOT NULL,
        filename TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        created_at INTEGER NOT NULL
    );
    CREATE INDEX files_by_tenant ON files (tenant, seq);
    CREATE TABLE batches (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        protocol TEXT NOT NULL,
        is_open INTEGER NOT NULL,
        input_file TEXT NOT NULL,
        body BLOB NOT NULL
    );
    CREATE INDEX batches_by_tenant ON batches (tenant, protocol, seq);
    CREATE INDEX open_batches ON batches (input_file) WHERE is_open;
    CREATE TABLE results (
        batch TEXT NOT NULL,
        line INTEGER NOT NULL,
        kind TEXT NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (batch, line)
    ) WITHOUT ROWID;
    """,
)


def migrate(db: Connection, path: Path) -> None:
    """Bring a database to the newest version, each step in one transaction.

    Raises:
        RecordsError: a newer Twostroke wrote it.
    """
    [version] = db.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise RecordsError(
            f"The database {path} has version {version}, and this Twostroke reads up to "
            f"{len(MIGRATIONS)}: upgrade Twostroke, or choose another folder."
        )
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        db.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;")
