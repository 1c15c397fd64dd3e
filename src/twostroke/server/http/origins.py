"""Checks of `Host` and `Origin` that protect the server from web pages, and CORS headers."""

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
_MAX_CACHED_HOSTS: Final = 64  # clients use few names

_NAME_PATTERN: Final = r"[a-z0-9_](?:[a-z0-9._-]{0,251}[a-z0-9_])?"  # an IPv4 address is one, too
_HOST: Final = re.compile(
    rf"(?P<name>{_NAME_PATTERN}|\[[0-9a-f:.]{{2,45}}\])\.?(?::(?P<port>\d{{0,5}}))?"
)
_ORIGIN: Final = re.compile(rf"(?P<scheme>[a-z][a-z0-9+.-]{{0,31}})://(?P<host>{_HOST.pattern})")
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}  # browsers leave them out
# Public DNS has no names with these ends, and no names without a dot.
_LOCAL_NAMES: Final = (".localhost", ".local", ".internal", ".home.arpa")

_REQUEST_METHOD: Final = b"access-control-request-method"
_REQUEST_HEADERS: Final = b"access-control-request-headers"
_NETWORK: Final = b"access-control-%s-private-network"
_HEADER_NAMES: Final = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}")
_METHODS: Final = b"GET, HEAD, POST, DELETE"
_MAX_AGE: Final = b"7200"  # Chromium's limit
_LIMITED_RESOURCES: Final = ("requests", "tokens")
_LIMIT_FIELDS: Final = ("limit", "remaining", "reset")
_EXPOSED: Final = ", ".join(
    (
        *("x-request-id", "request-id", "retry-after", "x-should-retry", "twostroke-ignored"),
        *("twostroke-removed-lines", "x-twostroke-upstream"),
        *(
            f"x-ratelimit-{field_name}-{name}"
            for name in _LIMITED_RESOURCES
            for field_name in _LIMIT_FIELDS
        ),
        *(
            f"anthropic-ratelimit-{name}-{field_name}"
            for name in _LIMITED_RESOURCES
            for field_name in _LIMIT_FIELDS
        ),
    )
).encode()


class ForbiddenError(TwostrokeError):
    """Web pages of the request's `Origin` may not use the server."""

    http_status = 403
    code = "forbidden_origin"


class ForbiddenHostError(ForbiddenError):
    """The request's `Host` header is not a name of this server."""

    code = "forbidden_host"


class AccessOptions(Protocol):
    """The server options that decide which hosts, origins and clients may use the server."""

    @property
    def host(self) -> str:
        """The address on which the server listens, such as 127.0.0.1."""

    @property
    def has_keys(self) -> bool:
        """Whether the server has API keys now, so that clients need one."""

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """The web origins whose pages may use the server; "*" allows all."""

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """Host names by which clients may reach the server, besides its address."""


def check_access(options: AccessOptions) -> None:
    """Check the server's options about hosts and origins before it starts.

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
    """Decides which `Host` and `Origin` headers may use the server, and makes CORS headers.

    Without these rules, any web page that a user visits could use a server on the user's machine.
    """

    def __init__(self, options: AccessOptions) -> None:
        """Create the rules from options that `check_access` has accepted.

        API keys that are created later do not relax the rules.
        """
        self._is_private = is_loopback(options.host)
        self._checks_hosts = not options.has_keys or bool(options.allowed_hosts)
        self._is_keyless = not options.has_keys
        self._is_this_server = lru_cache(_MAX_CACHED_HOSTS)(self._is_name_of_this_server)
        self._hosts = {options.host.lower(), *map(parse_host, options.allowed_hosts)}
        self._allows_any = ANY in options.cors_origins
        self._listed = frozenset(
            parse_origin(origin).encode() for origin in options.cors_origins if origin != ANY
        )

    def check(self, scope: Scope) -> None:
        """Check that a request's `Host` and `Origin` may use the server.

        Raises:
            ForbiddenHostError: the host is not a name of this server.
            ForbiddenError: web pages of the origin may not use it.
        """
        host, origin = _header(scope, b"host"), _header(scope, b"origin")
        if host and self._checks_hosts and not self._is_this_server(host):
            match = _match(_HOST, host)
            name = _printable(host) if match is None else match["name"]
            remedy = f": start it with --allowed-host {name} if clients may use that name"
            raise ForbiddenHostError(
                f"This server does not answer to the name '{name}'{remedy if match else ''}."
            )
        if origin is None or self._is_listed(origin):
            return
        if is_preflight(scope) or (self._is_keyless and not _is_local_page(origin, host or b"")):
            printable = _printable(origin)
            listed = printable if _match(_ORIGIN, origin) else "'*' and with keys"
            raise ForbiddenError(
                f"Web pages of the origin '{printable}' may not use this server: start it with "
                f"--cors-origin {listed} to allow them."
            )

    def headers(self, scope: Scope) -> Headers:
        """Return the CORS headers of a response, with which browsers let a page read the response.

        Error responses have them, too.
        """
        vary = [(b"vary", b"Origin")] if self._listed and not self._allows_any else []
        origin = _header(scope, b"origin")
        if origin is None or not self._is_listed(origin):
            return vary
        allowed = ANY.encode() if self._allows_any else origin
        headers = [
            *vary,
            (b"access-control-allow-origin", allowed),
            (b"access-control-expose-headers", _EXPOSED),
        ]
        if is_preflight(scope):
            headers += _preflight_headers(scope)
        return headers

    def _is_listed(self, origin: bytes) -> bool:
        return self._allows_any or origin in self._listed

    def _is_name_of_this_server(self, host: bytes) -> bool:
        """Return whether a host name in a request may mean this server.

        A server that listens beyond this machine also accepts addresses and names outside public
        DNS, since no stranger's web page has such a host.
        """
        match = _match(_HOST, host)
        if match is None:
            return False
        name = match["name"]
        if name in self._hosts or is_loopback(name):
            return True
        is_local = _is_address(name) or "." not in name or name.endswith(_LOCAL_NAMES)
        return is_local and not self._is_private


class OriginCheck:
    """The ASGI layer that refuses forbidden hosts and origins, and answers CORS preflights.

    Preflights are answered here because they never have an API key.
    """

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        """Wrap the inner ASGI layers `app` with the rules of `origins`."""
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the inner layers, refuse it, or answer a CORS preflight.

        The outermost layer adds the CORS headers.
        """
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
    """Check a web origin in an option, and return it in the form in which browsers send it.

    Raises:
        UsageError: the text is not an origin.
    """
    origin = text.lower().removesuffix("/")
    match = _ORIGIN.fullmatch(origin)
    if match is None or int(match["port"] or 1) > 65535:
        message = "must be an origin such as https://app.example:3000, without a path, got {value}."
        raise UsageError(message, field="cors_origins", value=repr(text))
    return origin.removesuffix(_DEFAULT_PORTS.get(match["scheme"], ""))


def parse_host(text: str) -> str:
    """Check a host name in an option, and return it in the form of the `Host` header.

    The result is in lower case, with IPv6 addresses in brackets.

    Raises:
        UsageError: the text is not a name or an address.
    """
    name = text.lower().removesuffix(".")
    if ":" in name and not name.startswith("["):
        name = f"[{name}]"
    match = _HOST.fullmatch(name)
    if match is None or match["port"] is not None or (name[0] == "[" and not _is_address(name)):
        message = "must be a host's name or address, without scheme and port, got {value}."
        raise UsageError(message, field="allowed_hosts", value=repr(text))
    return name


def is_loopback(name: str) -> bool:
    """Return whether a host name or address always means the machine itself, as localhost does."""
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def is_preflight(scope: Scope) -> bool:
    """Return whether a request is a CORS preflight, by which a browser asks for permission."""
    has_both = _header(scope, b"origin") is not None and _header(scope, _REQUEST_METHOD) is not None
    return scope["method"] == "OPTIONS" and has_both


def wants_page(request: Request) -> bool:
    """Return whether a request accepts HTML, as requests of browsers do."""
    return "text/html" in request.headers.get("accept", "").lower()


def _is_local_page(origin: bytes, host: bytes) -> bool:
    """Return whether a web origin is this server's own page, or a page of another local program.

    A server without keys accepts requests of such pages only. A page of another program on this
    machine, for example of a development proxy, gets no CORS headers, so it cannot read responses.
    """
    match = _match(_ORIGIN, origin)
    if match is None or match["scheme"] not in _DEFAULT_PORTS:
        return False
    return match["host"] == host.decode("latin-1").lower() or is_loopback(match["name"])


def _preflight_headers(scope: Scope) -> Headers:
    headers = [(b"access-control-allow-methods", _METHODS), (b"access-control-max-age", _MAX_AGE)]
    requested_headers = _header(scope, _REQUEST_HEADERS) or b""
    if _HEADER_NAMES.fullmatch(requested_headers):  # SDKs add their own headers, so all are allowed
        headers.append((b"access-control-allow-headers", requested_headers))
    if _header(scope, _NETWORK % b"request") == b"true":  # Chromium before version 142
        headers.append((_NETWORK % b"allow", b"true"))
    return headers


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


def _printable(value: bytes) -> str:
    return value[:100].decode("latin-1")
