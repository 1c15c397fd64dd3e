"""Tells a router what its requests have used: in a header, and at the end of a stream."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen
from twostroke.server.auth.usage import counted
from twostroke.server.http.request_context import served_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from twostroke.server.http.request_context import Used

USAGE_HEADER: Final = b"x-twostroke-usage"
# How the lines of streams end, by media type.
STREAMS: Final = {b"text/event-stream": (b"\n\n", b"\n\r\n"), b"application/x-ndjson": (b"\n",)}
MARK: Final = b": twostroke-usage "  # begins the last line of a stream; a comment to clients
_FIGURES: Final = re.compile(rb"([0-9]{1,15}) ([0-9]{1,15}) ([0-9]{1,15})")


class ReportedUsage(Frozen):
    """Tokens that a request has used; `cached_tokens` are a part of its prompt's."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class UsageReporter:
    """Answers requests that have the header `x-twostroke-usage` with their usage.

    It is in the same header of the response: prompt, cached and completion tokens. A stream's
    header has those until its first bytes, and its last line the final ones, unless it failed.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Wrap `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http" or not any(name == USAGE_HEADER for name, _ in scope["headers"]):
            await self._app(scope, receive, send)
            return
        served, ends = served_of(scope), tuple[bytes, ...]()

        async def send_with_usage(message: Message) -> None:
            nonlocal ends
            is_start = message["type"] == "http.response.start"
            is_last = ends and not message.get("more_body", False)
            used = counted(served) if is_start or is_last else None
            if is_start and message["status"] < 400:
                ends = STREAMS.get(media_type(message["headers"]), ())
                used = used or (ReportedUsage() if ends else None)
            if used is not None and is_start:
                message["headers"] = [*message["headers"], (USAGE_HEADER, _written(used))]
            elif used is not None:
                message["body"] = message.get("body", b"") + MARK + _written(used) + ends[0]
            await send(message)

        await self._app(scope, receive, send_with_usage)


def read_usage(text: bytes) -> ReportedUsage | None:
    """Return the usage in a header or at the end of a stream; None if there is none."""
    found = _FIGURES.match(text)
    return None if found is None else ReportedUsage(*map(int, found.groups()))


def media_type(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the Content-Type in lower case, without parameters; empty without one."""
    value = next((value for name, value in headers if name == b"content-type"), b"")
    return value.partition(b";")[0].strip().lower()


def _written(used: Used) -> bytes:
    return b"%d %d %d" % (used.prompt_tokens, used.cached_tokens, used.completion_tokens)
