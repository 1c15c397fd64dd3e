"""API keys and usage in the store, for the commands `twostroke keys` and `twostroke usage`.

The functions correspond to `server/auth/stored_keys.py` and `server/auth/usage.py`, for a
connection to Redis in place of a database.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import UsageError
from twostroke.fleet.shared_records.script import BEGUN_S, PREFIX
from twostroke.server.auth.stored_keys import changed_key, make_key, unknown_key
from twostroke.server.auth.usage import Amount, Owner
from twostroke.server.http.api_key import Key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_KEYS: Final = PREFIX + "keys"
_COUNTS: Final = ("requests", "input", "cached", "output")
_logger = logging.getLogger("twostroke.router")
_key_decoder: Final = msgspec.json.Decoder(Key)
_owner_decoder: Final = msgspec.json.Decoder(tuple[str, str, str, bool])


def add(store: Any, name: str, tenant: str, **facts: Any) -> tuple[Key, str]:
    """Create an API key in the store; return it with its text, which is not stored.

    `facts` are further attributes of the `Key`, such as its limits.

    Raises:
        UsageError: a valid key has this name, or the name of the key or tenant is not valid.
    """

    def make(keys: list[Key]) -> tuple[Key, str]:
        names = {key.name for key in keys if key.revoked_at is None}
        return make_key(name, tenant, names=names, ids={key.id for key in keys}, **facts)

    return _write(store, make)


def find(store: Any, word: str) -> Key:
    """Return the API key that a user names by id or name.

    If several keys have the name, the valid key is returned, or else the newest.

    Raises:
        UsageError: no key has this id or name.
    """
    return _find([key for key, _ in all_keys(store)], word)


def change(store: Any, key: Key, **facts: Any) -> Key:
    """Change attributes of an API key in the store, and return the changed key.

    Raises:
        UsageError: the key is revoked, or is not in the store any more.
    """

    def make(keys: list[Key]) -> tuple[Key, str]:
        return changed_key(_find(keys, key.id), **facts), ""

    return _write(store, make)[0]


def all_keys(store: Any) -> list[tuple[Key, int | None]]:
    """Return all API keys of the store, the oldest first, each with its last use.

    The last use is a minute, as Unix time; None for a key that has not been used. A damaged record
    is logged and left out, so that routers refuse the key.
    """
    uses = store.hgetall(PREFIX + "last-used")
    keys = decode_keys(store.hgetall(_KEYS))
    return [(key, int(uses[key.id.encode()]) if key.id.encode() in uses else None) for key in keys]


def decode_keys(records: dict[bytes, bytes]) -> list[Key]:
    """Decode the records of API keys, and return the keys, the oldest first.

    Damaged records are logged and left out.
    """
    keys: list[Key] = []
    for id_, record in records.items():
        try:
            key = _key_decoder.decode(record)
        except (msgspec.MsgspecError, UsageError, UnicodeDecodeError):
            name = id_.decode("ascii", "replace")
            _logger.error(  # noqa: TRY400 the sentence is enough
                "The record of key %s in the store is damaged, and the key is refused: "
                "restore a backup, or add another key.",
                name,
            )
            continue
        keys.append(key)
    return sorted(keys, key=lambda key: (key.created_at, key.id))


def encode_owner(owner: Owner) -> str:
    """Return the name under which the store counts an owner's usage, without the day."""
    return msgspec.json.encode((owner.key, owner.tenant, owner.model, owner.is_batch)).decode()


def amounts(store: Any, since: str, until: str) -> list[Amount]:
    """Return the usage from the day `since` to the day `until`, ordered by day.

    Damaged counts are left out; `damaged_owners` returns their owners.
    """
    return [
        Amount(owner, *(int(counts.get(name, 0)) for name in _COUNTS))
        for owner, counts in _usage(store, since, until)
        if are_intact(counts)
    ]


def damaged_owners(store: Any, since: str, until: str) -> list[Owner]:
    """Return the owners of damaged usage counts, from the day `since` to the day `until`."""
    return [owner for owner, counts in _usage(store, since, until) if not are_intact(counts)]


def sum_rows(
    store: Any, days_name: str, prefix: str, since: str, until: str
) -> Iterable[tuple[str, str, dict[str, bytes]]]:
    """Yield the rows of the hashes that count sums by day, from `since` to `until`.

    Each row is a day, the text of an owner, and the owner's counts by name. `days_name` is the set
    of days with counts; `prefix` and the day make the name of a hash.
    """
    days = sorted(day.decode("ascii", "replace") for day in store.smembers(PREFIX + days_name))
    for day in days:
        if not since <= day <= until:
            continue
        rows: dict[str, dict[str, bytes]] = {}
        for field, count in store.hgetall(PREFIX + prefix + day).items():
            name, _, text = field.decode("utf-8", "replace").partition(" ")
            rows.setdefault(text, {})[name] = count
        yield from ((day, text, rows[text]) for text in sorted(rows))


def _usage(store: Any, since: str, until: str) -> Iterable[tuple[Owner, dict[str, bytes]]]:
    for day, text, counts in sum_rows(store, "usage-days", "usage:", since, until):
        try:
            owner = Owner(day, *_owner_decoder.decode(text))
        except msgspec.MsgspecError:
            yield Owner(day, "", "", text, is_batch=False), {"damaged": b""}
        else:
            yield owner, counts


def are_intact(counts: dict[str, bytes], names: Iterable[str] = _COUNTS) -> bool:
    """Return whether all counts of a row are numbers and all their names are in `names`."""
    return all(count.isdigit() for count in counts.values()) and set(counts) <= set(names)


def _find(keys: list[Key], word: str) -> Key:
    named = [key for key in keys if word in {key.id, key.name}]
    if not named:
        raise unknown_key(word, [text for key in keys for text in (key.id, key.name)])
    return max(named, key=lambda key: (key.id == word, key.revoked_at is None, key.created_at))


def _write(store: Any, make: Callable[[list[Key]], tuple[Key, str]]) -> tuple[Key, str]:
    """Store a new or changed API key in one transaction.

    `make` gets all current keys, and returns the key to store with its text; both are returned.
    """

    def write(pipe: Any) -> tuple[Key, str]:
        key, text = make(decode_keys(pipe.hgetall(_KEYS)))
        is_empty = not pipe.exists(PREFIX + "identity")
        pipe.multi()
        if is_empty:  # perhaps its data were removed, and routers add their keys
            pipe.set(PREFIX + "begun", "1", ex=BEGUN_S)
        pipe.set(PREFIX + "identity", secrets.token_hex(8), nx=True)
        pipe.hset(_KEYS, key.id, msgspec.json.encode(key))
        pipe.set(PREFIX + "change", secrets.token_hex(8))
        return key, text

    key_and_text: tuple[Key, str] = store.transaction(
        write, _KEYS, PREFIX + "identity", value_from_callable=True
    )
    return key_and_text
