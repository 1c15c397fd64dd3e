"""API keys in the database: creates, lists, changes and revokes keys, but never deletes them."""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from twostroke.core.errors import UsageError, nearest
from twostroke.server.http.api_key import MAX_WORD_LENGTH, WORD_FORM, WORD_PATTERN, Key
from twostroke.server.storage import DamagedRowError, FolderMarker
from twostroke.server.storage.row_digests import is_intact_in_sql, row_digest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path
    from sqlite3 import Connection

_INSERT: Final = """
    INSERT INTO keys (id, name, is_revoked, change, body, row_digest)
    VALUES (?, ?, 0, (SELECT coalesce(max(change), 0) + 1 FROM keys), ?, ?)
"""
_INTACT: Final = is_intact_in_sql("keys")
_UPDATE: Final = """
    UPDATE keys SET is_revoked = ?, body = ?, row_digest = ?,
        change = (SELECT max(change) + 1 FROM keys)
    WHERE id = ?
"""
_logger = logging.getLogger("twostroke.serve")
_key_decoder: Final = msgspec.json.Decoder(Key)  # created before threads use it


def digest(key: bytes) -> str:
    """Return the digest of an API key, which the database stores instead of the key."""
    return hashlib.sha256(key).hexdigest()


def add(db: Connection, name: str, tenant: str, **facts: Any) -> tuple[Key, str]:
    """Create an API key in the database; return it with its text, which is not stored.

    `facts` are further attributes of the `Key`, such as its limits.

    Raises:
        UsageError: a valid key has this name, or the name of the key or tenant is not valid.
    """
    names = [row[0] for row in db.execute("SELECT name FROM keys WHERE NOT is_revoked")]
    ids = [row[0] for row in db.execute("SELECT id FROM keys")]
    key, text = make_key(name, tenant, names=names, ids=ids, **facts)
    body = msgspec.json.encode(key)
    db.execute(_INSERT, (key.id, name, body, row_digest((key.id, name, body))))
    return key, text


def make_key(
    name: str, tenant: str, *, names: Collection[str], ids: Collection[str], **facts: Any
) -> tuple[Key, str]:
    """Return a new API key with its text.

    `names` are the names of all valid keys, and `ids` the ids of all keys. `facts` are further
    attributes of the `Key`.

    Raises:
        UsageError: a valid key has this name, or the name of the key or tenant is not valid.
    """
    for word in (name, tenant):
        if not WORD_PATTERN.fullmatch(word):
            raise UsageError(f"The name of a key or a tenant is {WORD_FORM}.")
    if name in names:
        raise UsageError(f"There is a key '{name}': choose another name, or revoke that one first.")
    id_ = secrets.token_hex(4)
    while id_ in ids:
        id_ = secrets.token_hex(4)
    text = f"ts-{id_}-{secrets.token_hex(32)}"
    now_s = time.time()
    key = Key(
        id=id_, name=name, tenant=tenant, digest=digest(text.encode()), created_at=now_s, **facts
    )
    return key, text


def keys_marker(folder: Path) -> FolderMarker:
    """Return the marker file that a database's folder gets when the first API key is created.

    The marker stays if the database is lost, so that a server does not start without keys.
    """
    return FolderMarker(folder, "has-keys")


def find(db: Connection, word: str) -> Key:
    """Return the API key that a user names by id or name.

    If several keys have the name, the valid key is returned.

    Raises:
        UsageError: no key has this id or name.
        DamagedRowError: the key's database row is damaged.
    """
    query = (
        f"SELECT id, body, {_INTACT} FROM keys WHERE id = ? OR name = ? "  # noqa: S608 constants
        "ORDER BY id != ?, is_revoked, rowid DESC"
    )
    row = db.execute(query, (word, word, word)).fetchone()
    if row is not None:
        return _decode(*row)
    raise unknown_key(word, chain.from_iterable(db.execute("SELECT id, name FROM keys")))


def unknown_key(word: str, ids_and_names: Iterable[str]) -> UsageError:
    """Return the error for a word that is neither the id nor the name of an API key."""
    hint = nearest(word, list(ids_and_names))
    return UsageError(f"There is no key '{word[:MAX_WORD_LENGTH]}'.{hint}")


def change(db: Connection, key: Key, **facts: Any) -> Key:
    """Change attributes of an API key in the database, and return the changed key.

    Raises:
        UsageError: the key is revoked.
    """
    key = changed_key(key, **facts)
    body = msgspec.json.encode(key)
    digest_of_row = row_digest((key.id, key.name, body))
    db.execute(_UPDATE, (key.revoked_at is not None, body, digest_of_row, key.id))
    return key


def changed_key(key: Key, **facts: Any) -> Key:
    """Return an API key with changed attributes.

    Raises:
        UsageError: the key is revoked.
    """
    if key.revoked_at is not None:
        raise UsageError(f"The key {key.id} is revoked, which is for good: add another.")
    return replace(key, **facts)


def newest_change(db: Connection) -> int:
    """Return a number that grows with each change of the API keys, so that servers see changes.

    It is 0 without keys.
    """
    [number] = db.execute("SELECT coalesce(max(change), 0) FROM keys").fetchone()
    return int(number)


def all_keys(db: Connection) -> list[tuple[Key, int | None]]:
    """Return all API keys of the database, the oldest first, each with its last use.

    The last use is a minute, as Unix time; None for a key that has not been used. A key whose row
    is damaged is logged and left out, so the server refuses requests with this key.
    """
    keys = []
    for *record, last_used in db.execute(
        f"SELECT id, body, {_INTACT}, last_used FROM keys ORDER BY rowid"  # noqa: S608 constants
    ):
        try:
            keys.append((_decode(*record), last_used))
        except DamagedRowError as error:
            _logger.error("%s", error)  # noqa: TRY400 the sentence is enough
    return keys


def store_last_use(db: Connection, id_: str, minute: int) -> None:
    """Store the minute, as Unix time, in which an API key was last used."""
    db.execute("UPDATE keys SET last_used = ? WHERE id = ?", (minute, id_))


def _decode(id_: str, body: bytes, is_intact: int) -> Key:
    try:
        if not is_intact:
            raise msgspec.DecodeError("its digest is another")
        return _key_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, UsageError):
        reason = "is damaged, and the key is refused: restore a backup, or add another key."
        raise DamagedRowError(f"The record of key {id_} {reason}") from None
