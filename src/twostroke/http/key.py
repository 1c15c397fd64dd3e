"""API keys as records hold them: made, listed, changed and revoked; none is ever deleted."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import field
from msgspec.structs import replace

from twostroke.core.errors import RequestError, UsageError, nearest
from twostroke.core.frozen import Frozen
from twostroke.core.ranges import check_range
from twostroke.core.service import BATCH_SERVICE, SERVICES
from twostroke.records import Mark

if TYPE_CHECKING:
    from pathlib import Path
    from sqlite3 import Connection

MAX_LENGTH: Final = 512  # of a key, and of the names of keys and tenants
WORD: Final = re.compile(rf"[!-~]{{1,{MAX_LENGTH}}}")
FORM: Final = f"1 to {MAX_LENGTH} printable ASCII characters without spaces"
CLASSES: Final = tuple(name for name in SERVICES if name != BATCH_SERVICE)
_MOST: Final = 10**12
_INSERT: Final = """
    INSERT INTO keys (id, name, is_revoked, change, body)
    VALUES (?, ?, 0, (SELECT coalesce(max(change), 0) + 1 FROM keys), ?)
"""
_UPDATE: Final = """
    UPDATE keys SET is_revoked = ?, body = ?, change = (SELECT max(change) + 1 FROM keys)
    WHERE id = ?
"""


class ClassError(RequestError):
    """A key's requests may not have the class of service that one asks for."""

    http_status = 403
    code = "class_not_allowed"


class KeyLimits(Frozen):
    """What a key may use; None is no limit. `parallel` requests may run at the same time."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    parallel: int | None = None

    def __post_init__(self) -> None:
        """Raise UsageError if a limit is out of range."""
        check_range(self, *self.__struct_fields__, least=1, most=_MOST)


class Key(Frozen, kw_only=True):
    """A key and its owner. Times are Unix times in seconds.

    Attributes:
        id: how people call it, and the beginning of the key; empty for one of a file.
        name: what it is for; keys that are not revoked have different names.
        tenant: to whom it belongs.
        digest: SHA-256 of the key. A key has 256 random bits, which nobody finds by trying, so
            neither salt nor a slow hash would add anything.
        weight: its tenant's share of the engine under load, beside those of others.
        classes: the classes of service that its requests may have; None for all. Where the default
            is not among them, requests that name none have the first.
        expires_at: from then on it is refused.
        revoked_at: since when it is refused for good.
    """

    id: str = ""
    name: str = ""
    tenant: str
    digest: str
    weight: float = 1.0
    classes: tuple[str, ...] | None = None
    limits: KeyLimits = field(default_factory=KeyLimits)
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None

    def __post_init__(self) -> None:
        """Raise UsageError if the weight is out of range, or a class is unknown."""
        check_range(self, "weight", least=0.01, most=1000)
        for name in self.classes or ():
            if name not in CLASSES:
                reason = f"must be classes of {', '.join(CLASSES)}, got '{name}'"
                raise UsageError(f"{reason}.{nearest(name, CLASSES)}", field="classes")

    def class_of(self, service: str, priority: int, *, is_named: bool) -> tuple[str, int]:
        """Return class and priority of a request that asks for these.

        Where it does not name a class (`is_named`), it has the first one of the key.

        Raises:
            ClassError: the key may not have the class, or a priority before all of its classes.
        """
        if self.classes is None:
            return service, priority
        named = ", ".join(self.classes)
        if service not in self.classes:
            if is_named:
                reason = f"is '{service}', and this key may have: {named}."
                raise ClassError(reason, field="service_tier")
            is_own = priority != SERVICES[service]
            service = self.classes[0]
            priority = priority if is_own else SERVICES[service]
        if priority < (first := min(SERVICES[name] for name in self.classes)):
            reason = f"must be at least {first} for this key, whose classes are: {named}."
            raise ClassError(reason, field="priority")
        return service, priority

    @property
    def state(self) -> str:
        """Valid, expired or revoked."""
        if self.revoked_at is not None:
            return "revoked"
        is_over = self.expires_at is not None and self.expires_at <= time.time()
        return "expired" if is_over else "valid"


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
