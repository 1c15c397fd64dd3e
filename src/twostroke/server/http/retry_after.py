"""How long clients wait: their own timeouts, and when those that are refused may come back."""

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
# All numbers above 0 and up to `MAX_TIMEOUT_S`; the OpenAPI document states a text's form only.
TIMEOUT_FORM: Final = (
    r"^(0{1,9}\.0{0,8}[1-9][0-9]{0,8}"
    r"|0{0,4}([1-9][0-9]{0,3}|[1-7][0-9]{4}|8[0-5][0-9]{3}|86[0-3][0-9]{2})(\.[0-9]{1,9})?"
    r"|0{0,4}86400(\.0{1,9})?)$"
)
RETRY_AFTER_S: Final = 1  # at least, and where nothing is known
MAX_RETRY_AFTER_S: Final = 60
_SPREAD: Final = 0.25  # of a time, which is added to it at random
_LATEST_S: Final = MAX_RETRY_AFTER_S / (1 + _SPREAD)


def timeout_of(scope: Scope) -> float:
    """Return the seconds that a request may take by its header; inf without one.

    Raises:
        RequestError: the header is not a number of seconds, or too large.
    """
    name = TIMEOUT_HEADER.encode()
    for found, value in scope["headers"]:
        if found == name:
            text = value.decode("latin-1").strip()
            timeout_s = float(text) if re.fullmatch(TIMEOUT_FORM, text) else 0.0
            if not 0 < timeout_s <= MAX_TIMEOUT_S:
                reason = f"must be a number of seconds above 0 and up to {MAX_TIMEOUT_S:.0f}."
                raise RequestError(reason, field=TIMEOUT_HEADER)
            return timeout_s
    return math.inf


@asynccontextmanager
async def in_time(served: ServedRequest) -> AsyncIterator[None]:
    """Run a block within what is left of a request's own timeout, which began with the request.

    Raises:
        DeadlineError: it is over; the block was cancelled.
    """
    left_s = served.began_s + served.timeout_s - time.monotonic()
    limit = asyncio.timeout(left_s if left_s < math.inf else None)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineError.of_timeout(served.timeout_s) from None


class RetryAfter:
    """Gives refused clients times to come back, one after another at the engine's pace.

    It counts on all of them to come back, so those that do find room. Once their turns take longer
    than anybody may be put off for, times are spread evenly. It belongs to the event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with none."""
        self._clock = clock
        self._due_s: dict[str, float] = {}  # by class: when the last one has had its turn

    def put_off(self, error: OverloadedError, service: str) -> None:
        """Move `room_s` of an error after the turns of those of its class that were refused."""
        room_s, turn_s = error.facts.get("room_s"), error.facts.get("turn_s")
        if not isinstance(room_s, float):
            return
        now_s = self._clock()
        due_s = max(self._due_s.get(service, 0.0), now_s + room_s)
        error.facts["room_s"] = due_s - now_s
        if not isinstance(turn_s, float):
            return
        if due_s + turn_s > now_s + _LATEST_S:
            due_s = now_s + _LATEST_S
            error.facts["room_s"] = random.uniform(min(room_s, _LATEST_S), _LATEST_S)
        self._due_s[service] = due_s + turn_s


def retry_after(error: TwostrokeError) -> str:
    """Return the whole seconds after which to try again.

    They are those of the fact `wait_s`, which is exact, or at random a little more than `room_s`.
    """
    if isinstance(exact_s := error.facts.get("wait_s"), float):
        return whole(exact_s)
    room_s = error.facts.get("room_s")
    if not isinstance(room_s, float):
        return str(RETRY_AFTER_S)
    return whole(min(room_s, _LATEST_S) * random.uniform(1, 1 + _SPREAD))


def whole(wait_s: float) -> str:
    """Return whole seconds to wait, at least one."""
    return str(max(RETRY_AFTER_S, math.ceil(wait_s)))
