"""Reports a request's token counts to a router: in a header, or at the end of a stream."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen
from twostroke.server.auth.usage import billable_usage
from twostroke.server.http.request_context import served_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from twostroke.server.http.request_context import TokenUsage


USAGE_HEADER: Final = b"x-twostroke-usage"
# The line ends of streams, by media type.
STREAMS: Final = {b"text/event-stream": (b"\n\n", b"\n\r\n"), b"application/x-ndjson": (b"\n",)}
MARK: Final = b": twostroke-usage "  # starts the last line of a stream, a comment for clients
_USAGE_PATTERN: Final = re.compile(rb"([0-9]{1,15}) ([0-9]{1,15}) ([0-9]{1,15})")


class ReportedUsage(Frozen):
    """Token counts of a response that a server reports to a router.

    `prompt_tokens` include `cached_tokens` and `cache_write_tokens`. Anthropic's API reports
    `cache_write_tokens`, which it has written to its cache at another price.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cache_write_tokens: int = 0


class UsageReporter:
    """The ASGI layer that reports token counts to a router.

    The router sends the header `x-twostroke-usage`. The response header of the same name has the
    numbers of prompt, cached and completion tokens. The header of a stream has the counts before
    the first bytes; the last line of a stream that did not fail has the final counts.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Wrap the inner ASGI layers `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the inner layers; add token counts if the request has the header."""
        if scope["type"] != "http" or not any(name == USAGE_HEADER for name, _ in scope["headers"]):
            await self._app(scope, receive, send)
            return
        served_request = served_of(scope)
        line_ends: tuple[bytes, ...] = ()

        async def send_with_usage(message: Message) -> None:
            nonlocal line_ends
            is_start = message["type"] == "http.response.start"
            is_last = line_ends and not message.get("more_body", False)
            used = billable_usage(served_request) if is_start or is_last else None
            if is_start and message["status"] < 400:
                line_ends = STREAMS.get(media_type(message["headers"]), ())
                used = used or (ReportedUsage() if line_ends else None)
            if used is not None and is_start:
                message["headers"] = [*message["headers"], (USAGE_HEADER, _encode_usage(used))]
            elif used is not None:
                message["body"] = (
                    message.get("body", b"") + MARK + _encode_usage(used) + line_ends[0]
                )
            await send(message)

        await self._app(scope, receive, send_with_usage)


def read_usage(text: bytes) -> ReportedUsage | None:
    """Return the token counts from a response's usage header or a stream's last line.

    Returns None if the text has no counts.
    """
    match = _USAGE_PATTERN.match(text)
    return None if match is None else ReportedUsage(*map(int, match.groups()))


def media_type(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return a response's Content-Type in lower case and without parameters; empty if missing."""
    value = next((value for name, value in headers if name == b"content-type"), b"")
    return value.partition(b";")[0].strip().lower()


def _encode_usage(used: TokenUsage) -> bytes:
    return b"%d %d %d" % (used.prompt_tokens, used.cached_tokens, used.completion_tokens)
