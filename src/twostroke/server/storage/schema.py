"""The tables of the database; each version is a script that changes the version before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.server.storage.folder import RecordsError

if TYPE_CHECKING:
    from pathlib import Path
    from sqlite3 import Connection

# `seq` orders rows by arrival, even if the clock is set back. `body` is JSON. Never change a script
# that was released: append another.
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
    # `change` grows with each change of a key, so that a server can read only new changes.
    """
    CREATE TABLE keys (
        id TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        is_revoked INTEGER NOT NULL,
        change INTEGER NOT NULL,
        last_used INTEGER,
        body BLOB NOT NULL
    );
    CREATE UNIQUE INDEX key_names ON keys (name) WHERE NOT is_revoked;
    CREATE INDEX key_changes ON keys (change);
    """,
    # `key` is the key's id, empty for requests without a key. `input` includes `cached`.
    """
    CREATE TABLE usage (
        day TEXT NOT NULL,
        key TEXT NOT NULL,
        tenant TEXT NOT NULL,
        model TEXT NOT NULL,
        is_batch INTEGER NOT NULL,
        requests INTEGER NOT NULL,
        input INTEGER NOT NULL,
        cached INTEGER NOT NULL,
        output INTEGER NOT NULL,
        PRIMARY KEY (day, key, tenant, model, is_batch)
    ) WITHOUT ROWID;
    """,
    # How often the engine process died while it computed a line of a batch.
    """
    CREATE TABLE deaths (
        batch TEXT NOT NULL,
        line INTEGER NOT NULL,
        count INTEGER NOT NULL,
        PRIMARY KEY (batch, line)
    ) WITHOUT ROWID;
    """,
    # Answers that later requests may continue. `items` is JSON, a list of ids.
    """
    CREATE TABLE answers (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        kind TEXT NOT NULL,
        previous TEXT,
        is_found INTEGER NOT NULL,
        items BLOB NOT NULL,
        asked BLOB NOT NULL,
        answer BLOB NOT NULL
    );
    """,
    # Files may expire, and come in parts. `body` is JSON.
    """
    ALTER TABLE files ADD COLUMN expires_at INTEGER;
    CREATE INDEX expiring_files ON files (expires_at) WHERE expires_at IS NOT NULL;
    CREATE TABLE uploads (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        expires_at INTEGER NOT NULL,
        body BLOB NOT NULL
    );
    CREATE INDEX expiring_uploads ON uploads (expires_at);
    """,
    # BLAKE2b of the content, as hexadecimal digits; empty for files of earlier versions.
    """
    ALTER TABLE files ADD COLUMN digest TEXT NOT NULL DEFAULT '';
    """,
    # The digest of a row's values (`row_digests.py`); empty for rows of earlier versions.
    """
    ALTER TABLE files ADD COLUMN row_digest TEXT NOT NULL DEFAULT '';
    ALTER TABLE batches ADD COLUMN row_digest TEXT NOT NULL DEFAULT '';
    ALTER TABLE results ADD COLUMN row_digest TEXT NOT NULL DEFAULT '';
    ALTER TABLE keys ADD COLUMN row_digest TEXT NOT NULL DEFAULT '';
    ALTER TABLE usage ADD COLUMN row_digest TEXT NOT NULL DEFAULT '';
    ALTER TABLE answers ADD COLUMN row_digest TEXT NOT NULL DEFAULT '';
    ALTER TABLE uploads ADD COLUMN row_digest TEXT NOT NULL DEFAULT '';
    """,
    # Tokens that a router's replicas (`here`) and its upstreams have computed, and their cost in
    # billionths of the currency's unit (`nanos`). `input` includes `cached`.
    """
    CREATE TABLE costs (
        day TEXT NOT NULL,
        upstream TEXT NOT NULL,
        model TEXT NOT NULL,
        currency TEXT NOT NULL,
        requests INTEGER NOT NULL,
        input INTEGER NOT NULL,
        cached INTEGER NOT NULL,
        output INTEGER NOT NULL,
        nanos INTEGER NOT NULL,
        row_digest TEXT NOT NULL,
        PRIMARY KEY (day, upstream, model, currency)
    ) WITHOUT ROWID;
    """,
    # The part of `costs` that is estimated, since an upstream did not report the usage.
    """
    CREATE TABLE cost_estimates (
        day TEXT NOT NULL,
        upstream TEXT NOT NULL,
        model TEXT NOT NULL,
        currency TEXT NOT NULL,
        estimated_requests INTEGER NOT NULL,
        estimated_nanos INTEGER NOT NULL,
        row_digest TEXT NOT NULL,
        PRIMARY KEY (day, upstream, model, currency)
    ) WITHOUT ROWID;
    """,
)


def migrate(db: Connection, path: Path) -> None:
    """Bring the tables of a database to the newest version, in one transaction.

    Raises:
        RecordsError: a newer version of Twostroke wrote the database.
    """
    [version] = db.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise RecordsError(
            f"The database {path} has version {version}, and this Twostroke reads up to "
            f"{len(MIGRATIONS)}: upgrade Twostroke, or choose another folder."
        )
    while version < len(MIGRATIONS):
        db.execute("BEGIN IMMEDIATE")  # another program may be migrating it
        [version] = db.execute("PRAGMA user_version").fetchone()
        for number, script in enumerate(MIGRATIONS[version:], version + 1):
            for statement in script.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {number}")
            version = number
        db.execute("COMMIT")
