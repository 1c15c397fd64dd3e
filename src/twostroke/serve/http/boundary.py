"""The outermost layer: request ids, counts of responses, and unexpected errors."""

from __future__ import annotations

import logging
import re
import secrets
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import TwostrokeError
from twostroke.serve.anthropic.errors import error_form
from twostroke.serve.http.errors import HeaderSizeError, note_fault, to_response
from twostroke.serve.http.limits import check_headers
from twostroke.serve.observe.exchange import Exchange, attach

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from twostroke.serve.observe.metrics import Metrics
    from twostroke.serve.observe.watchers import Watcher
    from twostroke.serve.options import Limits

_ID_HEADER: Final = b"x-request-id"
_PARENT_HEADER: Final = b"traceparent"
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")
_logger = logging.getLogger("twostroke.serve")


class Boundary:
    """Wraps the application.

    A request keeps the client's id if that is harmless, and gets a new one otherwise. Ids are for
    people and logs only, so two requests may share one.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        limits: Limits,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        """Wrap `app`, count its responses, and report each exchange to the watchers at its end."""
        self._app = app
        self._watchers = watchers
        self._limits = limits
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        form = error_form(scope)
        scope.setdefault("state", {}).update(request_id=request_id.decode(), error_form=form)
        ids = [(name, request_id) for name in (_ID_HEADER, form.id_header) if name is not None]
        exchange = Exchange(
            request_id.decode(), scope["method"], scope["path"], _header(scope, _PARENT_HEADER)
        )
        attach(exchange, scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status, exchange.endpoint = message["status"], _endpoint(scope)
                message["headers"] = [*message["headers"], *ids]
                self._metrics.responses.labels(exchange.endpoint, str(exchange.status)).inc()
            await send(message)

        try:
            check_headers(scope, self._limits)
            await self._app(scope, receive, send_with_id)
        except HeaderSizeError as error:
            await to_response(error, scope)(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 the outermost boundary: a fault costs one request, not the server
            note_fault(error, scope)
            if not exchange.status:
                fault = to_response(TwostrokeError("An unforeseen failure."), scope)
                await fault(scope, receive, send_with_id)
        finally:
            self._show(exchange)

    def _show(self, exchange: Exchange) -> None:
        exchange.end()
        for watcher in self._watchers:
            try:
                watcher.watch(exchange)
            except Exception as error:  # noqa: BLE001 who watches must not be what fails
                _logger.error("An exchange could not be told of: %s", type(error).__name__)  # noqa: TRY400


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == _ID_HEADER and _SAFE_ID.fullmatch(value):
            return bytes(value)
    return f"req-{secrets.token_hex(16)}".encode()


def _header(scope: Scope, wanted: bytes) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), "")


def _endpoint(scope: Scope) -> str:
    """Return the route's path, or "unknown" without a route."""
    route = scope.get("route")
    return getattr(route, "path", "unknown")
