"""Chooses a replica for each attempt of a request, and isolates requests that may kill engines.

Most requests share a replica with others. A request during which two engines have died
(`engine_killers.py`) is isolated: the router reserves a replica for the request, sends no other
request there, waits until the replica's running requests have ended, and only then sends the
request. If this engine dies, too, the request was the cause; if the request is answered, it was
not.

- Only requests that an engine computes count; requests for stored answers or files do not.
- At most half of the replicas that have the model are reserved at a time, but always one may be.
- If a request can only go to reserved replicas, for instance because there is only one replica, it
  waits, at most `_MAX_WAIT_FOR_RESERVED_S`. Then it is sent there nevertheless, so a death of that
  replica's engine no longer shows which request was the cause.
- A request that must be isolated, but gets no replica for itself in time, is answered with a 503,
  since it could end another engine if it ran beside other requests.
- A router sees only its own requests. A replica whose last report has queued work of other senders
  is reserved only if no other has as few requests of this router.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from twostroke.core.cancellation import wait_until_set
from twostroke.fleet.router.engine_killers import Killers
from twostroke.fleet.router.equal_requests import EqualRequests
from twostroke.fleet.router.replica_registry import NoReplicaError, ReplicaState
from twostroke.fleet.router.response import ReplicaError
from twostroke.fleet.router.start_waits import wait_for_start
from twostroke.server.http.errors import ClientGoneError

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from twostroke.fleet.router.proxied_request import ProxiedRequest
    from twostroke.fleet.router.replica_registry import Replica, ReplicaRegistry
    from twostroke.fleet.routing.dispatch import RoutedRequest

_MAX_TURN_S: Final = 600.0  # that a request waits for others that may kill engines
_MAX_DRAIN_S: Final = 60.0  # in which the requests at a reserved replica must end
_MAX_WAIT_FOR_RESERVED_S: Final = 90.0  # before a request shares a reserved replica
_DRAIN_PAUSE_S: Final = 120.0  # in which other requests use a replica that did not drain in time
_POLL_S: Final = 0.5  # after which waiting requests look at the replicas, whatever happens


class Attempt:
    """One attempt to let a replica answer a request, from `Attempts.begin` until `end`.

    Attributes:
        replica: the replica.
        routed: the dispatcher's record of the request; None if the policy did not choose the
            replica, or if no engine computes the request.
        is_isolated: whether the replica is reserved for the request until the attempt ends.
        turn: the lock that requests with the same content share, so that only one of them runs; the
            end of the attempt releases the lock. None if no engine died with this content.
        is_answered: whether the whole answer was computed and sent, so the request does not kill
            engines.
    """

    __slots__ = (
        *("_attempts", "_decision", "_equal_key", "_number", "_request"),
        *("is_answered", "is_isolated", "replica", "routed", "turn"),
    )

    def __init__(
        self,
        attempts: Attempts,
        request: ProxiedRequest,
        replica: Replica,
        decision: RoutedRequest | None,
    ) -> None:
        """Count the request as computed by its replica.

        `decision` is the dispatcher's record of the request; None if the policy did not choose.
        """
        self.replica = replica
        self.routed = decision if request.is_computed else None
        self.is_isolated = False
        self.turn: asyncio.Lock | None = None
        self.is_answered = False
        self._attempts = attempts
        self._request = request
        self._decision = decision
        self._number = replica.computed.add(request.content) if request.content else 0
        # Where equal requests are computed separately, they need not meet.
        is_shared = not replica.is_foreign and replica.facts.coalesces is not False
        self._equal_key = request.equal_key if is_shared else b""
        attempts.equal_requests.add(self._equal_key, replica.index)

    def record_death(self) -> None:
        """Count the death of the replica's engine against the content of the request."""
        request, replica = self._request, self.replica
        request.give_up_s = 0.0  # the engine needs time to restart
        is_alone = replica.computed.was_alone(self._number)
        killers = self._attempts.killers
        killers.note_death(
            request.content,
            replica.url,
            request.sent_s,
            is_alone=is_alone,
            has_progress=request.kept_stream is not None and request.kept_stream.has_progress,
        )

    def record_loss(self) -> None:
        """Count the lost connection to the replica against the content of the request."""
        request, replica = self._request, self.replica
        request.give_up_s = 0.0  # the replica may need time to restart
        is_alone = replica.computed.was_alone(self._number)
        killers = self._attempts.killers
        killers.note_loss(
            request.content,
            replica.url,
            request.sent_s,
            is_alone=is_alone,
            has_progress=request.kept_stream is not None and request.kept_stream.has_progress,
        )

    def end(self) -> None:
        """End the attempt, after an answer or a failure: release the connection and the replica.

        If the request was answered, earlier engine deaths with the same content are forgotten.
        """
        request, attempts = self._request, self._attempts
        if request.connection is not None:
            request.connection.release()
            request.connection = None
        if self._decision is not None:
            attempts.fleet.dispatcher.end(self._decision)
        attempts.equal_requests.remove(self._equal_key, self.replica.index)
        if request.content:
            if self.is_answered:
                attempts.killers.clear(request.content)
            self.replica.computed.remove(request.content)
            attempts.on_end(self.replica, is_isolated=self.is_isolated)
        if self.turn is not None:
            self.turn.release()


class Attempts:
    """Chooses the replica for each attempt of all requests of a router.

    Attributes:
        fleet: the replicas.
        killers: counts the engines that requests have killed.
        equal_requests: knows which replicas compute which requests without randomness.
    """

    def __init__(self, fleet: ReplicaRegistry) -> None:
        """Choose among the replicas of `fleet`."""
        self.equal_requests = EqualRequests()
        self.fleet = fleet
        self.killers = Killers()
        self._reserved: set[int] = set()  # indices of replicas
        self._not_before_s: dict[int, float] = {}  # by index, after a drain that took too long
        self._num_waiting_to_share = 0
        self._changed = asyncio.Event()  # set and replaced at a reserved replica's changes

    async def begin(
        self, request: ProxiedRequest, failed: set[int], *, may_wait: bool
    ) -> Attempt | None:
        """Choose a replica for a request, and wait until the request may be sent there.

        `failed` are the indices of replicas that have lost or refused the request. If no other
        replica is ready and `may_wait` is set, the request waits until a replica becomes ready: up
        to the option `wait_s`, or up to `start_wait_s` if its model may have no replica. Then all
        replicas may be tried again. Returns None if no replica can answer now.

        Raises:
            EngineKillerError: the request's content kills engines.
            NoReplicaError: the request must be isolated, and no replica became free in time.
            ReplicaError: the only replica that can answer is down.
            ModelNotFoundError: the model was removed while the request waited for its replica.
            ModelStartingError: the first replica of the model does not start in time.
            ModelNotStartedError: the model's replicas fail while they start.
            ClientGoneError: the client disconnected while the request waited.
        """
        while True:
            excluded = failed | self._unfit(request)
            if self.killers.is_suspected(request.content):
                attempt = await self._begin_in_turn(request, excluded)
            else:
                attempt = await self._begin_shared(request, excluded)
            if attempt is not None or not may_wait:
                return attempt
            if not await self._wait_for_replica(request):
                return None
            failed.clear()
            if self.killers.must_isolate(request.content):
                await asyncio.sleep(0)  # requests that share the replica go first

    async def _wait_for_replica(self, request: ProxiedRequest) -> bool:
        """Wait until a replica becomes ready; return False if the request has waited long enough.

        If the request's model may have no replica, `wait_for_start` does this, and raises its
        errors.
        """
        fleet = self.fleet
        method, path = request.scope["method"], request.scope["path"]
        startable = fleet.starts.model_for(method, path, request.model)
        if startable is not None:
            return await wait_for_start(
                fleet, request, startable, lambda: bool(self._candidates(request, set()))
            )
        if not request.give_up_s:
            options = fleet.options
            wait_s = options.resume_wait_s if request.has_begun else options.wait_s
            request.give_up_s = asyncio.get_running_loop().time() + wait_s
        return await fleet.wait_for_ready(request.give_up_s)

    def _unfit(self, request: ProxiedRequest) -> set[int]:
        """Return the indices of replicas that cannot continue the request's response.

        Their numerics differ from the replica that began the response, so they would continue it
        with other tokens.
        """
        kept_stream = request.kept_stream
        if kept_stream is None or not request.has_begun:
            return set()
        return {
            replica.index
            for replica in self.fleet.replicas.values()
            if not kept_stream.suits(replica, request.model)
        }

    async def _begin_in_turn(
        self, request: ProxiedRequest, failed: AbstractSet[int]
    ) -> Attempt | None:
        """Begin an attempt of a request during which, or during a copy of it, an engine has died.

        Waits until no other request with the same content runs. Returns None if no replica can
        answer now; raises the errors of `begin`.
        """
        turn = await self._take_turn(request)
        attempt: Attempt | None = None
        try:
            self.killers.check(request.content)
            if self.killers.must_isolate(request.content):
                attempt = await self._begin_isolated(request, failed)
            else:
                attempt = await self._begin_shared(request, failed)
        finally:
            if attempt is not None:
                attempt.turn = turn
            elif turn is not None:
                turn.release()
        return attempt

    async def _take_turn(self, request: ProxiedRequest) -> asyncio.Lock | None:
        """Wait until no other request with the same content runs; see `Killers.take_turn`.

        Raises:
            ClientGoneError: the client has disconnected.
            NoReplicaError: the wait took too long, or the router stops.
        """
        deadline_s = asyncio.get_running_loop().time() + _MAX_TURN_S
        waiting = asyncio.ensure_future(self.killers.take_turn(request.content))
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=_POLL_S)
                self._check_may_wait(request, deadline_s)
            return waiting.result()
        except BaseException:  # a turn that was taken meanwhile is given back
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                turn = await waiting
                if turn is not None:
                    turn.release()
            raise

    def _check_may_wait(self, request: ProxiedRequest, deadline_s: float = math.inf) -> None:
        if asyncio.get_running_loop().time() >= deadline_s:
            raise _not_isolated()
        if request.has_left:
            raise ClientGoneError("The client left before its request was sent.")
        if self.fleet.is_stopping:
            raise self.fleet.no_replica_error(request.model)

    def on_end(self, replica: Replica, *, is_isolated: bool) -> None:
        """Wake the requests that wait for a reserved replica, when an attempt there has ended.

        With `is_isolated`, the replica was reserved for this attempt, and the reservation ends.
        """
        if is_isolated or replica.index in self._reserved:
            if is_isolated:
                self._reserved.discard(replica.index)
            self._changed.set()
            self._changed = asyncio.Event()

    async def _begin_shared(
        self, request: ProxiedRequest, failed: AbstractSet[int]
    ) -> Attempt | None:
        """Begin an attempt at a replica that may compute other requests at the same time.

        If all suitable replicas are reserved for other requests, waits until a reservation ends.
        Returns None if no replica can answer now.
        """
        if not self._reserved or not request.content:
            return self._choose(request, failed)
        attempt = self._choose(request, failed | self._reserved)
        deadline_s = asyncio.get_running_loop().time() + _MAX_WAIT_FOR_RESERVED_S
        while attempt is None and any(
            replica.index in self._reserved for replica in self._candidates(request, failed)
        ):
            self._num_waiting_to_share += 1
            try:
                in_time = await self._wait(request, deadline_s)
            finally:
                self._num_waiting_to_share -= 1
            attempt = self._choose(request, failed | self._reserved if in_time else failed)
        return attempt

    async def _begin_isolated(
        self, request: ProxiedRequest, failed: AbstractSet[int]
    ) -> Attempt | None:
        """Begin an attempt at a replica that computes no other request until the attempt ends.

        Waits while too many replicas are reserved. Returns None if no replica can answer now.
        """
        deadline_s = asyncio.get_running_loop().time() + _MAX_TURN_S
        while candidates := self._candidates(request, failed):
            free = [replica for replica in candidates if replica.index not in self._reserved]
            num_reserved = len(candidates) - len(free)
            now_s = asyncio.get_running_loop().time()
            free = [each for each in free if self._not_before_s.get(each.index, now_s) <= now_s]
            has_room = bool(free) and num_reserved < max(1, len(candidates) // 2)
            if has_room and not self._num_waiting_to_share:  # waiting ordinary requests come first
                idlest = min(free, key=_running_requests)
                attempt = await self._begin_at_reserved(request, idlest)
                if attempt is not None:
                    return attempt
            elif not await self._wait(request, deadline_s):
                raise _not_isolated()
        return None

    async def _begin_at_reserved(self, request: ProxiedRequest, replica: Replica) -> Attempt | None:
        """Reserve a replica, and begin an attempt there once its running requests have ended.

        Returns None if the replica stops being ready before that.
        """
        self._reserved.add(replica.index)
        attempt: Attempt | None = None
        try:
            deadline_s = asyncio.get_running_loop().time() + _MAX_DRAIN_S
            while replica.computed.num_requests:
                if not await self._wait(request, deadline_s):
                    self._not_before_s[replica.index] = deadline_s + _DRAIN_PAUSE_S
                    raise _not_isolated()
            others = {other.index for other in self.fleet.replicas.values() if other is not replica}
            attempt = self._choose(request, others)
        finally:
            if attempt is not None:
                attempt.is_isolated = True
            else:
                self.on_end(replica, is_isolated=True)
        return attempt

    def _candidates(self, request: ProxiedRequest, failed: AbstractSet[int]) -> list[Replica]:
        """Return the ready replicas that have a request's model and are not in `failed`.

        Reserved replicas are included. If only one replica can answer the request, the result has
        only this replica.
        """
        if request.only_replica is not None:
            return [request.only_replica]
        has_model = self.fleet.having_model(request.model)
        return [
            replica
            for replica in self.fleet.ready
            if replica.index not in failed and (has_model is None or has_model[replica.index])
        ]

    def _choose(self, request: ProxiedRequest, excluded: AbstractSet[int]) -> Attempt | None:
        """Begin an attempt at the replica that the policy chooses, without waiting.

        `excluded` are the indices of replicas that may not be chosen. Returns None if no replica is
        left.
        """
        replica = request.only_replica
        if replica is not None:
            if replica.state is ReplicaState.DOWN:
                raise ReplicaError(f"{replica.url}, which stores this, is down: {replica.reason}")
            is_excluded = replica.index in excluded and request.content
            return None if is_excluded else Attempt(self, request, replica, None)
        equal = self.equal_requests.replica_of(request.equal_key)
        if equal is not None and equal not in excluded:
            others = {other.index for other in self.fleet.ready if other.index != equal}
            choice = self.fleet.choose(request.key, request.model, {*excluded, *others})
            if choice is not None:
                return Attempt(self, request, *choice)
        choice = self.fleet.choose(request.key, request.model, excluded)
        return None if choice is None else Attempt(self, request, *choice)

    async def _wait(self, request: ProxiedRequest, deadline_s: float) -> bool:
        """Wait until a request at a reserved replica has ended, at most `_POLL_S`.

        Returns whether the time is before `deadline_s`, so that the caller may wait again.

        Raises:
            ClientGoneError: the client has disconnected.
            NoReplicaError: the router stops.
        """
        await wait_until_set(self._changed, _POLL_S)
        request.give_up_s = 0.0  # the replica for which the request waits is ready
        self._check_may_wait(request)
        return asyncio.get_running_loop().time() < deadline_s


def _running_requests(replica: Replica) -> tuple[int, float]:
    """Return a replica's load as a sort key: its running requests, then its queued work."""
    return replica.computed.num_requests, replica.work_s or 0.0


def _not_isolated() -> NoReplicaError:
    return NoReplicaError(
        "Engines died while they computed this request, so a replica must compute it alone, and "
        "none became free in time. Send the request again later."
    )
