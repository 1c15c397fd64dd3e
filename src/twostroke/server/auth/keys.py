"""The API keys of a server, and the ASGI layer that checks them."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, Self

from starlette.requests import Request

from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.core.files import read_regular_file
from twostroke.server.auth.stored_keys import all_keys, digest, keys_marker
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
_PAGE_FILES_PREFIX: Final = "/page/"
# A router sends a tenant's name, its weight, and its service tiers if not all are allowed.
TENANT_HEADER: Final = b"x-twostroke-tenant"
_NO_KEY_SOURCE: Final = (
    "--require-keys needs a place where keys are: --api-keys, TWOSTROKE_API_KEY, --records or, for "
    "a router, --store."
)
_KEYS_LOST: Final = (
    "{folder} has had API keys, and its database has none: it was lost or replaced, and everybody "
    "could use the server. Restore a backup, make a key with `twostroke keys add NAME --records "
    "{folder}`, or remove {marker} to serve everybody."
)
_MISSING_KEY: Final = "is missing: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'."


class KeyMissingError(TwostrokeError):
    """The request has no API key, or its key is not valid."""

    http_status = 401
    code = "invalid_api_key"


class ApiKeys:
    """The API keys of a server: fixed keys, and keys of the database, which may change.

    Fixed keys come from a file or an environment variable.


    Only digests are stored. The time of a lookup can reveal only how a digest begins, which does
    not help to guess a key. Call the methods only in the event loop's thread.

    A router's key belongs to no tenant: a request with this key is for the tenant in its header.
    """

    def __init__(self, tenants: Mapping[str, str], *, asks: bool = False) -> None:
        """Create the fixed keys; `tenants` maps each key to its tenant.

        With `asks`, requests need a key even if there are no keys.

        Raises:
            UsageError: a key or a tenant's name has other than printable ASCII characters.
        """
        for key, tenant in tenants.items():
            if not WORD_PATTERN.fullmatch(key) or (tenant and not WORD_PATTERN.fullmatch(tenant)):
                raise UsageError(f"A key is {WORD_FORM}.")
        fixed_keys = [Key(tenant=tenants[key], digest=digest(key.encode())) for key in tenants]
        self._file_keys = {key.digest: key for key in fixed_keys}
        self._asks = asks or bool(fixed_keys)
        self._keys_by_digest = self._file_keys
        self._by_tenant = _by_tenant(fixed_keys)
        self._router_digest = ""
        self._stored_by_id: dict[str, Key] = {}
        self._last_used: dict[str, int] = {}  # the minute as Unix time, by id
        self._ids_with_unwritten_use: set[str] = set()

    @classmethod
    def read(
        cls,
        path: Path | None,
        key: str | None,
        records: Path | None = None,
        router: str | None = None,
        *,
        asks: bool = False,
        shared: Iterable[Key] | None = None,
    ) -> Self | None:
        """Load the API keys of a server from a file, an environment variable and a database.

        Returns None if no source is given. If the database's folder has had keys and has none now,
        the database was lost; then the server must not start without keys.

        A line of the file is `KEY` or `TENANT KEY`, or a comment that begins with #. A key without
        a tenant belongs to the tenant with the empty name.

        Args:
            path: the file with keys.
            key: the key from the environment.
            records: the folder of the database, `--records`.
            router: the key of a router.
            asks: whether requests need a key even if there are no keys.
            shared: the keys in the store that routers share, `--store`; None without a store.

        Raises:
            UsageError: the file cannot be read, a line is not valid, or `asks` is set without a
                source of keys. Messages never contain keys.
            RecordsError: the folder's database cannot be read, or has lost its keys.
        """
        sources = (path, key, records, router, shared)
        if all(source is None for source in sources):
            if asks:
                raise UsageError(_NO_KEY_SOURCE)
            return None
        tenants_by_key = _read_file(path) if path is not None else {}
        if key is not None:
            if not WORD_PATTERN.fullmatch(key):
                raise UsageError(f"The key in TWOSTROKE_API_KEY must be {WORD_FORM}.")
            tenants_by_key.setdefault(key, "")
        keys = cls(tenants_by_key, asks=asks)
        if router is not None:
            keys.set_router_key(router)
        if shared is not None:
            keys.replace_stored(shared)
        if records is not None:
            with open_database(records) as db:
                keys.replace_stored(key for key, _ in all_keys(db))
            marker = keys_marker(records)
            if keys._stored_by_id:
                marker.make()
            elif marker.is_there and not keys.are_required:
                raise RecordsError(_KEYS_LOST.format(folder=records, marker=marker.path))
        return keys

    @property
    def are_required(self) -> bool:
        """Whether requests need an API key; keys that were deleted later still count."""
        return self._asks or bool(self._router_digest)

    @property
    def refuse_everybody(self) -> bool:
        """Whether all requests are refused, because they need an API key and there is none."""
        return self.are_required and not self._keys_by_digest and not self._router_digest

    @property
    def have_tenants(self) -> bool:
        """Whether any API key belongs to a tenant with a name."""
        return any(self._by_tenant)

    def set_router_key(self, router: str) -> None:
        """Set the API key with which a router may send requests for all tenants.

        Raises:
            UsageError: the key has other than printable ASCII characters.
        """
        check_router(router)
        self._router_digest = digest(router.encode())

    def is_router(self, text: bytes) -> bool:
        """Return whether the text of an API key is the router's key."""
        return bool(self._router_digest) and digest(text) == self._router_digest

    def replace_stored(self, keys: Iterable[Key]) -> None:
        """Replace the API keys that were read from the database."""
        self._stored_by_id = {key.id: key for key in keys}
        self._keys_by_digest = {
            key.digest: key for key in self._stored_by_id.values()
        } | self._file_keys
        self._asks |= bool(self._keys_by_digest)  # permanent: lost records must not open the server
        self._by_tenant = _by_tenant(self._keys_by_digest.values())

    def find(self, text: bytes) -> Key | None:
        """Return the valid API key with this text, and note its use; None if no key matches."""
        key = self._keys_by_digest.get(digest(text))
        if key is None or key.state != "valid":
            return None
        minute = int(time.time() // 60 * 60)
        if key.id and self._last_used.get(key.id) != minute:
            self._last_used[key.id] = minute
            self._ids_with_unwritten_use.add(key.id)
        return key

    def has_valid(self, tenant: str) -> bool:
        """Return whether a tenant may send requests: it has a valid API key, or needs no key."""
        tenant_keys = self._by_tenant.get(tenant, ())
        needs_no_key = not self._keys_by_digest and (bool(self._router_digest) or not self._asks)
        return needs_no_key or any(key.state == "valid" for key in tenant_keys)

    def has_tenant(self, tenant: str) -> bool:
        """Return whether any API key, valid or not, belongs to a tenant."""
        return tenant in self._by_tenant

    def with_id(self, id_: str) -> Key | None:
        """Return the database's API key with an id, valid or not; None if the id is unknown."""
        return self._stored_by_id.get(id_)

    @property
    def fixed(self) -> list[tuple[str, str]]:
        """The tenants and digests of the keys of the file and of the environment, in order."""
        return sorted((key.tenant, key.digest) for key in self._file_keys.values())

    @property
    def stored(self) -> list[Key]:
        """The keys that were read from the database or the store, valid or not."""
        return list(self._stored_by_id.values())

    def take_uses(self) -> dict[str, int]:
        """Return the API keys used since the last call of this method, to store their last use.

        The result has, by key id, the minute of the key's last use, as Unix time.
        """
        ids = self._ids_with_unwritten_use
        self._ids_with_unwritten_use = set()
        return {id_: self._last_used[id_] for id_ in ids}

    def put_back(self, uses: Iterable[str]) -> None:
        """Make the next `take_uses` return the last uses of these key ids again.

        Call this if the uses could not be written to the database.
        """
        self._ids_with_unwritten_use.update(uses)


class KeyCheck:
    """The ASGI layer that refuses requests without a valid API key.

    It notes the key and tenant of accepted requests. `GET /health`, the paths below it and the web
    UI's files need no key, as load balancers and browsers have none. Internal requests have the key
    of their sender, valid or not.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        """Wrap the inner ASGI layers `app`; accept requests with a key of `keys`."""
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the inner layers if it has a valid API key or needs none.

        Other requests are answered with an error.
        """
        if scope["type"] == "http" and (sender := sender_of(scope)) is not None:
            if (sender_key := self._keys.with_id(sender.key)) is not None:
                served_of(scope).set_owner(sender_key)
        elif scope["type"] == "http" and self._keys.are_required and not _is_open(scope):
            text = _key(scope)
            if text is not None and self._keys.is_router(text):
                try:
                    served_of(scope).set_owner(_tenant_key(scope))
                    served_of(scope).is_from_router = True
                except UsageError as error:
                    await to_response(error, scope)(scope, receive, send)
                    return
                await self._app(scope, receive, send)
                return
            key = self._keys.find(text) if text is not None else None
            if key is None:
                reason = "is not valid." if text is not None else _MISSING_KEY
                response = to_response(KeyMissingError(f"The API key {reason}"), scope)
                response.headers["www-authenticate"] = "Bearer"
                response.headers["connection"] = "close"  # without waiting for the body
                await response(scope, receive, send)
                return
            served_of(scope).set_owner(key)
        await self._app(scope, receive, send)


def check_router(key: str) -> None:
    """Check that a router's key can be sent in an HTTP header.

    Raises:
        UsageError: the key has other than printable ASCII characters.
    """
    if not WORD_PATTERN.fullmatch(key):
        raise UsageError(f"The key in TWOSTROKE_REPLICA_KEY must be {WORD_FORM}.")


def _by_tenant(keys: Iterable[Key]) -> dict[str, list[Key]]:
    keys_by_tenant: dict[str, list[Key]] = {}
    for key in keys:
        keys_by_tenant.setdefault(key.tenant, []).append(key)
    return keys_by_tenant


def _is_open(scope: Scope) -> bool:
    if scope["method"] not in {"GET", "HEAD"}:
        return False
    path = scope["path"]
    is_page = path == "/" and wants_page(Request(scope))
    return is_page or path in OPEN_PATHS or path.startswith(_PAGE_FILES_PREFIX)


def _key(scope: Scope) -> bytes | None:
    """Return the API key from a request's `Authorization` header, or else from `x-api-key`."""
    key: bytes | None = None
    for name, value in scope["headers"]:
        if name == b"authorization" and value[: len(_BEARER)].lower() == _BEARER:
            return bytes(value[len(_BEARER) :].strip())
        if name == b"x-api-key":
            key = bytes(value.strip())
    return key


def _tenant_key(scope: Scope) -> Key:
    """Return a key for the tenant that a router names in a request's header.

    The header also has the tenant's weight and service tiers.

    Raises:
        UsageError: the header is not valid.
    """
    header = next((value for name, value in scope["headers"] if name == TENANT_HEADER), b"")
    words: list[str] = header.decode("latin-1").split(" ")
    try:
        tenant, weight, classes = [*words, *("", "1", "")[len(words) :]]  # with defaults
        service_tiers = tuple(classes.split(",")) if classes else None
        return Key(tenant=tenant, digest="", weight=float(weight), classes=service_tiers)
    except ValueError:
        raise UsageError("The header x-twostroke-tenant must be NAME WEIGHT [CLASSES].") from None


def _is_surely_a_path(path: Path) -> bool:
    """Whether a value of `--api-keys` is a path, not a key that a user passed by mistake.

    Errors may show paths, but never keys. A value counts as a path if the file or its folder
    exists; a slash alone does not tell, since keys may have slashes, too.
    """
    has_folder = path.parent.name != "" and path.parent.is_dir()
    return has_folder or os.path.lexists(path)


def _read_file(path: Path) -> dict[str, str]:
    try:
        text = read_regular_file(path).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "keys are ASCII characters"
        name = f" {path}" if _is_surely_a_path(path) else ""
        text = (
            "takes the path of a file with keys, one on each line, and the file"
            f"{name} cannot be read: {reason}. For a single key, set TWOSTROKE_API_KEY."
        )
        raise UsageError(text, field="api_keys") from None
    tenants_by_key: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        *tenants, key = words
        if len(words) > 2 or not all(WORD_PATTERN.fullmatch(word) for word in words):
            message = f"Line {number} of {path} is neither 'KEY' nor 'TENANT KEY'."
            raise UsageError(message)
        if key in tenants_by_key:
            message = f"Line {number} of {path} repeats a key of an earlier line."
            raise UsageError(message)
        tenants_by_key[key] = "".join(tenants)
    if not tenants_by_key:
        raise UsageError(f"{path} has no keys.")
    return tenants_by_key
