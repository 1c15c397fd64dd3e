"""The ASGI layer that enforces the rate limits of API keys, and its token buckets."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import TwostrokeError
from twostroke.core.message_text import counted_noun
from twostroke.server.http.error_forms import ANTHROPIC
from twostroke.server.http.errors import to_response
from twostroke.server.http.request_context import served_of
from twostroke.server.http.retry_after import whole_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from twostroke.server.http.api_key import Key, KeyLimits
    from twostroke.server.http.request_context import ServedRequest

    Refusal = tuple[str, float]  # the reason, and the seconds to wait

_MINUTE_S: Final = 60.0
_NEWEST_WEIGHT: Final = 0.125  # in the moving average of request times
_LEVEL_TOLERANCE: Final = 1e-6  # so that a client that waits exactly the stated time is served
_NOUNS: Final = {"requests": "request", "tokens": "token"}


class RateLimitError(TwostrokeError):
    """The API key has used up its requests or tokens per minute, or its parallel requests."""

    http_status = 429
    code = "rate_limit_exceeded"


class Bucket:
    """A token bucket that enforces one limit per minute of an API key.

    Its level rises evenly, and can be negative. Times are in seconds of one monotonic clock.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        """Create a full bucket with a limit per minute; `now_s` is the current time."""
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._updated_s = now_s

    def level(self, now_s: float) -> float:
        """Return the bucket's current level: how many requests or tokens may be used now."""
        gained = (now_s - self._updated_s) * self.per_minute / _MINUTE_S
        self._level = min(self._level + gained, self.per_minute)
        self._updated_s = now_s
        return self._level

    def take(self, amount: float, now_s: float) -> None:
        """Lower the bucket's level by an amount; a negative amount raises it."""
        self._level = self.level(now_s) - amount

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return the seconds until the bucket's level reaches an amount; 0 if it already does."""
        missing = amount - self.level(now_s)
        return missing * _MINUTE_S / self.per_minute if missing > _LEVEL_TOLERANCE else 0.0

    def set_level(self, level: float, now_s: float) -> None:
        """Set the bucket's level, as a store that several routers share reports it."""
        self._level, self._updated_s = level, now_s

    def resize(self, per_minute: int, now_s: float) -> None:
        """Change the limit per minute.

        A positive level keeps its proportion to the limit, and a negative level stays.
        """
        level = self.level(now_s)
        self._level = level * per_minute / self.per_minute if level > 0 else level
        self.per_minute = per_minute


class KeyLimiter:
    """Enforces the rate limits of one API key; a request may start if no bucket is empty.

    Before a request is computed, it takes the maximum number of tokens that it may use, and gives
    the unused tokens back at its end. So a bucket can become negative only by the last request that
    was started.

    Attributes:
        buckets: the limits per minute by name, "requests" and "tokens".
        num_open: requests that have not ended.
        num_held: tokens that these requests have taken.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Create a limiter without limits; `clock` returns monotonic seconds."""
        self._clock = clock
        self.buckets: dict[str, Bucket] = {}
        self.num_open = 0
        self.num_held = 0
        self._parallel: int | None = None
        self._mean_s = 1.0  # moving average of request times

    def set(self, limits: KeyLimits) -> None:
        """Set the limits of the API key, which may have changed since the last request."""
        self._parallel = limits.parallel
        limits_per_minute = {
            "requests": limits.requests_per_minute,
            "tokens": limits.tokens_per_minute,
        }
        now_s = self._clock()
        for name, per_minute in limits_per_minute.items():
            bucket = self.buckets.get(name)
            if per_minute is None:
                self.buckets.pop(name, None)
            elif bucket is None:
                self.buckets[name] = Bucket(per_minute, now_s)
            elif bucket.per_minute != per_minute:
                bucket.resize(per_minute, now_s)

    def refusal(self) -> Refusal | None:
        """Return a refusal if the API key may not start a request now; None if it may.

        The refusal has the reason, and the seconds after which a request may start.
        """
        if (refusal := self.shortage("requests", "tokens")) is not None:
            return refusal
        if self._parallel is not None and self.num_open >= self._parallel:
            return self.parallel_refusal()
        return None

    def parallel_refusal(self) -> Refusal:
        """Return the refusal of a request because the key's limit of parallel requests is used."""
        limit = counted_noun(self._parallel or 0, "request", form=",")
        return f"this key may run {limit} at the same time", self._mean_s

    def shortage(self, *names: str) -> Refusal | None:
        """Return a refusal if one of the named buckets is empty; None if no bucket is empty.

        The buckets are "requests" and "tokens", for the limits per minute.
        """
        now_s = self._clock()
        waits = {name: bucket.wait_s(1, now_s) for name, bucket in self.buckets.items()}
        empty = [name for name in names if waits.get(name, 0) > 0]
        if not empty:
            return None
        return self.empty_refusal(max(empty, key=waits.__getitem__))

    def empty_refusal(self, name: str) -> Refusal:
        """Return the refusal of a request because the named bucket is empty."""
        bucket = self.buckets.get(name)
        if bucket is None:  # the limits have changed since
            return "the limits of this key have just changed", 1.0
        now_s = self._clock()
        limit = counted_noun(bucket.per_minute, _NOUNS[name], form=",")
        waits = [other.wait_s(1, now_s) for other in self.buckets.values()]
        return f"this key may use {limit} a minute", max(waits)

    def begin(self) -> Spending:
        """Count a request that starts; call this only if `refusal` returned None."""
        self.num_open += 1
        if (requests := self.buckets.get("requests")) is not None:
            requests.take(1, self._clock())
        return Spending(self, self._clock())

    def hold(self, num_tokens: int) -> None:
        """Take the tokens that a request may use, until it ends."""
        self.num_held += num_tokens
        self._take(num_tokens)

    def _take(self, num_tokens: int) -> None:
        """Take tokens from the key's tokens per minute; a negative number gives tokens back."""
        if (tokens := self.buckets.get("tokens")) is not None:
            tokens.take(num_tokens, self._clock())

    def end(self, began_s: float, *, num_held: int, num_used: int) -> None:
        """Count that a request has ended, and give its unused tokens back.

        Args:
            began_s: when the request began, on the limiter's clock.
            num_held: the tokens that it had taken.
            num_used: the tokens that it has used.
        """
        self._take(num_used - num_held)
        self.num_held -= num_held
        self.num_open -= 1
        self._mean_s += _NEWEST_WEIGHT * (self._clock() - began_s - self._mean_s)

    def set_levels(self, levels: Mapping[str, float]) -> None:
        """Set the levels of token buckets to those in the store that several routers share."""
        now_s = self._clock()
        for name, bucket in self.buckets.items():
            if name in levels:
                bucket.set_level(levels[name], now_s)

    def levels(self) -> dict[str, float]:
        """Return how much each limit's token bucket holds now, by the name of the limit."""
        now_s = self._clock()
        return {name: bucket.level(now_s) for name, bucket in self.buckets.items()}

    def headers(self, *, is_anthropic: bool) -> list[tuple[bytes, bytes]]:
        """Return the rate limit headers of a response: limits, remaining amounts and reset times.

        A limit is reset when its bucket is full again. The headers have the names of Anthropic's
        API, or else of OpenAI's.
        """
        now_s = self._clock()
        headers: list[tuple[str, str]] = []
        for name, bucket in self.buckets.items():
            num_left = max(0, math.floor(bucket.level(now_s)))
            full_s = bucket.wait_s(bucket.per_minute, now_s)
            if is_anthropic:
                reset = datetime.fromtimestamp(time.time() + full_s, UTC).isoformat("T", "seconds")
                header = "anthropic-ratelimit-{name}-{field}"
                reset = reset.replace("+00:00", "Z")
            else:
                header = "x-ratelimit-{field}-{name}"
                reset = _duration(full_s)
            values = {"limit": str(bucket.per_minute), "remaining": str(num_left), "reset": reset}
            headers += [
                (header.format(name=name, field=field), value) for field, value in values.items()
            ]
        return [(name.encode(), value.encode()) for name, value in headers]


class Spending:
    """The tokens that one running request has taken from its API key's tokens per minute."""

    def __init__(self, limiter: KeyLimiter, began_s: float) -> None:
        """Begin with a request that has taken no tokens; `began_s` is its start."""
        self._limiter = limiter
        self._began_s = began_s
        self._num_tokens = 0

    def reserve(self, num_tokens: int) -> None:
        """Take the maximum number of tokens that the request may use, before it is computed.

        Raises:
            RateLimitError: other requests have emptied the bucket meanwhile.
        """
        if (refusal := self._limiter.shortage("tokens")) is not None:
            raise rate_limit_error(refusal)
        self._num_tokens = num_tokens
        self._limiter.hold(num_tokens)

    def end(self, num_tokens: int) -> None:
        """Give the unused tokens of a request back; it has used `num_tokens`."""
        self._limiter.end(self._began_s, num_held=self._num_tokens, num_used=num_tokens)


class LimitCheck:
    """The ASGI layer that refuses requests over their API key's limits, before it reads bodies.

    Inner layers call `ServedRequest.reserve` with the maximum number of tokens of a request, and
    `ServedRequest.used` has the number of used tokens at the request's end, so this layer needs no
    engine. Nothing is stored, so a server starts with full buckets.
    """

    def __init__(self, app: ASGIApp, counts: Callable[[str], bool]) -> None:
        """Wrap the inner ASGI layers `app`; limit POST requests to paths that `counts` accepts."""
        self._app = app
        self._counts = counts
        self._limiters: dict[str, KeyLimiter] = {}  # by the id of the key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the inner layers if its key's limits allow it.

        The response gets rate limit headers. Other requests are answered with an error.
        """
        is_counted = scope["type"] == "http" and scope["method"] == "POST"
        served_request = served_of(scope) if is_counted and self._counts(scope["path"]) else None
        if served_request is None or served_request.key is None or not served_request.key.id:
            await self._app(scope, receive, send)
            return
        limiter = self.limiter(served_request.key)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = limiter.headers(is_anthropic=served_request.error_form is ANTHROPIC)
                message["headers"] = [*message["headers"], *added]
            await send(message)

        if (refusal := limiter.refusal()) is not None:
            response = to_response(rate_limit_error(refusal), scope)
            await response(scope, receive, send_with_headers)
            return
        spending = limiter.begin()
        served_request.reserve = spending.reserve
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            spending.end(num_used_tokens(served_request))

    def limiter(self, key: Key) -> KeyLimiter:
        """Return the limiter of an API key, after applying the key's current limits to it."""
        limiter = self._limiters.setdefault(key.id, KeyLimiter(time.monotonic))
        limiter.set(key.limits)
        return limiter


def num_used_tokens(served_request: ServedRequest) -> int:
    """Return how many prompt and answer tokens a request that has ended has used."""
    used = served_request.used
    return used.prompt_tokens + used.completion_tokens if used is not None else 0


def rate_limit_error(refusal: Refusal) -> RateLimitError:
    """Return the error for a refused request: the reason, and when to try again."""
    reason, wait_s = refusal
    message = f"Rate limit reached: {reason}. Please try again in {whole_seconds(wait_s)}s."
    return RateLimitError(message, wait_s=wait_s)


def _duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: 90ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    if seconds < _MINUTE_S:
        return f"{math.ceil(1000 * seconds) / 1000:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
