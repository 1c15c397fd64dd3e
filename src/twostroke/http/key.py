"""API keys as records hold them: made, listed, changed and revoked; none is ever deleted."""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from twostroke.core.errors import UsageError, nearest
from twostroke.http.api_key import FORM, MAX_LENGTH, WORD, Key
from twostroke.records import Mark

if TYPE_CHECKING:
    from pathlib import Path
    from sqlite3 import Connection

_INSERT: Final = """
    INSERT INTO keys (id, name, is_revoked, change, body)
    VALUES (?, ?, 0, (SELECT coalesce(max(change), 0) + 1 FROM keys), ?)
"""
_UPDATE: Final = """
    UPDATE keys SET is_revoked = ?, body = ?, change = (SELECT max(change) + 1 FROM keys)
    WHERE id = ?
"""


_decoder: Final = msgspec.json.Decoder(Key)  # made before threads use it


def digest(key: bytes) -> str:
    """Return what is kept of a key."""
    return hashlib.sha256(key).hexdigest()


def add(db: Connection, name: str, tenant: str, **facts: Any) -> tuple[Key, str]:
    """Keep a new key, and return it with its text, which nobody can find out later.

    Raises:
        UsageError: a key of this name is there, or a word has another form.
    """
    for word in (name, tenant):
        if not WORD.fullmatch(word):
            raise UsageError(f"The name of a key or a tenant is {FORM}.")
    if db.execute("SELECT 1 FROM keys WHERE name = ? AND NOT is_revoked", (name,)).fetchone():
        raise UsageError(f"There is a key '{name}': choose another name, or revoke that one first.")
    id_ = secrets.token_hex(4)
    while db.execute("SELECT 1 FROM keys WHERE id = ?", (id_,)).fetchone():
        id_ = secrets.token_hex(4)
    text = f"ts-{id_}-{secrets.token_hex(32)}"
    now_s = time.time()
    key = Key(
        id=id_, name=name, tenant=tenant, digest=digest(text.encode()), created_at=now_s, **facts
    )
    db.execute(_INSERT, (id_, name, msgspec.json.encode(key)))
    return key, text


def had_keys(folder: Path) -> Mark:
    """Return the mark of a records folder that has had keys, which a lost database cannot take."""
    return Mark(folder, "has-keys")


def find(db: Connection, word: str) -> Key:
    """Return the key with this id or name, rather one that is not revoked; raises UsageError."""
    query = (
        "SELECT body FROM keys WHERE id = ? OR name = ? ORDER BY id != ?, is_revoked, rowid DESC"
    )
    found = db.execute(query, (word, word, word)).fetchone()
    if found is not None:
        return _decode(found[0])
    known = [one for pair in db.execute("SELECT id, name FROM keys") for one in pair]
    raise UsageError(f"There is no key '{word[:MAX_LENGTH]}'.{nearest(word, known)}")


def change(db: Connection, key: Key, **facts: Any) -> Key:
    """Keep new facts of a key, and return it.

    Raises:
        UsageError: it is revoked.
    """
    if key.revoked_at is not None:
        raise UsageError(f"The key {key.id} is revoked, which is for good: add another.")
    key = replace(key, **facts)
    db.execute(_UPDATE, (key.revoked_at is not None, msgspec.json.encode(key), key.id))
    return key


def newest_change(db: Connection) -> int:
    """Return a number that grows with each change; 0 without keys."""
    [number] = db.execute("SELECT coalesce(max(change), 0) FROM keys").fetchone()
    return int(number)


def all_keys(db: Connection) -> list[tuple[Key, int | None]]:
    """Return all keys, the oldest first, each with the minute of its last use as Unix time."""
    rows = db.execute("SELECT body, last_used FROM keys ORDER BY rowid")
    return [(_decode(body), last_used) for body, last_used in rows]


def note_use(db: Connection, id_: str, minute: int) -> None:
    """Keep the minute of a key's last use."""
    db.execute("UPDATE keys SET last_used = ? WHERE id = ?", (minute, id_))


def _decode(body: bytes) -> Key:
    return _decoder.decode(body)
