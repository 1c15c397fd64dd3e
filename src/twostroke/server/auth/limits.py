"""The layer that holds keys to their limits: requests and tokens a minute, requests in parallel."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import TwostrokeError
from twostroke.server.http.error_forms import ANTHROPIC
from twostroke.server.http.errors import to_response
from twostroke.server.http.request_context import served_of
from twostroke.server.http.retry_after import whole_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from twostroke.server.http.api_key import Key, KeyLimits
    from twostroke.server.http.request_context import ServedRequest

    Refusal = tuple[str, float]  # why, and the seconds to wait

_MINUTE_S: Final = 60.0
_NEWEST: Final = 0.125  # the weight of the newest request in the mean of their times
_ROUNDING: Final = 1e-6  # of a level, so that who waits exactly as long as told is served
_NOUNS: Final = {"requests": "request", "tokens": "token"}


class RateLimitError(TwostrokeError):
    """The key's limit of requests, tokens or parallel requests is reached."""

    http_status = 429
    code = "rate_limit_exceeded"


class Bucket:
    """What is left of a minute's limit; it fills evenly, and can be in debt.

    Times are of one monotonic clock, in seconds.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        """Begin full."""
        self.per_minute = per_minute
        self._level, self._at_s = float(per_minute), now_s

    def level(self, now_s: float) -> float:
        """Return what is left."""
        gained = (now_s - self._at_s) * self.per_minute / _MINUTE_S
        self._level, self._at_s = min(self._level + gained, self.per_minute), now_s
        return self._level

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount; a negative one is given back."""
        self._level = self.level(now_s) - amount

    def wait_s(self, least: float, now_s: float) -> float:
        """Return the seconds until `least` is there; 0 if it is."""
        missing = least - self.level(now_s)
        return missing * _MINUTE_S / self.per_minute if missing > _ROUNDING else 0.0

    def resize(self, per_minute: int, now_s: float) -> None:
        """Take another limit, of which the same share is left; a debt stays."""
        level = self.level(now_s)
        self._level = level * per_minute / self.per_minute if level > 0 else level
        self.per_minute = per_minute


class KeyLimiter:
    """One key's buckets and running requests. A request starts where no bucket is empty.

    A request takes all the tokens that it might need before it is computed, and gives back those
    that it did not: the last request to start is all by which a minute's tokens can be exceeded.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin without limits."""
        self._clock = clock
        self.buckets: dict[str, Bucket] = {}
        self._parallel: int | None = None
        self._num_open, self._mean_s = 0, 1.0  # how long a request runs

    def set(self, limits: KeyLimits) -> None:
        """Take limits, which may be others than before."""
        self._parallel = limits.parallel
        given = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        now_s = self._clock()
        for name, per_minute in given.items():
            bucket = self.buckets.get(name)
            if per_minute is None:
                self.buckets.pop(name, None)
            elif bucket is None:
                self.buckets[name] = Bucket(per_minute, now_s)
            elif bucket.per_minute != per_minute:
                bucket.resize(per_minute, now_s)

    def refusal(self) -> Refusal | None:
        """Return why no request may start; None if one may."""
        if (refusal := self.shortage("requests", "tokens")) is not None:
            return refusal
        if self._parallel is not None and self._num_open >= self._parallel:
            most = _counted(self._parallel, "requests")
            return f"this key may run {most} at the same time", self._mean_s
        return None

    def shortage(self, *names: str) -> Refusal | None:
        """Return which of these buckets is empty; None if none is."""
        now_s = self._clock()
        waits = {name: one.wait_s(1, now_s) for name, one in self.buckets.items()}
        empty = [name for name in names if waits.get(name, 0) > 0]
        if not empty:
            return None
        name = max(empty, key=waits.__getitem__)
        most = _counted(self.buckets[name].per_minute, name)
        return f"this key may use {most} a minute", max(waits.values())

    def begin(self) -> Spending:
        """Start a request, which `refusal` has not refused."""
        self._num_open += 1
        if (requests := self.buckets.get("requests")) is not None:
            requests.take(1, self._clock())
        return Spending(self, self._clock())

    def take(self, num_tokens: int) -> None:
        """Take tokens; a negative number gives some back."""
        if (tokens := self.buckets.get("tokens")) is not None:
            tokens.take(num_tokens, self._clock())

    def end(self, began_s: float) -> None:
        """End a request."""
        self._num_open -= 1
        self._mean_s += _NEWEST * (self._clock() - began_s - self._mean_s)

    def headers(self, *, is_anthropic: bool) -> list[tuple[bytes, bytes]]:
        """Return what is left, in the headers of a protocol."""
        now_s, found = self._clock(), list[tuple[str, str]]()
        for name, bucket in self.buckets.items():
            left = max(0, math.floor(bucket.level(now_s)))
            full_s = bucket.wait_s(bucket.per_minute, now_s)
            if is_anthropic:
                reset = datetime.fromtimestamp(time.time() + full_s, UTC).isoformat("T", "seconds")
                form, reset = "anthropic-ratelimit-{name}-{what}", reset.replace("+00:00", "Z")
            else:
                form, reset = "x-ratelimit-{what}-{name}", _duration(full_s)
            values = {"limit": str(bucket.per_minute), "remaining": str(left), "reset": reset}
            found += [(form.format(name=name, what=what), one) for what, one in values.items()]
        return [(name.encode(), value.encode()) for name, value in found]


class Spending:
    """One running request of an account."""

    def __init__(self, account: KeyLimiter, began_s: float) -> None:
        """Begin with no tokens."""
        self._account, self._began_s, self._num_tokens = account, began_s, 0

    def reserve(self, num_tokens: int) -> None:
        """Take all the tokens that the request may need.

        Raises:
            RateLimitError: others have emptied the bucket meanwhile.
        """
        if (refusal := self._account.shortage("tokens")) is not None:
            raise _error(refusal)
        self._num_tokens = num_tokens
        self._account.take(num_tokens)

    def end(self, num_tokens: int) -> None:
        """End the request, which has used so many tokens."""
        self._account.take(num_tokens - self._num_tokens)
        self._account.end(self._began_s)


class LimitCheck:
    """Refuses requests over their key's limits, before their bodies are read.

    It knows no engine: `ServedRequest.reserve` is called with the most tokens that a request may
    need, and `ServedRequest.used` says at its end how many these were. It keeps nothing: a server
    begins with full buckets.
    """

    def __init__(self, app: ASGIApp, counts: Callable[[str], bool]) -> None:
        """Wrap `app`; posts to the paths for which `counts` is true count."""
        self._app, self._counts = app, counts
        self._accounts: dict[str, KeyLimiter] = {}  # by the id of the key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        is_counted = scope["type"] == "http" and scope["method"] == "POST"
        served = served_of(scope) if is_counted and self._counts(scope["path"]) else None
        if served is None or served.key is None or not served.key.id:
            await self._app(scope, receive, send)
            return
        account = self.account(served.key)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = account.headers(is_anthropic=served.error_form is ANTHROPIC)
                message["headers"] = [*message["headers"], *added]
            await send(message)

        if (refusal := account.refusal()) is not None:
            response = to_response(_error(refusal), scope)
            await response(scope, receive, send_with_headers)
            return
        spending = account.begin()
        served.reserve = spending.reserve
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            spending.end(_num_used(served))

    def account(self, key: Key) -> KeyLimiter:
        """Return a key's account, with its present limits."""
        account = self._accounts.setdefault(key.id, KeyLimiter(time.monotonic))
        account.set(key.limits)
        return account


def _num_used(served: ServedRequest) -> int:
    used = served.used
    return used.prompt_tokens + used.completion_tokens if used is not None else 0


def _error(refusal: Refusal) -> RateLimitError:
    why, wait_s = refusal
    reason = f"Rate limit reached: {why}. Please try again in {whole_seconds(wait_s)}s."
    return RateLimitError(reason, wait_s=wait_s)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {_NOUNS[noun] if number == 1 else noun}"


def _duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: 90ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    if seconds < _MINUTE_S:
        return f"{math.ceil(1000 * seconds) / 1000:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
