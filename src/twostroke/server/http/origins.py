"""Which hosts and web origins may use the server: protection from web pages, and CORS.

Any web page can make a browser send requests to this machine and its network, in the page's own
name (`Origin`) or, after its domain was pointed to an address of this network (DNS rebinding), in
that of its domain (`Host`). Pages can forge neither header. A server without keys checks both. One
with keys need not, since pages do not know a key.
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, Protocol

from starlette.responses import Response

from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.server.http.errors import to_response
from twostroke.server.http.internal_requests import sender_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    Headers = list[tuple[bytes, bytes]]

ANY: Final = "*"
_MOST_HOSTS: Final = 64  # whose names are remembered: clients have few

_NAME: Final = r"[a-z0-9_](?:[a-z0-9._-]{0,251}[a-z0-9_])?"  # an IPv4 address is one, too
_HOST: Final = re.compile(rf"(?P<name>{_NAME}|\[[0-9a-f:.]{{2,45}}\])\.?(?::(?P<port>\d{{0,5}}))?")
_ORIGIN: Final = re.compile(rf"(?P<scheme>[a-z][a-z0-9+.-]{{0,31}})://(?P<host>{_HOST.pattern})")
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}  # browsers leave them out
# No public DNS has these, and none has names without a dot.
_LOCAL_NAMES: Final = (".localhost", ".local", ".internal", ".home.arpa")

_REQUEST_METHOD: Final = b"access-control-request-method"
_REQUEST_HEADERS: Final = b"access-control-request-headers"
_NETWORK: Final = b"access-control-%s-private-network"
_HEADER_NAMES: Final = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}")
_METHODS: Final = b"GET, HEAD, POST, DELETE"
_MAX_AGE: Final = b"7200"  # Chromium's limit
_COUNTED: Final = ("requests", "tokens")
_COUNTS: Final = ("limit", "remaining", "reset")
_EXPOSED: Final = ", ".join(
    (
        *("x-request-id", "request-id", "retry-after", "x-should-retry", "twostroke-ignored"),
        *(f"x-ratelimit-{what}-{name}" for name in _COUNTED for what in _COUNTS),
        *(f"anthropic-ratelimit-{name}-{what}" for name in _COUNTED for what in _COUNTS),
    )
).encode()


class ForbiddenError(TwostrokeError):
    """The request's Host or Origin may not use the server."""

    http_status = 403
    code = "forbidden_origin"


class ForbiddenHostError(ForbiddenError):
    """The server does not answer to the request's Host."""

    code = "forbidden_host"


class Access(Protocol):
    """The options of a server that say who may use it."""

    @property
    def host(self) -> str:
        """The address that it listens on."""

    @property
    def has_keys(self) -> bool:
        """Whether clients need a key now."""

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """The web origins whose pages may use it; "*" allows all."""

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """Names by which clients may reach it, besides its address."""


def check_access(options: Access) -> None:
    """Check what a server's user chose.

    Raises:
        UsageError: an origin or a host is malformed, or all origins are allowed without keys.
    """
    for origin in options.cors_origins:
        if origin != ANY:
            parse_origin(origin)
        elif not options.has_keys:
            reason = "allows every web page only on a server with keys: name the origins."
            raise UsageError(reason, field="cors_origins")
    for host in options.allowed_hosts:
        parse_host(host)


class Origins:
    """The rules of one server."""

    def __init__(self, options: Access) -> None:
        """Read the rules from options that have been checked; keys that come later relax none."""
        self._is_private = is_loopback(options.host)
        self._checks_hosts = not options.has_keys or bool(options.allowed_hosts)
        self._is_keyless = not options.has_keys
        self._is_own = lru_cache(_MOST_HOSTS)(self._means_this)
        self._hosts = {options.host.lower(), *map(parse_host, options.allowed_hosts)}
        self._allows_any = ANY in options.cors_origins
        listed = (one for one in options.cors_origins if one != ANY)
        self._listed = frozenset(parse_origin(one).encode() for one in listed)

    def check(self, scope: Scope) -> None:
        """Check a request's Host and Origin.

        Raises:
            ForbiddenError: this server does not answer to that name, or not to pages of that
                origin.
        """
        host, origin = _header(scope, b"host"), _header(scope, b"origin")
        if host and self._checks_hosts and not self._is_own(host):
            found = _match(_HOST, host)
            name = _shown(host) if found is None else found["name"]
            remedy = f": start it with --allowed-host {name} if clients may use that name"
            raise ForbiddenHostError(
                f"This server does not answer to the name '{name}'{remedy if found else ''}."
            )
        if origin is None or self._is_listed(origin):
            return
        if is_preflight(scope) or (self._is_keyless and not _is_near(origin, host or b"")):
            shown = _shown(origin)
            listed = shown if _match(_ORIGIN, origin) else "'*' and with keys"
            raise ForbiddenError(
                f"Web pages of the origin '{shown}' may not use this server: start it with "
                f"--cors-origin {listed} to allow them."
            )

    def headers(self, scope: Scope) -> Headers:
        """Return the CORS headers of every response to a request, errors included."""
        vary = [(b"vary", b"Origin")] if self._listed and not self._allows_any else []
        origin = _header(scope, b"origin")
        if origin is None or not self._is_listed(origin):
            return vary
        allowed = ANY.encode() if self._allows_any else origin
        found = [
            *vary,
            (b"access-control-allow-origin", allowed),
            (b"access-control-expose-headers", _EXPOSED),
        ]
        if is_preflight(scope):
            found += _preflight_headers(scope)
        return found

    def _is_listed(self, origin: bytes) -> bool:
        return self._allows_any or origin in self._listed

    def _means_this(self, host: bytes) -> bool:
        """Whether clients may reach the server under this name.

        Beyond this machine, addresses and names that no public DNS has are safe, too: a page of
        such a host is not a stranger's.
        """
        found = _match(_HOST, host)
        if found is None:
            return False
        name = found["name"]
        if name in self._hosts or is_loopback(name):
            return True
        is_local = _is_address(name) or "." not in name or name.endswith(_LOCAL_NAMES)
        return is_local and not self._is_private


class OriginCheck:
    """Refuses requests against the rules, and answers preflights, which never carry a key."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        """Wrap `app`."""
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, refuse it, or answer it. The outermost layer adds CORS headers."""
        if scope["type"] == "http" and sender_of(scope) is None:
            response = self._answer(scope)
            if response is not None:
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _answer(self, scope: Scope) -> Response | None:
        try:
            self._origins.check(scope)
        except ForbiddenError as error:
            response = to_response(error, scope)
            response.headers["connection"] = "close"  # without waiting for the body
            return response
        return Response(status_code=204) if is_preflight(scope) else None


def parse_origin(text: str) -> str:
    """Return an origin as browsers send it, without the slash that may end it.

    Raises:
        UsageError: it is not an origin.
    """
    origin = text.lower().removesuffix("/")
    found = _ORIGIN.fullmatch(origin)
    if found is None or int(found["port"] or 1) > 65535:
        message = "must be an origin such as https://app.example:3000, without a path, got {value}."
        raise UsageError(message, field="cors_origins", value=repr(text))
    return origin.removesuffix(_DEFAULT_PORTS.get(found["scheme"], ""))


def parse_host(text: str) -> str:
    """Return the name of a host as `Host` has it: in lower case, IPv6 addresses in brackets.

    Raises:
        UsageError: it is not a name or an address.
    """
    name = text.lower().removesuffix(".")
    if ":" in name and not name.startswith("["):
        name = f"[{name}]"
    found = _HOST.fullmatch(name)
    if found is None or found["port"] is not None or (name[0] == "[" and not _is_address(name)):
        message = "must be a host's name or address, without scheme and port, got {value}."
        raise UsageError(message, field="allowed_hosts", value=repr(text))
    return name


def is_loopback(name: str) -> bool:
    """Whether a name or an address always means this machine itself."""
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def is_preflight(scope: Scope) -> bool:
    """Whether a browser asks if it may send a page's request."""
    has_both = _header(scope, b"origin") is not None and _header(scope, _REQUEST_METHOD) is not None
    return scope["method"] == "OPTIONS" and has_both


def wants_page(request: Request) -> bool:
    """Whether the request comes from a browser rather than a program."""
    return "text/html" in request.headers.get("accept", "").lower()


def _is_near(origin: bytes, host: bytes) -> bool:
    """Whether an origin is the server's own, or a page of this machine.

    The latter, such as a development server that passes requests on, gets no CORS headers: its
    scripts can neither read responses nor send JSON.
    """
    found = _match(_ORIGIN, origin)
    if found is None or found["scheme"] not in _DEFAULT_PORTS:
        return False
    return found["host"] == host.decode("latin-1").lower() or is_loopback(found["name"])


def _preflight_headers(scope: Scope) -> Headers:
    found = [(b"access-control-allow-methods", _METHODS), (b"access-control-max-age", _MAX_AGE)]
    asked = _header(scope, _REQUEST_HEADERS) or b""
    if _HEADER_NAMES.fullmatch(asked):  # SDKs add headers of their own: any may be sent
        found.append((b"access-control-allow-headers", asked))
    if _header(scope, _NETWORK % b"request") == b"true":  # of Chromium before version 142
        found.append((_NETWORK % b"allow", b"true"))
    return found


def _is_address(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _match(form: re.Pattern[str], value: bytes) -> re.Match[str] | None:
    return form.fullmatch(value.decode("latin-1").lower())


def _shown(value: bytes) -> str:
    return value[:100].decode("latin-1")
