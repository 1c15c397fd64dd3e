"""The outermost ASGI layer: request ids, response headers, counts, logs, unexpected errors."""

from __future__ import annotations

import logging
import re
import secrets
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

from twostroke.server.http.body_limits import BodyMemory
from twostroke.server.http.error_forms import error_form
from twostroke.server.http.errors import FramingError, HeaderSizeError, report, to_response
from twostroke.server.http.ignored import HEADER, REMOVED_LINES_HEADER, header_of
from twostroke.server.http.internal_requests import sender_of
from twostroke.server.http.limits import check_headers
from twostroke.server.http.request_context import STATE_KEY, ServedRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prometheus_client import Counter
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from twostroke.server.http.limits import RequestLimits
    from twostroke.server.http.origins import Origins
    from twostroke.server.http.request_context import Observer

_ID_HEADER: Final = b"x-request-id"
_ANSWER_HEADER: Final = b"twostroke-answer"  # of answers that were computed for an equal request
_ABSOLUTE_FORM: Final = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)
# Other paths of an endpoint: mostly llama-server's paths without /v1, and older names.
ALIASES: Final = {
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/completion",
    "/embedding": "/embeddings",
    "/models": "/v1/models",
    "/responses": "/v1/responses",
    "/v1/health": "/health",
}
_SLASHES = re.compile("/{2,}")
_REPEATED_VERSION = re.compile(r"\A(?:/v1)+(?=/v1/)")
_PATH_CHARACTERS = "/:@!$&'()*+,;=-._~"  # that need no percent-encoding
_SAFE_ID = re.compile(r"[A-Za-z0-9._:+/=@-]{1,128}")
_logger = logging.getLogger("twostroke.serve")


class Boundary:
    """The outermost ASGI layer, which begins and ends the server's work on each request.

    It adds response headers, answers unexpected errors, and reports each request to logs and
    metrics. A request keeps the client's request id if the id is safe to log, and gets a new id
    otherwise. Ids are for people and logs only, so two requests may have the same id.
    """

    def __init__(
        self,
        app: ASGIApp,
        responses: Counter,
        limits: RequestLimits,
        origins: Origins,
        observers: Sequence[Observer] = (),
        *,
        find_endpoint: Callable[[Scope], str],
    ) -> None:
        """Wrap the ASGI application `app`.

        Args:
            app: the application with all inner layers.
            responses: counts responses by endpoint and HTTP status.
            limits: limits of headers and of request bodies in memory.
            origins: gives the CORS headers of each response.
            observers: get each request after its response has ended.
            find_endpoint: returns the endpoint's path, for metrics, of a request that is
                refused before it is routed.
        """
        self._app = app
        self._responses = responses
        self._limits = limits
        self._body_memory = BodyMemory(limits.max_arriving_bytes, limits.max_tenant_arriving_bytes)
        self._origins = origins
        self._observers = observers
        self._find_endpoint = find_endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the inner layers, and report it when its response has ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        served_request = _begin(scope, self._body_memory)
        scope.setdefault("state", {})[STATE_KEY] = served_request
        id_headers = (_ID_HEADER, served_request.error_form.id_header)
        added = [
            (name, served_request.request_id.encode()) for name in id_headers if name is not None
        ]
        added += self._origins.headers(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                served_request.status = message["status"]
                served_request.endpoint = self._endpoint(scope)
                message["headers"] = [*message["headers"], *added]
                if served_request.ignored and served_request.status < 400:
                    message["headers"].append((HEADER.encode(), header_of(served_request.ignored)))
                if kinds := served_request.removed_lines:
                    message["headers"].append(
                        (REMOVED_LINES_HEADER.encode(), ", ".join(kinds).encode("ascii"))
                    )
                source = served_request.answer_source()
                if source != "computed":
                    message["headers"].append((_ANSWER_HEADER, source.encode("ascii")))
                self._responses.labels(served_request.endpoint, str(served_request.status)).inc()
            await send(message)

        try:
            check_headers(scope, self._limits, path=served_request.path)
            await self._app(scope, receive, send_with_headers)
        except (HeaderSizeError, FramingError) as error:
            await to_response(error, scope)(scope, receive, send_with_headers)
        except Exception as error:  # noqa: BLE001 the outermost boundary: a fault costs one request, not the server
            reported = report(error, scope)
            if not served_request.status:
                await to_response(reported, scope)(scope, receive, send_with_headers)
        finally:
            served_request.end()
            self._report(served_request)

    def _endpoint(self, scope: Scope) -> str:
        """Return the path template of a request's route, by which metrics count the request.

        A request that was refused before it was routed gets the name from `find_endpoint`.
        """
        route = scope.get("route")
        return self._find_endpoint(scope) if route is None else getattr(route, "path", "unknown")

    def _report(self, served_request: ServedRequest) -> None:
        for observer in self._observers:
            try:
                observer.observe(served_request)
            except Exception as error:  # noqa: BLE001 a failing observer must not fail the request
                _logger.error("A request could not be logged: %s", type(error).__name__)  # noqa: TRY400


def _begin(scope: Scope, body_memory: BodyMemory) -> ServedRequest:
    """Create the `ServedRequest` for a new request, which the inner layers complete.

    If the path in the scope is an alias, the path that it stands for replaces it.
    """
    to_origin_form(scope)
    headers = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
    request_id = headers.get(_ID_HEADER, "")
    if not _SAFE_ID.fullmatch(request_id):
        request_id = f"req-{secrets.token_hex(16)}"
    path = scope["path"]
    client_path = _without_repeats(path)
    if client_path != path:  # a router sends this path to replicas
        scope["raw_path"] = quote(client_path, safe=_PATH_CHARACTERS).encode("ascii")
    scope["path"] = ALIASES.get(client_path, client_path)
    request = ServedRequest(
        request_id,
        error_form(scope, client_path),
        method=scope["method"],
        path=path,
        client_path=client_path,
        traceparent=headers.get(b"traceparent", ""),
    )
    if (sender := sender_of(scope)) is not None:
        request.tenant = sender.tenant
        request.service_tier = sender.service_tier
    else:
        request.body_memory = body_memory
    return request


def _without_repeats(path: str) -> str:
    """Remove a slash at the end, doubled slashes and a doubled `/v1` from a request's path.

    Clients send such paths if their base URL ends with a slash, or already ends with the `/v1` that
    the client adds.
    """
    path = _REPEATED_VERSION.sub("", _SLASHES.sub("/", path))
    return path[:-1] if len(path) > 1 and path.endswith("/") else path


def to_origin_form(scope: Scope) -> None:
    """Convert an absolute URL in the request line, `GET http://host/path`, to a path and `Host`.

    Clients of proxies send this form, and every server must accept it (RFC 9112, section 3.2.2).
    The URL's host replaces the `Host` header.
    """
    match = _ABSOLUTE_FORM.fullmatch(scope.get("raw_path") or b"")
    if match is None:
        return
    authority = match[1].rpartition(b"@")[2]
    raw_path = match[2] or b"/"
    scope["raw_path"] = raw_path
    scope["path"] = unquote(raw_path.decode("latin-1"))
    other_headers = [header for header in scope["headers"] if header[0] != b"host"]
    scope["headers"] = [(b"host", authority), *other_headers]
