"""Forwards a request to a replica, and its response to the client as it comes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import OverloadedError, TwostrokeError
from twostroke.fleet.router.attempts import Attempts
from twostroke.fleet.router.engine_killers import MAX_TRIES
from twostroke.fleet.router.event_splitter import ENGINE_DIED
from twostroke.fleet.router.replica_registry import ReplicaState
from twostroke.fleet.router.response import FailedReplicaError, LostError, ReplicaError
from twostroke.server.http.error_forms import ANTHROPIC
from twostroke.server.http.errors import ClientGoneError, report
from twostroke.server.http.responses import abort_connection

if TYPE_CHECKING:
    from twostroke.fleet.router.attempts import Attempt
    from twostroke.fleet.router.proxied_request import ProxiedRequest
    from twostroke.fleet.router.replica_registry import ReplicaRegistry
    from twostroke.fleet.router.response import Head

_MAX_LOST_ATTEMPTS: Final = 8  # of one request; a killer is known earlier
_BUSY_STATUSES: Final = frozenset((429, 503, 529))  # another replica may have room
_PATHS_WITH_DONE: Final = ("/v1/chat/completions", "/v1/completions")  # end with `[DONE]`
_logger = logging.getLogger("twostroke.router")


class Forwarder:
    """Forwards requests to the replicas of a fleet.

    A request passes these methods in order, and each calls the next: `forward` watches the client,
    `_try_replicas` tries one replica after another, and `_exchange` sends the request to a replica
    and the response to the client.

    Attributes:
        running: requests that have not ended.
        killers: counts the engines that requests have killed.
    """

    def __init__(self, fleet: ReplicaRegistry) -> None:
        """Forward to the replicas of `fleet`."""
        self._fleet = fleet
        self.running: set[ProxiedRequest] = set()
        self._attempts = Attempts(fleet)
        self.killers = self._attempts.killers

    async def forward(self, request: ProxiedRequest) -> None:
        """Answer a request while its client is connected.

        If the replica is lost after the response has begun, the response ends with an error.

        Raises:
            NoReplicaError: no replica became ready within `wait_s`.
            ReplicaError: replicas have lost the request.
            EngineKillerError: engines died while they computed this request or its content.
        """
        self.running.add(request)
        try:
            async with request:
                await self._try_replicas(request)
        except (ReplicaError, ClientGoneError) as error:
            if not request.has_begun:
                raise
            if isinstance(error, ReplicaError):
                await self._end_with_error(request, error)
        finally:
            self.running.discard(request)

    async def _try_replicas(self, request: ProxiedRequest) -> None:
        """Let a replica answer a request; if it fails before the first byte, try another replica.

        If no replica can answer, sends the last refusal to the client, or raises as `forward`.
        """
        failed: set[int] = set()  # indices of replicas
        failure: TwostrokeError | None = None
        while True:
            is_final = isinstance(failure, _RefusedError) and failure.is_final
            attempt = await self._attempts.begin(request, failed, may_wait=not is_final)
            if attempt is None:
                break
            try:
                await self._exchange(request, attempt)
                return
            except ReplicaError as error:
                self._record_loss(request, attempt, error)
                if not self._may_retry(request):
                    raise
                failure = error
            except _RefusedError as error:
                failure = error
                if not self._may_retry(request):
                    break
            finally:
                attempt.end()
            failed.add(attempt.replica.index)
        self.killers.check(request.content)
        if not isinstance(failure, _RefusedError):
            raise failure or self._fleet.no_replica_error(request.model)
        await request.respond(failure.head, failure.body)

    async def _exchange(self, request: ProxiedRequest, attempt: Attempt) -> None:
        """Send a request to the replica of an attempt, and the response to the client as it comes.

        Raises:
            ReplicaError: the replica has lost the request.
            _RefusedError: the replica has refused the request.
        """
        replica = attempt.replica
        replica.num_requests += 1
        head = await request.send_to(replica, self._fleet.options.replica_key)
        is_foreign_error = head.status == 500 and request.is_foreign and not request.only_replica
        if head.status in _BUSY_STATUSES or is_foreign_error:
            await self._handle_refusal(request, attempt, head)
            return
        first_bytes = await request.begin_response(head)
        is_success = head.status < 300
        if is_success:
            routed = None if request.in_background else attempt.routed
            self._fleet.record_answer(replica, first_bytes, routed, is_streamed=request.is_streamed)
        await request.send_body(first_bytes)
        if request.splitter.has_died:
            self._record_death(request, attempt)
        else:
            is_computed = request.is_streamed or not request.in_background
            attempt.is_answered = is_success and is_computed

    async def _handle_refusal(self, request: ProxiedRequest, attempt: Attempt, head: Head) -> None:
        """Raise the error for a refusal by a replica, so that another replica is tried.

        A server other than Twostroke may answer 500 because of the request: if the server is
        healthy, its response is passed on to the client.

        Raises:
            _RefusedError: the replica has no room, or its engine died.
            FailedReplicaError: the foreign server is not healthy.
        """
        body = await request.read_error()
        if head.status in _BUSY_STATUSES:
            if ENGINE_DIED in body:
                self._record_death(request, attempt)
            raise _RefusedError(head, body)
        replica = attempt.replica
        if not await replica.check_is_ready():
            raise FailedReplicaError(f"{replica.url} answers with an error and is not healthy.")
        await request.respond(head, body)

    def _may_retry(self, request: ProxiedRequest) -> bool:
        """Return whether a request that a replica lost or refused may be sent to another."""
        max_tries = _MAX_LOST_ATTEMPTS if request.content else MAX_TRIES
        return (
            not request.has_begun
            and request.may_resend
            and request.only_replica is None
            and request.log.num_tries < max_tries
            and not self.killers.is_refused(request.content)
        )

    def _record_loss(self, request: ProxiedRequest, attempt: Attempt, error: ReplicaError) -> None:
        """Record that a replica could not be reached, or that it has lost a request.

        A replica that cannot be reached gets no more requests until a health check succeeds.
        """
        replica = attempt.replica
        if request.connection is None:
            self._fleet.set_state(replica, ReplicaState.DOWN, str(error))
        else:
            request.log.num_tries += 1
        if isinstance(error, FailedReplicaError) or request.was_stale:
            attempt.record_loss()
        if request.has_begun:
            replica.num_lost_after += 1
        else:
            replica.num_lost_before += 1
        replica.check_now.set()

    def _record_death(self, request: ProxiedRequest, attempt: Attempt) -> None:
        """Record that a replica's engine died while it computed a request."""
        request.log.num_tries += 1
        attempt.record_death()
        url, id_ = attempt.replica.url, request.context.request_id
        count = self.killers.count(request.content)
        _logger.warning("The engine of %s died with request %s, death %d.", url, id_, count)
        attempt.replica.check_now.set()

    async def _end_with_error(self, request: ProxiedRequest, error: TwostrokeError) -> None:
        """End a response that has begun by an error.

        The error is an event if the protocol streams events; else the client's connection is cut.
        """
        report(error, request.scope)
        if isinstance(error, ReplicaError):
            error = LostError("The server that wrote this answer was lost.")
            request.context.error = error.code
        scope, form = request.scope, request.context.error_form
        body = form.body(error, request.context.request_id, str)
        if request.media_type == b"text/event-stream":
            name = b"event: error\n" if form is ANTHROPIC else b""
            body = name + b"data: " + body + b"\n\n"
            if scope["path"] in _PATHS_WITH_DONE:
                body += b"data: [DONE]\n\n"
        elif request.media_type == b"application/x-ndjson":
            body += b"\n"
        else:
            await abort_connection(scope)
            return
        await request.send({"type": "http.response.body", "body": body, "more_body": True})
        await request.send({"type": "http.response.body", "body": b"", "more_body": False})


class _RefusedError(OverloadedError):
    """A replica answered a request with an error status, so that another replica may answer it.

    It has the response, which the client gets if no other replica can answer.

    Attributes:
        head, body: the response.
        is_final: whether no replica is awaited, and the client gets the response at once.
    """

    def __init__(self, head: Head, body: bytes) -> None:
        super().__init__("The replica refused the request.")
        self.head = head
        self.body = body
        self.is_final = head.status != 503
