"""Request timeouts, which clients set in a header, and the `Retry-After` of refused requests."""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import DeadlineError, RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.types import Scope

    from twostroke.core.errors import OverloadedError, TwostrokeError
    from twostroke.server.http.request_context import ServedRequest

TIMEOUT_HEADER: Final = "x-request-timeout"
MAX_TIMEOUT_S: Final = 86400.0
# Numbers above 0 and up to `MAX_TIMEOUT_S`, as a pattern for the OpenAPI document.
TIMEOUT_FORM: Final = (
    r"^(0{1,9}\.0{0,8}[1-9][0-9]{0,8}"
    r"|0{0,4}([1-9][0-9]{0,3}|[1-7][0-9]{4}|8[0-5][0-9]{3}|86[0-3][0-9]{2})(\.[0-9]{1,9})?"
    r"|0{0,4}86400(\.0{1,9})?)$"
)
RETRY_AFTER_S: Final = 1  # the minimum, and the default
MAX_RETRY_AFTER_S: Final = 60
_JITTER_RATIO: Final = 0.25  # at most this share of a time is added to it at random
_MAX_ROOM_S: Final = MAX_RETRY_AFTER_S / (1 + _JITTER_RATIO)


def timeout_of(scope: Scope) -> float:
    """Return the timeout in seconds that a request's header sets; infinity without the header.

    Raises:
        RequestError: the header is not a number of seconds, or too large.
    """
    name = TIMEOUT_HEADER.encode()
    for header, value in scope["headers"]:
        if header == name:
            text = value.decode("latin-1").strip()
            timeout_s = float(text) if re.fullmatch(TIMEOUT_FORM, text) else 0.0
            if not 0 < timeout_s <= MAX_TIMEOUT_S:
                reason = f"must be a number of seconds above 0 and up to {MAX_TIMEOUT_S:.0f}."
                raise RequestError(reason, field=TIMEOUT_HEADER)
            return timeout_s
    return math.inf


@asynccontextmanager
async def within_timeout(served_request: ServedRequest) -> AsyncIterator[None]:
    """Cancel a `with` block when the timeout of its request is over.

    The timeout began with the request.

    Raises:
        DeadlineError: the timeout is over; the block was cancelled.
    """
    left_s = served_request.began_s + served_request.timeout_s - time.monotonic()
    limit = asyncio.timeout(left_s if left_s < math.inf else None)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineError.of_timeout(served_request.timeout_s) from None


class RetryAfter:
    """Spreads the times at which refused clients should retry, at the rate of the engine.

    All refused clients are assumed to retry, so each gets a later time than the one refused before
    it. Times over the maximum are replaced by random times up to the maximum. Call the methods only
    in the event loop's thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with no refused clients; `clock` returns monotonic seconds."""
        self._clock = clock
        self._due_s: dict[str, float] = {}  # by service tier: when the last refused client is done

    def put_off(self, error: OverloadedError, service_tier: str) -> None:
        """Give a refused request a later retry time than earlier refused requests of its tier.

        `error` is the refusal. Its fact `room_s`, the seconds until the engine should have room, is
        replaced by the retry time in seconds from now; its fact `turn_s` is the time after which
        there should be room for one request more. Nothing changes without `room_s`.
        """
        room_s, turn_s = error.facts.get("room_s"), error.facts.get("turn_s")
        if not isinstance(room_s, float):
            return
        now_s = self._clock()
        due_s = max(self._due_s.get(service_tier, 0.0), now_s + room_s)
        error.facts["room_s"] = due_s - now_s
        if not isinstance(turn_s, float):
            return
        if due_s + turn_s > now_s + _MAX_ROOM_S:
            due_s = now_s + _MAX_ROOM_S
            error.facts["room_s"] = random.uniform(min(room_s, _MAX_ROOM_S), _MAX_ROOM_S)
        self._due_s[service_tier] = due_s + turn_s


def retry_after(error: TwostrokeError) -> str:
    """Return the value of the response header `Retry-After` for an error, in whole seconds.

    If the error has the fact `wait_s`, the time is exact. The fact `room_s` is an estimate, to
    which a random share is added, so that clients do not all retry at once.
    """
    if isinstance(wait_s := error.facts.get("wait_s"), float):
        return whole_seconds(wait_s)
    room_s = error.facts.get("room_s")
    if not isinstance(room_s, float):
        return str(RETRY_AFTER_S)
    return whole_seconds(min(room_s, _MAX_ROOM_S) * random.uniform(1, 1 + _JITTER_RATIO))


def whole_seconds(wait_s: float) -> str:
    """Return a waiting time as whole seconds in text, rounded up, at least 1."""
    return str(max(RETRY_AFTER_S, math.ceil(wait_s)))
