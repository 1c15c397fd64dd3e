"""The outermost layer: headers of every response, counts of responses, unexpected errors."""

from __future__ import annotations

import logging
import re
import secrets
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from twostroke.server.http.body_limits import BodyMemory
from twostroke.server.http.error_forms import error_form
from twostroke.server.http.errors import FramingError, HeaderSizeError, report, to_response
from twostroke.server.http.ignored import HEADER, header_of
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
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)
# Most are llama-server's: paths without /v1, and older names.
ALIASES: Final = {
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/completion",
    "/embedding": "/embeddings",
    "/models": "/v1/models",
    "/responses": "/v1/responses",
    "/v1/health": "/health",
}
_SAFE_ID = re.compile(r"[A-Za-z0-9._:+/=@-]{1,128}")
_logger = logging.getLogger("twostroke.serve")


class Boundary:
    """Wraps the application.

    A request keeps the client's id if it is safe to log, and gets a new one otherwise. Ids are for
    people and logs only, so two requests may share one.
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
        """Wrap `app`, count its responses, and report each request to the observers at its end.

        `find_endpoint` names the endpoint of a request that is refused before it reaches one.
        """
        self._app = app
        self._responses = responses
        self._limits = limits
        self._arriving = BodyMemory(limits.max_arriving_bytes, limits.max_tenant_arriving_bytes)
        self._origins = origins
        self._observers = observers
        self._find_endpoint = find_endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        served = _begin(scope, self._arriving)
        scope.setdefault("state", {})[STATE_KEY] = served
        id_headers = (_ID_HEADER, served.error_form.id_header)
        added = [(name, served.request_id.encode()) for name in id_headers if name is not None]
        added += self._origins.headers(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                served.status = message["status"]
                served.endpoint = self._endpoint(scope)
                message["headers"] = [*message["headers"], *added]
                if served.ignored and served.status < 400:
                    message["headers"].append((HEADER.encode(), header_of(served.ignored)))
                self._responses.labels(served.endpoint, str(served.status)).inc()
            await send(message)

        try:
            check_headers(scope, self._limits)
            await self._app(scope, receive, send_with_headers)
        except (HeaderSizeError, FramingError) as error:
            await to_response(error, scope)(scope, receive, send_with_headers)
        except Exception as error:  # noqa: BLE001 the outermost boundary: a fault costs one request, not the server
            known = report(error, scope)
            if not served.status:
                await to_response(known, scope)(scope, receive, send_with_headers)
        finally:
            served.end()
            self._show(served)

    def _endpoint(self, scope: Scope) -> str:
        """Return the path of the route that answers a request, or would if it were not refused."""
        route = scope.get("route")
        return self._find_endpoint(scope) if route is None else getattr(route, "path", "unknown")

    def _show(self, served: ServedRequest) -> None:
        for observer in self._observers:
            try:
                observer.observe(served)
            except Exception as error:  # noqa: BLE001 a failing observer must not fail the request
                _logger.error("A request could not be logged: %s", type(error).__name__)  # noqa: TRY400


def _begin(scope: Scope, arriving: BodyMemory) -> ServedRequest:
    """Return the facts of a request; the path becomes the one that is served.

    A slash at its end does not count.
    """
    to_origin_form(scope)
    headers = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
    request_id = headers.get(_ID_HEADER, "")
    if not _SAFE_ID.fullmatch(request_id):
        request_id = f"req-{secrets.token_hex(16)}"
    path, traceparent = scope["path"], headers.get(b"traceparent", "")
    bare = path[:-1] if len(path) > 1 and path.endswith("/") else path
    scope["path"] = ALIASES.get(bare, bare)
    form = error_form(scope, bare)
    request = ServedRequest(request_id, form, scope["method"], path, traceparent)
    if (sender := sender_of(scope)) is not None:
        request.tenant, request.service = sender.tenant, sender.service
    else:
        request.arriving = arriving
    return request


def to_origin_form(scope: Scope) -> None:
    """Replace a request line such as `GET http://host/path` by the path and a `Host` header.

    Every server must accept this form, which clients of proxies send (RFC 9112, section 3.2.2).
    The request line's host replaces the `Host` header.
    """
    match = _ABSOLUTE.fullmatch(scope.get("raw_path") or b"")
    if match is None:
        return
    authority, raw_path = match[1].rpartition(b"@")[2], match[2] or b"/"
    scope["raw_path"] = raw_path
    scope["path"] = unquote(raw_path.decode("latin-1"))
    others = [header for header in scope["headers"] if header[0] != b"host"]
    scope["headers"] = [(b"host", authority), *others]
