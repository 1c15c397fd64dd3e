"""Forwards a request to a replica, and the replica's response to the client as it arrives."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import OverloadedError, TwostrokeError
from twostroke.fleet.router.attempts import Attempts
from twostroke.fleet.router.engine_killers import MAX_LOST_ATTEMPTS, MAX_TRIES
from twostroke.fleet.router.event_splitter import ENGINE_DIED
from twostroke.fleet.router.kept_stream import KeptStream, StoppedReplicaError, StreamMemory
from twostroke.fleet.router.paths import PROMPT_ONLY_PATHS
from twostroke.fleet.router.replica_registry import ReplicaState
from twostroke.fleet.router.response import FailedReplicaError, LostError, ReplicaError
from twostroke.server.auth.limits import RateLimitError
from twostroke.server.http.error_forms import ANTHROPIC
from twostroke.server.http.errors import ClientGoneError, report
from twostroke.server.http.responses import abort_connection

if TYPE_CHECKING:
    from twostroke.fleet.router.attempts import Attempt
    from twostroke.fleet.router.overflow import Overflow
    from twostroke.fleet.router.proxied_request import ProxiedRequest
    from twostroke.fleet.router.replica_registry import Replica, ReplicaRegistry
    from twostroke.fleet.router.response import Head

_BUSY_STATUSES: Final = frozenset((429, 503, 529))  # another replica may have room
_PATHS_WITH_DONE: Final = ("/v1/chat/completions", "/v1/completions")  # end with `[DONE]`
_logger = logging.getLogger("twostroke.router")


class Forwarder:
    """Forwards requests to the replicas of a fleet.

    Three methods handle a request, and each calls the next: `forward` watches the client,
    `_try_replicas` tries one replica after another, and `_exchange` sends the request to a replica
    and the response to the client.

    Attributes:
        running: requests that have not ended.
        killers: counts the engine deaths by the content of requests.
    """

    def __init__(self, fleet: ReplicaRegistry, overflow: Overflow | None = None) -> None:
        """Forward to the replicas of `fleet`, and by the rules of `overflow` to APIs."""
        self._fleet = fleet
        self._overflow = overflow
        self.running: set[ProxiedRequest] = set()
        self._attempts = Attempts(fleet)
        self._memory = StreamMemory()
        self.killers = self._attempts.killers

    async def forward(self, request: ProxiedRequest) -> None:
        """Answer a request while its client is connected.

        If the replica is lost after the response has begun, another replica continues the response.
        The response ends with an error if no replica can continue it.

        Raises:
            NoReplicaError: no replica became ready within `wait_s`.
            ReplicaError: replicas have lost the request.
            EngineKillerError: engines died while they computed requests with the same content.
        """
        self.running.add(request)
        self._keep(request)
        scope = request.scope
        self._fleet.starts.note_request(scope["method"], scope["path"], request.model)
        try:
            async with request:
                await self._try_replicas(request)
        except TwostrokeError as error:
            if not request.has_begun:
                raise
            if not isinstance(error, ClientGoneError):
                await self._end_with_error(request, error)
        finally:
            self.running.discard(request)

    def _keep(self, request: ProxiedRequest) -> None:
        """Keep the parts of a request that another replica needs to continue its response."""
        is_answer = bool(request.content) and request.scope["path"] not in PROMPT_ONLY_PATHS
        is_movable = request.only_replica is None and not request.in_background
        if is_answer and is_movable and self._fleet.options.resume_wait_s:
            assert isinstance(request.body, bytes)
            request.kept_stream = KeptStream(request.body, self._memory)

    async def _try_replicas(self, request: ProxiedRequest) -> None:
        """Let a replica answer a request; if it fails, let another replica answer or continue.

        An upstream answers in place of a replica if a rule of `--overflow` says so. If no server
        can answer, sends a replica's last refusal to the client, or raises the errors of `forward`.
        """
        failed: set[int] = set()  # indices of replicas
        failure: TwostrokeError | None = None
        while True:
            if self._overflow is not None and await self._overflow.answer(request, failed):
                return
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
        if request.has_begun and isinstance(failure, _RefusedError):
            raise self._fleet.no_replica_error(request.model)
        if not isinstance(failure, _RefusedError):
            raise failure or self._fleet.no_replica_error(request.model)
        await request.respond(failure.head, failure.body)

    async def _exchange(self, request: ProxiedRequest, attempt: Attempt) -> None:
        """Send a request to the attempt's replica, and the response to the client as it arrives.

        Raises:
            ReplicaError: the replica has lost the request.
            _RefusedError: the replica has refused the request.
        """
        replica, fleet = attempt.replica, self._fleet
        replica.num_requests += 1
        key, permission = fleet.options.replica_key, fleet.overflow_permission
        head = await request.send_to(replica, key, permission)
        is_foreign_error = head.status == 500 and request.is_foreign and not request.only_replica
        cannot_continue = request.has_begun and head.status != 200
        if head.status in _BUSY_STATUSES or is_foreign_error or cannot_continue:
            await self._handle_refusal(request, attempt, head)
            return
        is_continued = request.has_begun
        first_bytes = await request.begin_response(head)
        is_success = head.status < 300
        if is_continued:
            self._count_continued(request, replica)
        if is_success:
            routed = None if request.in_background else attempt.routed
            self._fleet.record_answer(
                replica,
                request.first_bytes or first_bytes,  # they have the id of a stored response
                routed,
                is_streamed=request.is_streamed,
            )
        await request.send_body(first_bytes)
        if request.splitter.has_died:
            self._record_death(request, attempt)
        else:
            is_computed = request.is_streamed or not request.in_background
            attempt.is_answered = is_success and is_computed

    async def _handle_refusal(self, request: ProxiedRequest, attempt: Attempt, head: Head) -> None:
        """Raise the error for a replica's refusal, so that another replica is tried.

        A server other than Twostroke may answer 500 because of the request itself. If such a server
        is healthy, its response is sent to the client, and nothing is raised.

        Raises:
            _RefusedError: the replica has no room, or its engine died.
            FailedReplicaError: the server other than Twostroke is not healthy.
        """
        body = await request.read_error()
        if head.status in _BUSY_STATUSES or request.has_begun:
            if ENGINE_DIED in body:
                self._record_death(request, attempt)
            if _is_limit_of_key(request, body):  # the client may not use more, from anybody
                request.may_overflow = False
            raise _RefusedError(head, body)
        replica = attempt.replica
        if not await replica.check_is_ready():
            raise FailedReplicaError(f"{replica.url} answers with an error and is not healthy.")
        await request.respond(head, body)

    def _may_retry(self, request: ProxiedRequest) -> bool:
        """Return whether another replica may get a request that a replica has lost or refused."""
        max_tries = MAX_LOST_ATTEMPTS if request.content else MAX_TRIES
        return (
            request.can_continue
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
        if request.has_begun:
            request.lost_s = time.monotonic()
        if isinstance(error, StoppedReplicaError):
            if error.has_died:
                self._record_death(request, attempt)
            else:
                request.log.num_tries += 1
            return
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

    def _count_continued(self, request: ProxiedRequest, replica: Replica) -> None:
        """Count a response that another replica continues."""
        pause_s = time.monotonic() - request.lost_s
        self._fleet.num_continued += 1
        self._fleet.pause_s += pause_s
        self._fleet.max_pause_s = max(self._fleet.max_pause_s, pause_s)
        id_ = request.context.request_id
        _logger.info("Request %s continues at %s after %.1f s.", id_, replica.url, pause_s)

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

        In a stream, the error is sent as an event or a line. If the response is not streamed, the
        client's connection is aborted.
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


def _is_limit_of_key(request: ProxiedRequest, body: bytes) -> bool:
    """Return whether a replica refuses a request because of a limit of the client's key.

    Anthropic's form of the error has no code, but a type that Twostroke's servers use only for such
    limits.
    """
    if RateLimitError.code.encode() in body:
        return True
    is_anthropic = request.context.error_form is ANTHROPIC and not request.is_foreign
    return is_anthropic and b'"rate_limit_error"' in body


class _RefusedError(OverloadedError):
    """A replica has answered a request with an error status; another replica may answer it.

    Attributes:
        head, body: the response, which the client gets if no other replica can answer.
        is_final: whether the client gets this response without a wait if no other replica is ready.
    """

    def __init__(self, head: Head, body: bytes) -> None:
        super().__init__("The replica refused the request.")
        self.head = head
        self.body = body
        self.is_final = head.status != 503
