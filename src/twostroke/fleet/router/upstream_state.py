"""The state of an upstream: its key, its connections, its pauses after failures, its spending."""

from __future__ import annotations

import email.utils
import logging
import math
import ssl
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import UsageError
from twostroke.fleet.router.key_file import KeyFile
from twostroke.fleet.router.response import ReplicaError
from twostroke.fleet.router.upstream import ConnectionPool, Timeouts

if TYPE_CHECKING:
    from twostroke.core.errors import TwostrokeError
    from twostroke.fleet.router.cost_book import CostBook
    from twostroke.fleet.router.overflow_file import BoughtModel, UpstreamSpec
    from twostroke.fleet.router.response import Head

_KEY_PAUSE_S: Final = 600.0  # after a refused key, unless the file changes before
_BUSY_PAUSE_S: Final = 10.0  # after a refusal that names no time
_MAX_BUSY_PAUSE_S: Final = 3600.0
_MODEL_PAUSE_S: Final = 60.0
_UNKNOWN_COST_PAUSE_S: Final = 10.0  # while the spending of the day is not known
_UNREACHABLE_PAUSE_S: Final = 10.0
_MAX_FAILURE_PAUSE_S: Final = 60.0
_NUM_FREE_FAILURES: Final = 2  # in a row, after which an upstream is still used at once
_NEW_WEIGHT: Final = 0.2  # of the newest time in the average time to the first token
_MAX_AVERAGE_AGE_S: Final = 60.0  # after which a slow upstream gets another chance
# Linux ends a connection after this time without acknowledgement; the internet loses packets.
_UNACKNOWLEDGED_MS: Final = 20_000
_KEY_STATUSES: Final = frozenset((401, 402))
_FORBIDDEN_STATUS: Final = 403  # of the key, or of one request's content
_BUSY_STATUSES: Final = frozenset((429, 503, 529))
_LOOP_STATUS: Final = 508
_REFUSED_STATUSES: Final = frozenset((400, 413, 415, 422))
# Words for metrics about requests that an upstream did not answer to the end.
FAILURE_KINDS: Final = (
    *("key", "busy", "loop", "model", "refused", "forbidden", "unreachable", "timeout"),
    *("status", "stream", "nonsense"),
)
_NO_CREDIT: Final = b"insufficient_quota"  # OpenAI says it with status 429
_logger = logging.getLogger("twostroke.router")


class UpstreamError(ReplicaError):
    """An upstream did not answer a request, so another upstream or a replica may answer it.

    Attributes:
        kind: the kind of failure, a word of `FAILURE_KINDS`.
        pause_s: seconds for which the upstream is not used; None if they depend on the number of
            earlier failures.
        request_error: the error for the client, if the request itself is refused.
    """

    def __init__(self, reason: str, kind: str, pause_s: float | None = None) -> None:
        """Create the error; `reason` is a sentence that quotes no text of the upstream."""
        super().__init__(reason)
        self.kind = kind
        self.pause_s = pause_s
        self.request_error: TwostrokeError | None = None


class Upstream:
    """An API that may answer requests. Call the methods only in the event loop's thread.

    Attributes:
        spec: the upstream's entry in the overflow file.
        pool: the connections to the upstream.
        num_running: requests that run there.
        num_requests: answered requests, by rule.
        num_failures: requests that it did not answer, by kind of failure.
        reason: why the last request failed, for people; empty after an answer.
        failure_kind: the kind of the last failure; empty after an answer.
    """

    def __init__(self, spec: UpstreamSpec, costs: CostBook) -> None:
        """Create an unused upstream, and read its key.

        Raises:
            UsageError: the file with the key or with certificates cannot be used.
        """
        self.spec = spec
        self._costs = costs
        self._key_file = KeyFile(Path(spec.key_file))
        timeouts = Timeouts(spec.connect_timeout, _UNACKNOWLEDGED_MS)
        address = spec.address()
        tls = _tls_context(spec) if address.is_tls else None
        self.pool = ConnectionPool(address, timeouts, tls)
        self.num_running = 0
        self.num_requests: Counter[str] = Counter()
        self.num_failures: Counter[str] = Counter()
        self._first_token_s = 0.0
        self._first_token_at_s = -math.inf  # monotonic
        self.reason = ""
        self.failure_kind = ""
        self._reserved_cost = 0.0  # of requests that run
        self._paused_until_s = 0.0
        self._is_key_refused = False
        self._num_key_changes = 0
        self._num_failures_in_row = 0
        self._paused_models: dict[str, float] = {}  # the end of the pause, by the upstream's name
        self._model_reason = ""
        self._has_reached_ceiling = False

    @property
    def name(self) -> str:
        """The upstream's name."""
        return self.spec.name

    @property
    def first_token_s(self) -> float:
        """The average time to the first token of its streams; 0.0 without a recent stream."""
        age_s = time.monotonic() - self._first_token_at_s
        return self._first_token_s if age_s < _MAX_AVERAGE_AGE_S else 0.0

    def wait_s(self, bought: BoughtModel) -> float:
        """Return after how many seconds the upstream may be used for a model; 0.0 if now."""
        now_s = time.monotonic()
        if self._is_key_refused:
            with suppress(UpstreamError):
                self.key()  # a new key ends the pause
        if self._has_spent_all:
            if not self._has_reached_ceiling:
                limit = f"{self.spec.max_cost_per_day:,g}"
                reason = "Upstream %s has reached its max_cost_per_day of %s."
                _logger.warning(reason, self.name, limit)
            self._has_reached_ceiling = True
            return _seconds_to_midnight()
        self._has_reached_ceiling = False
        if self._costs.why_unknown(self.name):
            return _UNKNOWN_COST_PAUSE_S
        pause_s = max(self._paused_until_s, self._paused_models.get(bought.model, 0.0)) - now_s
        if pause_s > 0:
            return pause_s
        return 1.0 if self._reason_if_full else 0.0

    @property
    def state(self) -> tuple[str, str]:
        """The state as a word (ready, paused, full or spent), and its reason.

        The reason of a ready upstream is its last failure; empty if it has answered since then.
        """
        if self._has_spent_all:
            return "spent", f"It has reached max_cost_per_day, {self.spec.max_cost_per_day:,g}."
        if reason := self._costs.why_unknown(self.name):
            return "paused", reason
        if self._paused_until_s > time.monotonic():
            return "paused", self.reason
        if reason := self._reason_if_full:
            return "full", reason
        is_model_paused = any(end_s > time.monotonic() for end_s in self._paused_models.values())
        return "ready", self._model_reason if is_model_paused else self.reason

    @property
    def _has_spent_all(self) -> bool:
        """Whether the requests that have ended today have reached `max_cost_per_day`."""
        return self._costs.spent_today(self.name) >= self.spec.max_cost_per_day

    @property
    def _reason_if_full(self) -> str:
        """Why another request must wait until a running request ends; empty if it need not wait."""
        if self.num_running >= self.spec.max_parallel:
            return f"It runs max_parallel requests, {self.spec.max_parallel}."
        limit = self.spec.max_cost_per_day
        if self._reserved_cost >= self._costs.room(self.name, limit):
            return f"The requests that run there may reach max_cost_per_day, {limit:,g}."
        return ""

    @property
    def is_busy(self) -> bool:
        """Whether the upstream is only out of capacity or budget, so that a retry may succeed."""
        word, _ = self.state
        return word in {"spent", "full"} or (word == "paused" and self.failure_kind == "busy")

    def key(self) -> str:
        """Return the API key; a changed key ends the pause that began when the key was refused.

        Raises:
            UpstreamError: the file has no key now.
        """
        try:
            key = self._key_file.key()
        except UsageError as error:
            raise UpstreamError(str(error), "key", _UNREACHABLE_PAUSE_S) from None
        if self._key_file.num_changes != self._num_key_changes:
            self._num_key_changes = self._key_file.num_changes
            if self._is_key_refused:
                self._is_key_refused = False
                self._paused_until_s = 0.0
                _logger.info("Upstream %s has a new key, and is used again.", self.name)
        return key

    async def begin(self, max_cost: float) -> bool:
        """Count a request, and reserve its maximum cost; return whether the request may be sent.

        `max_cost` is in the unit of the overflow file's currency. The request may not be sent if
        other routers have meanwhile reserved the rest of the day's limit. The caller must call
        `end` in any case.
        """
        self.num_running += 1
        cost_before = self._reserved_cost
        self._reserved_cost += max_cost
        self._costs.reserve(self.name, self._reserved_cost)
        await self._costs.exchange()
        others_cost = min(cost_before, self._reserved_cost - max_cost)  # of requests before it
        return others_cost < self._costs.room(self.name, self.spec.max_cost_per_day)

    def end(self, max_cost: float) -> None:
        """End a request, answered or not: free its slot, and the `max_cost` given to `begin`."""
        self.num_running -= 1
        self._reserved_cost = max(0.0, self._reserved_cost - max_cost) if self.num_running else 0.0
        self._costs.reserve(self.name, self._reserved_cost)

    def record_answer(self, rule: str, bought: BoughtModel) -> None:
        """Count an answered request by its rule; earlier failures no longer count."""
        self.num_requests[rule] += 1
        self._paused_models.pop(bought.model, None)
        self._num_failures_in_row = 0
        if self._paused_until_s > time.monotonic():  # an earlier request has ended later
            return
        self._is_key_refused = False
        if self.reason:
            _logger.info("Upstream %s answers again.", self.name)
        self.reason = self.failure_kind = ""

    def record_first_token(self, seconds: float) -> None:
        """Add the time to the first token of a stream to the average."""
        average_s = self.first_token_s
        weight = _NEW_WEIGHT if average_s else 1.0
        self._first_token_s = average_s + weight * (seconds - average_s)
        self._first_token_at_s = time.monotonic()

    def record_failure(self, error: UpstreamError, bought: BoughtModel) -> None:
        """Count a failure, pause the upstream or its model if necessary, and log it once."""
        self.num_failures[error.kind] += 1
        pause_s = error.pause_s
        if error.kind == "refused":  # because of the request
            return
        now_s = time.monotonic()
        if error.kind == "model":
            if bought.model not in self._paused_models:
                _logger.warning("Upstream %s: %s", self.name, error)
            self._paused_models[bought.model] = now_s + _MODEL_PAUSE_S
            self._model_reason = str(error)
            return
        if pause_s is None:
            self._num_failures_in_row += 1
            excess = self._num_failures_in_row - _NUM_FREE_FAILURES
            pause_s = min(2.0**excess, _MAX_FAILURE_PAUSE_S) if excess > 0 else 0.0
        is_news = str(error) != self.reason
        self.reason, self.failure_kind = str(error), error.kind
        self._is_key_refused |= error.kind == "key" and pause_s > 0
        self._paused_until_s = max(self._paused_until_s, now_s + pause_s)
        if is_news:
            text = f", and is not used for {pause_s:.0f} s" if pause_s else ""
            _logger.warning("Upstream %s fails%s: %s", self.name, text, error)

    def close(self) -> None:
        """Close the connections that no request uses."""
        self.pool.close_idle()


def status_error(head: Head, body: bytes, bought: BoughtModel) -> UpstreamError:
    """Return the error for an upstream's answer with an error status.

    The error's message quotes nothing from the body, since the body may repeat the key.
    """
    status = head.status
    if status == _LOOP_STATUS:
        reason = "It is this router itself, or another router that leads back here."
        return UpstreamError(reason, "loop", _KEY_PAUSE_S)
    if status in _KEY_STATUSES or (status == 429 and _NO_CREDIT in body):
        reason = f"It does not accept its key, or the account has no credit (status {status})."
        return UpstreamError(reason, "key", _KEY_PAUSE_S)
    if status == _FORBIDDEN_STATUS:
        return UpstreamError("It forbids the request (status 403).", "forbidden")
    if status in _BUSY_STATUSES:
        pause_s = _retry_after_s(head)
        return UpstreamError(f"It is busy (status {status}).", "busy", pause_s)
    if status == 404:
        reason = f"It has no model '{bought.model}', or its URL is wrong (status 404)."
        return UpstreamError(reason, "model")
    if status in _REFUSED_STATUSES:
        return UpstreamError(f"It refuses the request (status {status}).", "refused")
    return UpstreamError(f"It answers with status {status}.", "status")


def unreachable(error: ReplicaError) -> UpstreamError:
    """Return the error for an upstream to which no connection could be opened."""
    return UpstreamError(str(error), "unreachable", _UNREACHABLE_PAUSE_S)


def _retry_after_s(head: Head) -> float:
    """Return the seconds in a response's header `Retry-After`, within bounds."""
    text = head.value(b"retry-after").decode("latin-1").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return _BUSY_PAUSE_S
    if not seconds >= 0:
        return _BUSY_PAUSE_S
    return min(seconds, _MAX_BUSY_PAUSE_S)


def _seconds_to_midnight() -> float:
    return 86_400 - time.time() % 86_400


def _tls_context(spec: UpstreamSpec) -> ssl.SSLContext:
    """Return the TLS context that checks the certificate of an upstream.

    Raises:
        UsageError: the file of certificates cannot be used.
    """
    try:
        return ssl.create_default_context(cafile=spec.ca_file or None)
    except ssl.SSLError:
        raise UsageError(
            f"The ca_file {spec.ca_file} has no certificate in PEM form.",
        ) from None
    except OSError as error:
        raise UsageError(
            f"The ca_file {spec.ca_file} cannot be read: {error.strerror}.",
        ) from None
