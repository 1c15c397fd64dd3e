"""The outermost layer: request ids, the count of responses, and what nobody else caught."""

from __future__ import annotations

import logging
import re
import secrets
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import TwostrokeError
from twostroke.serve.anthropic.errors import error_form
from twostroke.serve.http.errors import HeaderSizeError, one_line, to_response
from twostroke.serve.http.limits import check_headers

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from twostroke.serve.observe.metrics import Metrics
    from twostroke.serve.options import Limits

_ID_HEADER: Final = b"x-request-id"
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")
_logger = logging.getLogger("twostroke.serve")


class Boundary:
    """Wraps the application.

    A request's id is the client's own where it is harmless, else a fresh one. It is only for
    people and logs; nothing is looked up by it, so two requests may carry the same.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, limits: Limits) -> None:
        """Wrap `app` and count its responses."""
        self._app = app
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
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *ids]
                self._metrics.responses.labels(_endpoint(scope), str(status)).inc()
            await send(message)

        try:
            check_headers(scope, self._limits)
            await self._app(scope, receive, send_with_id)
        except HeaderSizeError as error:
            await to_response(error, scope)(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 the outermost boundary: a fault costs one request, not the server
            self._log(request_id, error)
            if not status:
                fault = to_response(TwostrokeError("An unforeseen failure."), scope)
                await fault(scope, receive, send_with_id)

    def _log(self, request_id: bytes, error: Exception) -> None:
        """Say what failed; the trace only for those who debug the server itself."""
        _logger.error(
            "Request %s failed: %s: %s",
            request_id.decode(),
            type(error).__name__,
            one_line(str(error)),
            exc_info=_logger.isEnabledFor(logging.DEBUG),
        )


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == _ID_HEADER and _SAFE_ID.fullmatch(value):
            return bytes(value)
    return f"req-{secrets.token_hex(16)}".encode()


def _endpoint(scope: Scope) -> str:
    """Return the route's path; requests that met no route share one word."""
    route = scope.get("route")
    return getattr(route, "path", "unknown")
