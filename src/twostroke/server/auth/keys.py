"""API keys, their tenants, and the layer that checks them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Self

from starlette.requests import Request

from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.core.files import read_regular_file
from twostroke.server.auth.key import all_keys, digest, had_keys
from twostroke.server.http.api_key import OPEN_PATHS, WORD_FORM, WORD_PATTERN, Key
from twostroke.server.http.errors import to_response
from twostroke.server.http.internal_requests import sender_of
from twostroke.server.http.origins import wants_page
from twostroke.server.http.request_context import served_of
from twostroke.server.storage import RecordsError, open_database

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from starlette.types import ASGIApp, Receive, Scope, Send

_BEARER: Final = b"bearer "
_FILES: Final = "/page/"
# From a router: a tenant's name, its weight, and the classes that it may have, if not all.
TENANT_HEADER: Final = b"x-twostroke-tenant"
_NO_SOURCE: Final = (
    "--require-keys needs a place where keys are: --api-keys, TWOSTROKE_API_KEY or --records."
)
_LOST: Final = (
    "{folder} has had API keys, and its database has none: it was lost or replaced, and everybody "
    "could use the server. Restore a backup, make a key with `twostroke keys add NAME --records "
    "{folder}`, or remove {mark} to serve everybody."
)
_MISSING: Final = "is missing: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'."


class KeyMissingError(TwostrokeError):
    """The request has no key, or one that is not valid."""

    http_status = 401
    code = "invalid_api_key"


class ApiKeys:
    """The keys of a file, which stay, and those of the records, which change while a server runs.

    Only digests are kept. The time of a lookup can only reveal how a digest begins, which does not
    help to guess a key. It belongs to the event loop.

    A router's key is none of a tenant: whoever shows it speaks for the tenant that a header names.
    """

    def __init__(self, tenants: Mapping[str, str], *, asks: bool = False) -> None:
        """Take a table from keys to tenants; with `asks`, requests need one even while it is empty.

        Raises:
            UsageError: one has other than printable ASCII characters.
        """
        for key, tenant in tenants.items():
            if not WORD_PATTERN.fullmatch(key) or (tenant and not WORD_PATTERN.fullmatch(tenant)):
                raise UsageError(f"A key is {WORD_FORM}.")
        made = [Key(tenant=tenants[key], digest=digest(key.encode())) for key in tenants]
        self._fixed = {key.digest: key for key in made}
        self._asks = asks or bool(made)
        self._all = self._fixed
        self._by_tenant = _by_tenant(made)
        self._router = ""  # its digest
        self._by_id: dict[str, Key] = {}
        self._last_used: dict[str, int] = {}  # the minute as Unix time, by id
        self._unwritten: set[str] = set()

    @classmethod
    def read(
        cls,
        path: Path | None,
        key: str | None,
        records: Path | None = None,
        router: str | None = None,
        *,
        asks: bool = False,
    ) -> Self | None:
        """Return the keys of a file, of the environment and of a folder; None without any of these.

        A folder that has had keys and has none any more has lost its database: its keys are not
        there to be asked for, and nobody meant to open the server.

        A line of the file is `KEY` or `TENANT KEY`, or a comment that begins with #. A key without
        a tenant belongs to the tenant with the empty name.

        Raises:
            UsageError: the file cannot be read, a line has another form, or `asks` is set without
                any keys. Messages have no keys.
            RecordsError: the folder has no database that can be read, or has lost its keys.
        """
        if path is None and key is None and records is None and router is None:
            if asks:
                raise UsageError(_NO_SOURCE)
            return None
        found = _read(path) if path is not None else {}
        if key is not None:
            if not WORD_PATTERN.fullmatch(key):
                raise UsageError(f"The key in TWOSTROKE_API_KEY must be {WORD_FORM}.")
            found.setdefault(key, "")
        keys = cls(found, asks=asks)
        if router is not None:
            keys.trust(router)
        if records is not None:
            with open_database(records) as db:
                keys.keep(key for key, _ in all_keys(db))
            mark = had_keys(records)
            if keys._by_id:
                mark.make()
            elif mark.is_there and not keys.are_required:
                raise RecordsError(_LOST.format(folder=records, mark=mark.path))
        return keys

    @property
    def are_required(self) -> bool:
        """Whether a request needs a key: there are some, or have been some."""
        return self._asks or bool(self._router)

    @property
    def refuse_everybody(self) -> bool:
        """Whether a request needs a key, and there is none."""
        return self.are_required and not self._all and not self._router

    @property
    def have_tenants(self) -> bool:
        """Whether a key belongs to a tenant that has a name."""
        return any(self._by_tenant)

    def trust(self, router: str) -> None:
        """Let a router speak for tenants, which shows this key.

        Raises:
            UsageError: it has other than printable ASCII characters.
        """
        check_router(router)
        self._router = digest(router.encode())

    def is_router(self, text: bytes) -> bool:
        """Return whether a key is the router's."""
        return bool(self._router) and digest(text) == self._router

    def keep(self, keys: Iterable[Key]) -> None:
        """Replace the keys of the records by these."""
        self._by_id = {key.id: key for key in keys}
        self._all = {key.digest: key for key in self._by_id.values()} | self._fixed
        self._asks |= bool(self._all)  # for good: what empties the records opens no server
        self._by_tenant = _by_tenant(self._all.values())

    def find(self, text: bytes) -> Key | None:
        """Return a key that is valid now, and note its use; None if there is none."""
        key = self._all.get(digest(text))
        if key is None or key.state != "valid":
            return None
        minute = int(time.time() // 60 * 60)
        if key.id and self._last_used.get(key.id) != minute:
            self._last_used[key.id] = minute
            self._unwritten.add(key.id)
        return key

    def has_valid(self, tenant: str) -> bool:
        """Return whether a tenant has a key that is valid now, or needs none."""
        own = self._by_tenant.get(tenant, ())
        needs_none = not self._all and (bool(self._router) or not self._asks)
        return needs_none or any(key.state == "valid" for key in own)

    def with_id(self, id_: str) -> Key | None:
        """Return the key of the records with an id, valid or not; None if there is none."""
        return self._by_id.get(id_)

    def take_uses(self) -> dict[str, int]:
        """Return the minute of the last use of each key since this was called, by id."""
        unwritten, self._unwritten = self._unwritten, set()
        return {id_: self._last_used[id_] for id_ in unwritten}

    def put_back(self, uses: Iterable[str]) -> None:
        """Return the last uses of these keys again, since they could not be written."""
        self._unwritten.update(uses)


class KeyCheck:
    """Lets requests with a valid key pass, and notes the key and its tenant.

    `GET /health`, its parts and the page's files need none: load balancers and browsers have none.
    Requests from inside have the tenant and the key of their sender, valid or not.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        """Wrap `app`."""
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and (sender := sender_of(scope)) is not None:
            if (own := self._keys.with_id(sender.key)) is not None:
                served_of(scope).set_owner(own)
        elif scope["type"] == "http" and self._keys.are_required and not _is_open(scope):
            text = _key(scope)
            if text is not None and self._keys.is_router(text):
                try:
                    served_of(scope).set_owner(_spoken_for(scope))
                    served_of(scope).is_from_router = True
                except UsageError as error:
                    await to_response(error, scope)(scope, receive, send)
                    return
                await self._app(scope, receive, send)
                return
            key = self._keys.find(text) if text is not None else None
            if key is None:
                reason = "is not valid." if text is not None else _MISSING
                response = to_response(KeyMissingError(f"The API key {reason}"), scope)
                response.headers["www-authenticate"] = "Bearer"
                response.headers["connection"] = "close"  # without waiting for the body
                await response(scope, receive, send)
                return
            served_of(scope).set_owner(key)
        await self._app(scope, receive, send)


def check_router(key: str) -> None:
    """Raise UsageError if a router's key has other than printable ASCII characters."""
    if not WORD_PATTERN.fullmatch(key):
        raise UsageError(f"The key in TWOSTROKE_REPLICA_KEY must be {WORD_FORM}.")


def _by_tenant(keys: Iterable[Key]) -> dict[str, list[Key]]:
    found: dict[str, list[Key]] = {}
    for key in keys:
        found.setdefault(key.tenant, []).append(key)
    return found


def _is_open(scope: Scope) -> bool:
    if scope["method"] not in {"GET", "HEAD"}:
        return False
    path = scope["path"]
    is_page = path == "/" and wants_page(Request(scope))
    return is_page or path in OPEN_PATHS or path.startswith(_FILES)


def _key(scope: Scope) -> bytes | None:
    """Return the key in the header of OpenAI's clients, or else of Anthropic's."""
    found: bytes | None = None
    for name, value in scope["headers"]:
        if name == b"authorization" and value[: len(_BEARER)].lower() == _BEARER:
            return bytes(value[len(_BEARER) :].strip())
        if name == b"x-api-key":
            found = bytes(value.strip())
    return found


def _spoken_for(scope: Scope) -> Key:
    """Return a key of the tenant that a router speaks for; raises UsageError."""
    said = next((value for name, value in scope["headers"] if name == TENANT_HEADER), b"")
    words: list[str] = said.decode("latin-1").split(" ")
    try:
        tenant, weight, classes = [*words, *("", "1", "")[len(words) :]]
        allowed = tuple(classes.split(",")) if classes else None
        return Key(tenant=tenant, digest="", weight=float(weight), classes=allowed)
    except ValueError:
        raise UsageError("The header x-twostroke-tenant must be NAME WEIGHT [CLASSES].") from None


def _read(path: Path) -> dict[str, str]:
    try:
        text = read_regular_file(path).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "keys are ASCII characters"
        raise UsageError(f"The keys in {path} cannot be read: {why}.") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        *tenants, key = words
        if len(words) > 2 or not all(WORD_PATTERN.fullmatch(word) for word in words):
            message = f"Line {number} of {path} is neither 'KEY' nor 'TENANT KEY'."
            raise UsageError(message)
        if key in found:
            message = f"Line {number} of {path} repeats a key of an earlier line."
            raise UsageError(message)
        found[key] = "".join(tenants)
    if not found:
        raise UsageError(f"{path} has no keys.")
    return found
