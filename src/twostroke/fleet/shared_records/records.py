"""A router's client of the Redis store with the records that several routers share.

All requests of a router share one connection, which sends one batch of operations after another.
While a batch is on its way, the operations of the next batch are collected, so a slow store makes
requests wait, but needs no more work. While the store does not answer, the router decides alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.message_text import counted_noun
from twostroke.fleet.shared_records.script import BEGUN_S, LEASE_MS
from twostroke.fleet.shared_records.shared_costs import SharedCosts
from twostroke.fleet.shared_records.store import StoreError
from twostroke.fleet.shared_records.stored import decode_keys, encode_owner
from twostroke.server.auth.costs import COUNT_COLUMNS
from twostroke.server.auth.limits import KeyLimiter
from twostroke.server.auth.usage import UsageBook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from twostroke.fleet.shared_records.store import StoreConnection
    from twostroke.server.auth.costs import CostOwner
    from twostroke.server.auth.keys import ApiKeys
    from twostroke.server.auth.usage import Rows
    from twostroke.server.http.api_key import Key
    from twostroke.server.http.request_context import ServedRequest

_GRACE_S: Final = 0.01
_BEAT_S: Final = 0.5  # a changed key is known after about this time
_MIN_PATIENCE_S: Final = 2.0  # with one batch
_MIN_PAUSE_S: Final = 0.1  # after a failure
_MAX_PAUSE_S: Final = 1.0
_STOP_S: Final = 5.0
_MAX_CLOCK_ERROR_S: Final = 2.0
_COUNTS: Final = ("requests", "input", "cached", "output")
_logger = logging.getLogger("twostroke.router")


class AwayError(Exception):
    """The store has not answered in time: the router decides alone."""


class LimitOperation:
    """One change or check of a key's limits in the store.

    Attributes:
        fields: the operation in the form that the store's script reads.
        reply: a future for the result; None if no request waits for the result.
        take: called with the result and the levels of the key's buckets, before `reply` is set.
    """

    def __init__(
        self,
        key: Key,
        kind: str,
        take: Callable[[str, dict[str, float]], None] = lambda _result, _levels: None,
        **fields: Any,
    ) -> None:
        """Create an operation of the script for an API key.

        `kind` is "admit", "check", "finish" or "sync", and `fields` are its further arguments, such
        as the number of tokens to hold.
        """
        limits = key.limits
        self.take = take
        self.fields: dict[str, Any] = {
            "key": key.id,
            "kind": kind,
            "requests_per_minute": limits.requests_per_minute or 0,
            "tokens_per_minute": limits.tokens_per_minute or 0,
            "parallel": limits.parallel or 0,
            **fields,
        }
        self.reply: asyncio.Future[str] | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits for the reply."""
        return self.reply is not None and not self.reply.done()


class _Usage:
    """Usage, key uses and costs, sent with the same number until the store has confirmed them."""

    def __init__(
        self,
        number: int,
        rows: Rows,
        uses: dict[str, int],
        waiting: list[asyncio.Future[None]],
        costs: list[Any],
    ) -> None:
        self.rows, self.uses, self._waiting = rows, uses, waiting
        self.num_requests = sum(counts[0] for counts in rows.values())
        self.fields = {
            "number": number,
            "rows": [
                (
                    owner.day,
                    [
                        (f"{name} {encode_owner(owner)}", str(count))
                        for name, count in zip(_COUNTS, counts, strict=True)
                        if count
                    ],
                )
                for owner, counts in rows.items()
            ],
            "uses": {id_: str(minute) for id_, minute in uses.items()},
            "costs": costs,
        }

    def confirm(self) -> None:
        """Wake the requests that wait until their usage is in the store."""
        _set_done(self._waiting)


class SharedRecords:
    """The API keys, limits and usage that a router shares with other routers.

    While the store does not answer ("is away"), the router decides by its own limiters, which have
    the levels that the store has reported last, and collects usage until the store answers again.

    Attributes:
        usage: the usage that was not sent yet.
        costs: the costs of replicas and upstreams.
        is_away: whether the store does not answer in time, so that the router decides alone.
        num_alone: requests that the router has admitted or counted without the store.
        num_batches: batches that the store has answered.
        batch_s: the time that these batches took, in seconds.
        warning: a sentence about another router that has other fixed keys or secrets; else empty.
    """

    def __init__(
        self,
        store: StoreConnection,
        keys: ApiKeys,
        replica_key: str,
        max_wait_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Prepare to share records in `store`.

        Args:
            store: the connection.
            keys: the router's API keys, which are updated from the store.
            replica_key: the secret of routers and replicas.
            max_wait_s: how long a request waits for the store before the router decides alone.
            clock: returns this machine's Unix time.
        """
        self.usage = UsageBook("unknown", self.time)
        self.costs = SharedCosts()
        self.is_away = False
        self.num_alone = 0
        self.num_batches = 0
        self.batch_s = 0.0
        self.warning = ""
        self._store = store
        self._keys = keys
        self._digests = _digest(repr(keys.fixed)) + _digest(replica_key)
        self._clock = clock
        self._max_wait_s = max_wait_s
        self._patience_s = max(_MIN_PATIENCE_S, max_wait_s)
        self._clock_error_s = 0.0
        self._router = secrets.token_hex(8)
        self._identity = ""
        self._change = ""
        self._needs_sync = True
        self._needs_keys = True
        self._number = 0
        self._usage_number = 0
        self._unconfirmed: _Usage | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._awaiting_report: list[asyncio.Future[None]] = []
        self._operations: list[LimitOperation] = []
        self._limiters: dict[str, KeyLimiter] = {}
        self._wake = asyncio.Event()
        self._pause_s = _MIN_PAUSE_S
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def num_unwritten(self) -> int:
        """The number of requests whose usage the store has not confirmed yet."""
        waiting = self._unconfirmed.num_requests if self._unconfirmed is not None else 0
        return self.usage.num_requests + waiting

    async def start(self) -> None:
        """Start to exchange batches with the store; return after the first batch."""
        await self._exchange()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write the usage and costs that are not written yet, and end the router's lease.

        Usage and costs that cannot be written within some seconds are lost; an error is logged.
        """
        self._is_stopping = True
        if self._task is not None:  # a client of Redis may swallow a cancellation
            self._wake.set()
            await asyncio.gather(self._task, return_exceptions=True)
        end_s = time.monotonic() + _STOP_S
        while True:
            await self._exchange(lease_ms=1)
            is_written = not self.num_unwritten and not self.costs.has_unwritten
            if is_written or time.monotonic() > end_s:
                break
            await asyncio.sleep(_MIN_PAUSE_S)
        if count := self.num_unwritten:
            requests = counted_noun(count, "request")
            _logger.error(
                "The usage of %s could not be written to the store: it is lost.", requests
            )
        if self.costs.has_unwritten:
            _logger.error("Costs could not be written to the store: they are lost.")
        await self._store.disconnect()

    def limiter(self, key: Key) -> KeyLimiter | None:
        """Return the router's own limiter of an API key; None if the key has no limits."""
        limits = key.limits
        has_limits = any(getattr(limits, name) is not None for name in limits.__struct_fields__)
        if not has_limits and key.id not in self._limiters:
            return None
        limiter = self._limiters.setdefault(key.id, KeyLimiter(time.monotonic))
        limiter.set(limits)
        return limiter

    async def ask(self, operation: LimitOperation) -> str:
        """Send an operation, and return its result.

        Raises:
            AwayError: the store does not answer in time.
        """
        if self.is_away:
            self.num_alone += 1
            self._needs_sync = True  # a batch on its way does not know of this request
            raise AwayError
        operation.reply = asyncio.get_running_loop().create_future()
        self.post(operation)
        if await self._wait(operation.reply):
            if operation.reply.exception() is None:
                return operation.reply.result()
            self.num_alone += 1
        self._needs_sync = True  # the store may count the request or not
        raise AwayError

    def post(self, operation: LimitOperation) -> None:
        """Send an operation, and do not wait for it."""
        self._operations.append(operation)
        self._wake.set()

    def add_costs(self, owner: CostOwner, counts: Iterable[int]) -> None:
        """Add costs to the sums of all routers, with the next batch.

        `counts` (requests, tokens, cost and others) are in the order of `COUNT_COLUMNS`.
        """
        sums = self.costs.rows.setdefault(owner, [0] * len(COUNT_COLUMNS))
        sums[:] = [total + count for total, count in zip(sums, counts, strict=True)]
        self._wake.set()

    def observe(self, served_request: ServedRequest) -> None:
        """Count the usage of a request that has ended, unless it is counted already."""
        if not served_request.is_usage_counted:
            served_request.is_usage_counted = True
            self.usage.observe(served_request)
            if not self.usage.is_empty:
                self._wake.set()

    def close(self) -> None:
        """Do nothing, since `stop` has written all usage."""

    async def count(self, served_request: ServedRequest) -> None:
        """Count the usage of a request; return when the store has it, or does not answer."""
        self.observe(served_request)
        if self.is_away:
            self.num_alone += 1
            return
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(written)
        await self._wait(written)

    async def exchange_costs(self) -> None:
        """Exchange reserved costs with other routers, through the store.

        Sends the costs that this router's running requests may reach, and receives the same of the
        other routers. Returns when the store has answered, or does not answer in time.
        """
        if self.is_away:
            return
        reported: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaiting_report.append(reported)
        self._wake.set()
        await self._wait(reported)

    async def _wait(self, answer: asyncio.Future[Any]) -> bool:
        """Wait for an answer of the store; return whether it has come within `max_wait_s`.

        If not, the router decides alone until the store answers again.
        """
        try:
            await asyncio.wait([answer], timeout=self._max_wait_s)
            if not answer.done():  # if this process was not run, the answer may be there
                await asyncio.wait([answer], timeout=_GRACE_S)
        finally:
            is_there = answer.done()
            answer.cancel()
        if not is_there:
            self._go_alone(f"it took longer than {self._max_wait_s:g} s")
            self.num_alone += 1
        return is_there

    async def _run(self) -> None:
        while not self._is_stopping:
            with suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_S):
                    await self._wake.wait()
            if not await self._exchange():
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)

    async def _exchange(self, lease_ms: int = LEASE_MS) -> bool:
        """Send a batch of all that is queued; return whether the store has answered.

        `lease_ms` is how long the store then counts this router as alive.
        """
        self._wake.clear()
        operations = self._take_operations()
        batch = self._batch(operations, lease_ms)
        reported, self._awaiting_report = self._awaiting_report, []
        self._needs_sync = False  # until the batch fails, or a request decides alone meanwhile
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._patience_s):
                reply = await self._store.run(batch)
            if not reply[1]:
                self._log_damage(reply[2])
                self._awaiting_report = [*reported, *self._awaiting_report]
                self._retry(operations)
                return True
            self._take_reply(reply, operations)
            _set_done(reported)
            if self._needs_keys:
                async with asyncio.timeout(self._patience_s):
                    await self._read_keys()
        except (StoreError, TimeoutError) as error:
            self._fail(operations, str(error) or "it does not answer")
            _set_done(reported)
            await self._store.disconnect()
            return False
        except Exception:  # otherwise no batch would follow, and usage would wait for ever
            _logger.exception("A batch for the store failed")
            self._fail(operations, "see the error above")
            _set_done(reported)
            await self._store.disconnect()
            return False
        elapsed_s = time.monotonic() - began_s
        self.num_batches += 1
        self.batch_s += elapsed_s
        self._pause_s = _MIN_PAUSE_S
        if self.is_away and elapsed_s < self._max_wait_s:
            self.is_away = False
            _logger.info("The store %s answers again.", self._store.address)
        return True

    def _take_operations(self) -> list[LimitOperation]:
        """Return the operations of the next batch, and remove them from the queue.

        If the store may have wrong counts, the batch begins with this router's own counts.
        """
        operations, self._operations = self._operations, []
        if not self._needs_sync:
            return operations
        # The limiters know of all requests that do not wait for an answer.
        counts = [
            LimitOperation(
                key,
                "sync",
                open=limiter.num_open,
                held=limiter.num_held,
                levels=limiter.levels(),
            )
            for key_id, limiter in self._limiters.items()
            if (key := self._keys.with_id(key_id)) is not None
        ]
        return counts + [operation for operation in operations if operation.is_awaited]

    def _batch(self, operations: Iterable[LimitOperation], lease_ms: int) -> dict[str, Any]:
        self._number += 1
        batch: dict[str, Any] = {
            "router": self._router,
            "number": self._number,
            "lease_ms": lease_ms,
            "num_keys": len(self._keys.stored),
            "ops": [operation.fields for operation in operations],
        }
        if self._unconfirmed is None:
            uses = self._keys.take_uses()
            if uses or not self.usage.is_empty or self.costs.rows:
                self._usage_number += 1
                waiting, self._waiting = self._waiting, []
                self._unconfirmed = _Usage(
                    self._usage_number, self.usage.take(), uses, waiting, self.costs.take()
                )
        if self._unconfirmed is not None:
            batch["usage"] = self._unconfirmed.fields
        if self.costs.on_report is not None:
            day = f"{datetime.fromtimestamp(self.time(), UTC):%Y-%m-%d}"
            batch["spending"] = self.costs.request(day)
        if self._needs_sync:
            keys = {key.id: msgspec.json.encode(key).decode() for key in self._keys.stored}
            batch["sync"] = True
            batch["digests"] = self._digests
            batch["identity"] = self._identity or secrets.token_hex(8)
            batch["known_identity"] = self._identity
            batch["begun_s"] = BEGUN_S
            batch["keys"] = keys
        return batch

    def _log_damage(self, key_ids: list[bytes]) -> None:
        """Log that the store has removed damaged limits, which the routers' counts replace."""
        for key_id in key_ids:
            _logger.error(
                "The limits of key %s in the store %s were damaged: they go on from what the "
                "routers know.",
                key_id.decode("ascii", "replace"),
                self._store.address,
            )

    def _retry(self, operations: list[LimitOperation]) -> None:
        """Send operations again in the next batch, since the store has not run their batch.

        The next batch also sets the router's own counts in the store.
        """
        self._needs_sync = True
        self._operations = [*operations, *self._operations]
        self._wake.set()

    def _take_reply(self, reply: list[Any], operations: list[LimitOperation]) -> None:
        """Apply the store's reply to a batch, with a result for each of its `operations`."""
        now_s, identity, change = float(reply[0]), reply[2].decode(), reply[3].decode()
        was_removed, others, results = bool(reply[4]), reply[5], reply[6]
        if self._unconfirmed is not None:
            self._unconfirmed.confirm()
            self._unconfirmed = None
            self.costs.confirm()
        if self.costs.on_report is not None:
            self.costs.take_report(reply[7], 1 + len(others))
        for operation, result in zip(operations, results, strict=True):
            if operation.reply is None:
                continue
            if operation.reply.done():
                self._needs_sync = True  # the request has decided without this answer
                continue
            levels = {"requests": float(result[1]), "tokens": float(result[2])}
            operation.take(result[0].decode(), levels)
            operation.reply.set_result(result[0].decode())
        self._needs_keys |= change != self._change
        self._change = change
        self._compare_clock(now_s)
        self._compare_digests(others)
        if was_removed and self._identity:
            keys = counted_noun(len(self._keys.stored), "API key was", "API keys were")
            _logger.error(
                "The data of the store %s were removed: %s stored again; usage that was there is "
                "lost, unless you restore a backup.",
                self._store.address,
                keys,
            )
        elif self._identity not in {"", identity}:
            reason = "The store %s has other data than before: its API keys are used from now on."
            _logger.error(reason, self._store.address)
        self._identity = identity

    async def _read_keys(self) -> None:
        self._keys.replace_stored(decode_keys(await self._store.read_keys()))
        self._needs_keys = False

    def _fail(self, operations: list[LimitOperation], reason: str) -> None:
        """Make requests that wait for a failed batch continue without the store."""
        self._needs_sync = True
        self._go_alone(reason)
        for operation in operations:
            if operation.reply is not None and not operation.reply.done():
                operation.reply.set_exception(AwayError())

    def _go_alone(self, reason: str) -> None:
        if not self.is_away:
            self.is_away = True
            _logger.warning(
                "The store %s is away (%s): limits go on in this router alone, and usage waits.",
                self._store.address,
                reason,
            )

    def time(self) -> float:
        """Return the store's Unix time."""
        return self._clock() + self._clock_error_s

    def _compare_clock(self, now_s: float) -> None:
        was_wrong = abs(self._clock_error_s) > _MAX_CLOCK_ERROR_S
        self._clock_error_s = now_s - self._clock()
        if abs(self._clock_error_s) > _MAX_CLOCK_ERROR_S and not was_wrong:
            _logger.warning(
                "The clocks of this machine and of the store %s differ by %.0f s: limits and days "
                "of usage follow the store, and keys expire by this machine's clock.",
                self._store.address,
                abs(self._clock_error_s),
            )

    def _compare_digests(self, others: list[bytes]) -> None:
        """Warn if another router has other fixed keys, or another secret, than this one."""
        own_keys, own_secret = self._digests[:4], self._digests[4:]
        digests = [other.decode() for other in others]
        warning = ""
        if any(other[4:] != own_secret for other in digests):
            warning = "Another router of this store has another TWOSTROKE_REPLICA_KEY."
        elif any(other[:4] != own_keys for other in digests):
            warning = (
                "Another router of this store has other keys in --api-keys or TWOSTROKE_API_KEY: "
                "one of the routers refuses them."
            )
        if warning and warning != self.warning:
            _logger.warning(warning)
        self.warning = warning


def _set_done(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _digest(text: str) -> str:
    """Return a 16-bit digest: enough to notice different secrets, too short to test guesses."""
    return hashlib.sha256(text.encode()).hexdigest()[:4]
