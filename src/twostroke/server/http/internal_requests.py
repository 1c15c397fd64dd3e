"""Internal requests, such as those in batches: the server sends them through its own layers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen
from twostroke.server.http.error_forms import error_form
from twostroke.server.http.request_context import STATE_KEY

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Scope

    from twostroke.core.errors import TwostrokeError
    from twostroke.server.http.request_context import ServedRequest

_INTERNAL: Final = "twostroke.inside"  # in `scope["extensions"]`, which no client can set


class Sender(Frozen):
    """The sender of an internal request: a tenant, with a service tier and an API key's id."""

    tenant: str
    service_tier: str
    key: str = ""


class InternalResponse(Frozen):
    """The complete response to a request that the server sent to itself.

    Header names are in lower case. `error` is the error's code; None if the request succeeded.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    error: str | None = None


def sender_of(scope: Scope) -> Sender | None:
    """Return the sender of an internal request; None for a request that came over HTTP."""
    sender: Sender | None = scope.get("extensions", {}).get(_INTERNAL)
    return sender


async def post(app: ASGIApp, path: str, body: bytes, sender: Sender) -> InternalResponse:
    """Send a JSON body to one of the server's own paths, and return the complete response.

    If the call is cancelled, the request is cancelled.
    """
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "extensions": {_INTERNAL: sender},
    }
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    received: list[Message] = []

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # this client never leaves
        raise AssertionError

    async def send(message: Message) -> None:
        received.append(message)

    await app(scope, receive, send)
    start, *parts = received
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
    served_request: ServedRequest | None = scope.get("state", {}).get(STATE_KEY)
    error = served_request.error if served_request is not None else None
    body = b"".join(part.get("body", b"") for part in parts)
    return InternalResponse(start["status"], headers, body, error)


def refused(path: str, error: TwostrokeError, request_id: str) -> InternalResponse:
    """Build the error response for an internal request that is not sent at all."""
    form = error_form({"path": path, "headers": []})
    body = form.body(error, request_id, str)
    return InternalResponse(form.status(error), {"x-request-id": request_id}, body, error.code)
