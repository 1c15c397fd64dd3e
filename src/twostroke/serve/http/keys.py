"""API keys, their tenants, and the layer that checks them."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Final, Self

from starlette.requests import Request

from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.serve.http.errors import to_response
from twostroke.serve.http.inside import sender_of
from twostroke.serve.observe.served import served_of
from twostroke.serve.page.site import wants_page

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from starlette.types import ASGIApp, Receive, Scope, Send

MAX_LENGTH: Final = 512  # of a key or a tenant's name
_WORD: Final = re.compile(rf"[!-~]{{1,{MAX_LENGTH}}}")
_FORM: Final = f"1 to {MAX_LENGTH} printable ASCII characters without spaces"
_BEARER: Final = b"bearer "
# For load balancers and supervisors.
OPEN_PATHS: Final = ("/health", "/health/live", "/health/ready", "/health/progress")
_FILES: Final = "/page/"
_MISSING: Final = "is missing: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'."


class KeyMissingError(TwostrokeError):
    """The request has no key, or an unknown one."""

    http_status = 401
    code = "invalid_api_key"


class ApiKeys:
    """Keys and their tenants, as digests.

    The time of a lookup can only reveal how a digest begins, which does not help to guess a key.
    """

    def __init__(self, tenants: Mapping[str, str]) -> None:
        """Take a table from keys to tenants.

        Raises:
            UsageError: there are none, or one has other than printable ASCII characters.
        """
        if not tenants:
            raise UsageError("The list of keys is empty: give at least one key.")
        for key, tenant in tenants.items():
            if not _WORD.fullmatch(key) or (tenant and not _WORD.fullmatch(tenant)):
                raise UsageError(f"A key is {_FORM}.")
        self._tenants = {_digest(key.encode()): tenant for key, tenant in tenants.items()}

    @classmethod
    def read(cls, path: Path | None, key: str | None) -> Self | None:
        """Return the keys of a file and of the environment; None without either.

        A line of the file is `KEY` or `TENANT KEY`, or a comment that begins with #. A key without
        a tenant belongs to the tenant with the empty name.

        Raises:
            UsageError: the file cannot be read, or a line has another form. Messages have no keys.
        """
        if path is None and key is None:
            return None
        found = _read(path) if path is not None else {}
        if key is not None:
            if not _WORD.fullmatch(key):
                raise UsageError(f"The key in TWOSTROKE_API_KEY must be {_FORM}.")
            found.setdefault(key, "")
        return cls(found)

    def tenant_of(self, key: bytes) -> str | None:
        """Return the tenant of a key; None if the key is unknown."""
        return self._tenants.get(_digest(key))


class KeyCheck:
    """Lets requests with a known key pass, and notes their tenant.

    `GET /health`, its parts and the page's files need none: load balancers and browsers have none.
    Requests from inside have their tenant.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        """Wrap `app`."""
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and not _is_open(scope) and sender_of(scope) is None:
            key = _key(scope)
            tenant = self._keys.tenant_of(key) if key is not None else None
            if tenant is None:
                reason = "is not valid." if key is not None else _MISSING
                response = to_response(KeyMissingError(f"The API key {reason}"), scope)
                response.headers["www-authenticate"] = "Bearer"
                response.headers["connection"] = "close"  # without waiting for the body
                await response(scope, receive, send)
                return
            served_of(scope).tenant = tenant
        await self._app(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


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


def _read(path: Path) -> dict[str, str]:
    try:
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "keys are ASCII characters"
        raise UsageError(f"The keys in {path} cannot be read: {why}.") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        *tenants, key = words
        if len(words) > 2 or not all(_WORD.fullmatch(word) for word in words):
            message = f"Line {number} of {path} is neither 'KEY' nor 'TENANT KEY'."
            raise UsageError(message)
        if key in found:
            message = f"Line {number} of {path} repeats a key of an earlier line."
            raise UsageError(message)
        found[key] = "".join(tenants)
    if not found:
        raise UsageError(f"{path} has no keys.")
    return found
