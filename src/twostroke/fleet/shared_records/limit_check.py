"""The ASGI layer that enforces the limits of API keys that several routers share."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from twostroke.fleet.shared_records.records import AwayError, LimitOperation
from twostroke.server.auth.limits import num_used_tokens, rate_limit_error
from twostroke.server.auth.usage import billable_usage
from twostroke.server.http.error_forms import ANTHROPIC
from twostroke.server.http.errors import to_response
from twostroke.server.http.request_context import served_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from twostroke.fleet.shared_records.records import SharedRecords
    from twostroke.server.auth.limits import KeyLimiter, Refusal
    from twostroke.server.http.api_key import Key
    from twostroke.server.http.request_context import ServedRequest


class SharedLimitCheck:
    """The ASGI layer that refuses requests over the limits that routers share.

    It replaces `LimitCheck`, which knows only one server's requests. A request is admitted after
    its body was read, so that one message to the store counts the request, its tokens and its slot
    in the limit of parallel requests. If the router's own limiter would refuse the request, the
    store is asked before the body is read.
    """

    def __init__(self, app: ASGIApp, records: SharedRecords) -> None:
        """Wrap the inner ASGI layers `app`; limit POST requests as `records` allow."""
        self._app = app
        self._records = records

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the inner layers if its key's limits allow it.

        The response gets rate limit headers. Other requests are answered with an error.
        """
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = served_of(scope)
        spending = SharedSpending(self._records, request)
        request.reserve = spending.reserve
        request.admit = spending.admit
        request.settle = spending.settle
        request.holds_end = True
        limiter = spending.limiter

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start" and limiter is not None:
                added = limiter.headers(is_anthropic=request.error_form is ANTHROPIC)
                message["headers"] = [*message["headers"], *added]
            await send(message)

        if limiter is not None and (refusal := await spending.refusal()) is not None:
            response = to_response(rate_limit_error(refusal), scope)
            await response(scope, receive, send_with_headers)
            return
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            spending.end()


class SharedSpending:
    """The part of its key's limits that one request takes.

    Attributes:
        limiter: the router's own limiter of the key; None if the key has no limits.
    """

    def __init__(self, records: SharedRecords, request: ServedRequest) -> None:
        """Start with a request that has not taken any part of its key's limits."""
        self._records = records
        self._request = request
        self._began_s = time.monotonic()
        self._num_tokens = 0
        self._is_admitted = False
        self._is_ended = False
        key = request.key
        self._key: Key | None = key if key is not None and key.id else None
        self.limiter: KeyLimiter | None = None if self._key is None else records.limiter(self._key)

    def reserve(self, num_tokens: int) -> None:
        """Note the maximum number of tokens that the request may use, for `admit`."""
        self._num_tokens = num_tokens

    async def refusal(self) -> Refusal | None:
        """Return why the request may not start; None if it may, or if `admit` must decide."""
        assert self.limiter is not None
        own_refusal = self.limiter.refusal()
        if own_refusal is None:
            return None
        try:
            return await self._ask("check")
        except AwayError:
            return own_refusal

    async def admit(self) -> None:
        """Count the request, its tokens and its parallel slot against the limits of its key.

        Raises:
            RateLimitError: the limits do not allow the request now.
        """
        limiter = self.limiter
        if limiter is None:
            return
        try:
            refusal = await self._ask("admit")
        except AwayError:
            refusal = None if self._is_admitted else limiter.refusal()
            if refusal is None and not self._is_admitted:
                self._hold(limiter)
        if refusal is not None:
            self._is_ended = True
            raise rate_limit_error(refusal)

    async def settle(self) -> None:
        """Count the usage of the request before its last bytes are sent to the client.

        Returns when the usage is in the store, or when the store does not answer in time.
        """
        self.end()
        if billable_usage(self._request) is not None:
            await self._records.count(self._request)

    def end(self) -> None:
        """Give back the request's parallel slot and its unused tokens; later calls do nothing."""
        if self._is_ended or self.limiter is None or self._key is None:
            return
        self._is_ended = True
        is_open = int(self._is_admitted)
        num_held = self._num_tokens if is_open else 0
        num_used = num_used_tokens(self._request) if is_open else 0
        if self._is_admitted:
            self.limiter.end(self._began_s, num_held=num_held, num_used=num_used)
        self._records.post(
            LimitOperation(
                self._key,
                "finish",
                # A request with an error counts as a request, although it was not admitted.
                requests=1 - is_open,
                open=is_open,
                held=num_held,
                used=num_used,
            )
        )

    async def _ask(self, kind: str) -> Refusal | None:
        """Ask the store whether the request may start; return why it may not, or None.

        `kind` is the operation: "admit" counts the request if it may start, "check" only asks.

        Raises:
            AwayError: the store does not answer in time.
        """
        assert self._key is not None
        assert self.limiter is not None
        num_tokens = self._num_tokens if kind == "admit" else 0
        result = await self._records.ask(
            LimitOperation(self._key, kind, self._take, held=num_tokens)
        )
        if result in {"admitted", "allowed"}:
            return None
        if result == "parallel":
            return self.limiter.parallel_refusal()
        return self.limiter.empty_refusal(result)

    def _take(self, result: str, levels: dict[str, float]) -> None:
        """Apply the store's answer to the router's own limiter.

        `result` says whether the store has admitted the request; `levels` are the levels of the
        key's token buckets.
        """
        assert self.limiter is not None
        if result == "admitted":
            self._hold(self.limiter)
        self.limiter.set_levels(levels)

    def _hold(self, limiter: KeyLimiter) -> None:
        limiter.begin()
        limiter.hold(self._num_tokens)
        self._is_admitted = True
