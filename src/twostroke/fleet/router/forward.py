"""Forwards a request to a replica, and its response to the client as it comes."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import TYPE_CHECKING, Final

import msgspec

from twostroke.core.errors import EngineDiedError, OverloadedError, TwostrokeError
from twostroke.fleet.router.attempts import Attempts
from twostroke.fleet.router.engine_killers import MAX_TRIES
from twostroke.fleet.router.health_checker import fetch_status
from twostroke.fleet.router.paths import (
    COMPUTED_PATHS,
    ENGINELESS_PATHS,
    STORED_ID,
    stored_path,
)
from twostroke.fleet.router.proxied_request import credentials
from twostroke.fleet.router.replica_registry import ReplicaState
from twostroke.fleet.router.response import FailedReplicaError, LostError, ReplicaError
from twostroke.fleet.routing.prompt import JSON_ERRORS
from twostroke.server.auth.usage_header import MARK, STREAMS
from twostroke.server.http.error_forms import ANTHROPIC
from twostroke.server.http.errors import ClientGoneError, report
from twostroke.server.http.responses import abort_connection, until_disconnect
from twostroke.server.http.write_coalescer import WRITE_NOW

if TYPE_CHECKING:
    from twostroke.fleet.router.attempts import Attempt
    from twostroke.fleet.router.proxied_request import ProxiedRequest
    from twostroke.fleet.router.replica_registry import Replica, ReplicaRegistry
    from twostroke.fleet.router.response import Head
    from twostroke.fleet.router.upstream import UpstreamConnection
    from twostroke.fleet.router.usage_meter import UsageMeter

_MAX_LOST_ATTEMPTS: Final = 8  # of one request; a killer is known earlier
_MAX_HELD_BYTES: Final = 1 << 20  # of an incomplete event, or of an error to pass on
_MAX_ID_OFFSET: Final = 4096  # within which the id of a stored answer is searched
_BUSY_STATUSES: Final = frozenset((429, 503, 529))  # another replica may have room
_PATHS_WITH_DONE: Final = ("/v1/chat/completions", "/v1/completions")  # end with `[DONE]`
# Comments of a stream, and spaces before JSON, that are sent before anything is computed.
_HEARTBEATS: Final = re.compile(rb"(?::[^\r\n]*[\r\n]|\s)+")
_ENGINE_DIED: Final = EngineDiedError.SENTENCE.encode()
_STORED_ID: Final = re.compile(rb'"id": ?"((?:resp_|chatcmpl-|conv_)[A-Za-z0-9_-]{1,80})"')


_logger = logging.getLogger("twostroke.router")


class Forwarder:
    """Forwards requests to the replicas of a fleet.

    A request passes these methods in order, and each calls the next: `forward` watches the client,
    `_forward_to_any` chooses a replica, `_exchange` records losses, `_send` sends the request over
    a connection, `_answer` begins the response to the client, and `_send_body` sends the rest.

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
        request.hold_body()
        disconnect: asyncio.Future[None] | None = None
        if isinstance(request.body, bytes):
            disconnect = asyncio.ensure_future(until_disconnect(request.receive))
        self.running.add(request)

        def on_disconnect(_: object) -> None:
            request.has_left = True
            if request.connection is not None:
                request.connection.fail(ClientGoneError("The client has left."))

        if disconnect is not None:
            disconnect.add_done_callback(on_disconnect)
        try:
            if request.stored_id:
                await self._forward_to_one(request, await self._find_stored(request))
            elif request.only_replica is not None:
                await self._forward_to_one(request, request.only_replica)
            else:
                await self._forward_to_any(request)
        except (ReplicaError, ClientGoneError) as error:
            if not request.has_begun:
                raise
            if isinstance(error, ReplicaError):
                await self._end_with_error(request, error)
        finally:
            self.running.discard(request)
            request.free_body()
            if disconnect is not None:
                disconnect.remove_done_callback(on_disconnect)
                disconnect.cancel()
                await asyncio.gather(disconnect, return_exceptions=True)

    async def _forward_to_any(self, request: ProxiedRequest) -> None:
        """Let the replica answer that the policy chooses; if that fails, another replica."""
        failed: set[int] = set()
        error: TwostrokeError | None = None
        while True:
            busy = error if isinstance(error, _BusyError) else None
            may_wait = busy is None or not busy.is_full
            attempt = await self._attempts.begin(request, failed, may_wait=may_wait)
            if attempt is None:
                if busy is None:
                    raise error or self._fleet.no_replica_error(request.model)
                await busy.pass_on(request)
                return
            with attempt:
                try:
                    await self._exchange(request, attempt)
                    return
                except (ReplicaError, _BusyError) as failure:
                    if request.has_begun:
                        raise
                    if not self._may_retry(request):
                        if not isinstance(failure, _BusyError):
                            raise
                        self.killers.check(request.content)
                        await failure.pass_on(request)
                        return
                    error = failure
                    failed.add(attempt.replica.index)

    async def _forward_to_one(self, request: ProxiedRequest, replica: Replica) -> None:
        """Let a replica answer, since no other can."""
        request.only_replica = replica
        attempt = await self._attempts.begin(request, set(), may_wait=False)
        assert attempt is not None, replica.url
        with attempt:
            try:
                await self._exchange(request, attempt)
            except _BusyError as error:
                await error.pass_on(request)

    def _may_retry(self, request: ProxiedRequest) -> bool:
        """Return whether a request that a replica lost or refused may be sent to another."""
        max_tries = _MAX_LOST_ATTEMPTS if request.content else MAX_TRIES
        is_killer = self.killers.is_refused(request.content)
        return request.may_resend and request.log.num_tries < max_tries and not is_killer

    async def _exchange(self, request: ProxiedRequest, attempt: Attempt) -> None:
        """Let a replica answer a request, and record if it loses the request.

        Raises:
            ReplicaError: the replica has lost the request.
            _BusyError: the replica has refused the request.
        """
        replica = attempt.replica
        replica.num_requests += 1
        try:
            await self._send(request, attempt)
        except ReplicaError as error:
            if isinstance(error, FailedReplicaError):
                self._note_loss(request, attempt)
            if request.has_begun:
                replica.num_lost_after += 1
            else:
                replica.num_lost_before += 1
            replica.check_now.set()
            raise

    async def _send(self, request: ProxiedRequest, attempt: Attempt) -> None:
        """Send a request over a connection to a replica, and the response to the client."""
        replica = attempt.replica
        message, body = request.message_to(replica, self._fleet.options.replica_key)
        is_head = request.scope["method"] == "HEAD"
        while True:
            try:
                connection = await replica.pool.take()
            except ReplicaError as error:
                self._fleet.set_state(replica, ReplicaState.DOWN, str(error))
                raise
            request.connection = connection
            if request.has_left:
                connection.release()
                raise ClientGoneError("The client left before its request was sent.")
            try:
                if not isinstance(body, bytes):
                    request.may_resend = False
                head = await connection.request(message, body, is_head=is_head)
            except ReplicaError:
                connection.release()
                # The replica may have closed an idle connection before the request arrived.
                is_stale = connection.num_requests > 1 and not connection.has_answered
                request.log.num_tries += 1
                if not is_stale or not request.may_resend or request.was_stale:
                    raise
                request.was_stale = True
                self._note_loss(request, attempt)  # the replica may have died of the request
                request.sent_s = time.monotonic()
                replica.pool.close_idle()
                continue
            except BaseException:  # also a cancellation: the connection goes back to the pool
                connection.release()
                raise
            del message, body  # so that only `request` refers to the body, which drops it early
            try:
                await self._answer(request, attempt, connection=connection, head=head)
            finally:
                request.connection = None
                connection.release()
            return

    async def _answer(
        self,
        request: ProxiedRequest,
        attempt: Attempt,
        *,
        connection: UpstreamConnection,
        head: Head,
    ) -> None:
        """Send a replica's response to the client.

        The head is sent after the first byte of the body has come, since another replica can still
        answer until then.
        """
        path, replica, routed = request.scope["path"], attempt.replica, attempt.routed
        is_success = head.status < 300
        if request.meter is not None:
            is_free_if_silent = not replica.is_foreign and path not in COMPUTED_PATHS
            request.meter.begin(
                head, is_free_if_silent=is_free_if_silent, strips_usage=request.strips_usage
            )
        is_foreign_error = head.status == 500 and request.is_foreign and routed is not None
        if head.status in _BUSY_STATUSES or is_foreign_error:
            await self._handle_refusal(request, attempt, connection=connection, head=head)
            return
        try:
            data = await connection.read()
        except ReplicaError:
            request.log.num_tries += 1
            raise
        await request.begin_response(head)
        while not connection.is_read and _HEARTBEATS.fullmatch(data) and MARK not in data:
            await request.send({"type": "http.response.body", "body": data, "more_body": True})
            data = await connection.read()
        if is_success and (match := _STORED_ID.search(data, 0, _MAX_ID_OFFSET)):
            self._fleet.set_stored_at(match[1].decode(), replica)
        if is_success and routed is not None and path not in ENGINELESS_PATHS:
            self._fleet.dispatcher.record_first_token(
                routed, is_whole_answer=request.media_type not in STREAMS
            )
        splitter = _EventSplitter(STREAMS.get(request.media_type), request.meter)
        await self._send_body(request, connection=connection, splitter=splitter, data=data)
        if splitter.has_died:
            self._note_death(request, attempt)
        elif is_success:
            self.killers.clear(request.content)

    async def _send_body(
        self,
        request: ProxiedRequest,
        *,
        connection: UpstreamConnection,
        splitter: _EventSplitter,
        data: bytes,
    ) -> None:
        """Send a body to the client as it comes; `data` is its beginning."""
        send, take = request.send, splitter.take
        write = request.scope["extensions"].get(WRITE_NOW)

        def write_on(data: bytes) -> bool:
            if not write(b""):
                return False
            if data := take(data):
                write(data)
            return True

        if splitter.event_ends is not None and write is not None:
            connection.sink = write_on
        while not connection.is_read:
            if data := take(data):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await connection.read()
        data = take(data, is_last=True)
        request.log.num_open = 0
        if request.meter is not None:
            request.meter.finish(request.context)
        await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _find_stored(self, request: ProxiedRequest) -> Replica:
        """Return the replica that stores an answer or conversation; ask all if it is not known.

        If no replica stores it, returns any of them, which will answer 404.
        """
        id_ = request.stored_id
        remembered = self._fleet.stored_at(id_)
        if remembered is not None:
            return remembered
        ready = self._fleet.ready
        if not ready:
            raise self._fleet.no_replica_error()
        if not STORED_ID.fullmatch(id_):  # clients can send any text
            return ready[0]
        headers = credentials(request.scope, self._fleet.options.replica_key)
        lookups = [fetch_status(replica, stored_path(id_), headers) for replica in ready]
        statuses = await asyncio.gather(*lookups, return_exceptions=True)
        for replica, status in zip(ready, statuses, strict=True):
            if status == 200:
                self._fleet.set_stored_at(id_, replica)
                return replica
        return ready[0]

    async def _handle_refusal(
        self,
        request: ProxiedRequest,
        attempt: Attempt,
        *,
        connection: UpstreamConnection,
        head: Head,
    ) -> None:
        """Let another replica answer a request; pass on the error of a healthy foreign server.

        Raises:
            _BusyError: the replica has no room, or its engine died.
            FailedReplicaError: the foreign server is not healthy.
        """
        body = await _read_error(connection)
        error = _BusyError(head, body)
        if head.status in _BUSY_STATUSES:
            if _ENGINE_DIED in body:
                self._note_death(request, attempt)
            raise error
        if not await attempt.replica.check_is_ready():
            request.log.num_tries += 1
            raise FailedReplicaError(
                f"{attempt.replica.url} answers with an error and is not healthy."
            )
        await error.pass_on(request)

    def _note_loss(self, request: ProxiedRequest, attempt: Attempt) -> None:
        """Record that a replica closed the connection of a request."""
        self.killers.note_loss(
            request.content, attempt.replica.url, request.sent_s, is_alone=attempt.is_alone
        )
        request.give_up_s = 0.0  # the replica may need time to restart

    def _note_death(self, request: ProxiedRequest, attempt: Attempt) -> None:
        """Record that a replica's engine died while it computed a request."""
        replica = attempt.replica
        request.log.num_tries += 1
        request.give_up_s = 0.0  # the engine needs time to restart
        self.killers.note_death(
            request.content, replica.url, request.sent_s, is_alone=attempt.is_alone
        )
        id_, count = request.context.request_id, self.killers.count(request.content)
        _logger.warning(
            "The engine of %s died with request %s: %d deaths.", replica.url, id_, count
        )
        replica.check_now.set()

    async def _end_with_error(self, request: ProxiedRequest, error: TwostrokeError) -> None:
        """End a response that has begun, by an event if the protocol has one, else by a cut."""
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


class _EventSplitter:
    """Splits a stream after whole events, so that an error event can follow at any time.

    Attributes:
        event_ends: the byte strings that end an event; None if the response is no stream.
        has_died: whether an event has reported the death of the engine.
    """

    def __init__(self, event_ends: tuple[bytes, ...] | None, meter: UsageMeter | None) -> None:
        self.event_ends = event_ends
        self.has_died = False
        self._meter = meter
        self._held_data = b""

    def take(self, data: bytes, *, is_last: bool = False) -> bytes:
        """Return the data that may be sent after `data` has come; the rest is held back.

        Spaces, the heartbeats of a response that is no stream, are never held back.
        """
        ends = self.event_ends
        if self._held_data:
            data = self._held_data + data
            self._held_data = b""
        if ends and not is_last and not data.endswith(ends) and not data.isspace():
            stop = max((data.rfind(end) + len(end) for end in ends if end in data), default=0)
            if len(data) - stop < _MAX_HELD_BYTES:
                data, self._held_data = data[:stop], data[stop:]
        if ends and _ENGINE_DIED in data:
            self.has_died |= any(map(_reports_death, data.splitlines()))
        return self._meter.take(data) if data and self._meter is not None else data


class _BusyError(OverloadedError):
    """A replica has no room for a request; has its response, in case no other replica has room.

    Attributes:
        head, body: the response.
        is_full: whether waiting for another replica is useless.
    """

    def __init__(self, head: Head, body: bytes) -> None:
        super().__init__("The replica has no room.")
        self.head = head
        self.body = body
        self.is_full = head.status != 503

    async def pass_on(self, request: ProxiedRequest) -> None:
        """Send the replica's own response to the client."""
        await request.begin_response(self.head)
        request.log.num_open = 0
        await request.send({"type": "http.response.body", "body": self.body, "more_body": False})


def _reports_death(line: bytes) -> bool:
    """Return whether a line of a stream is an error about the death of the engine.

    The same words in the text of an answer do not count.
    """
    if _ENGINE_DIED not in line:
        return False
    try:
        event = msgspec.json.decode(line.removeprefix(b"data:"))
    except JSON_ERRORS:
        return False
    if not isinstance(event, dict):
        return False
    response = event.get("response")
    errors = [event.get("error"), response.get("error") if isinstance(response, dict) else None]
    errors += [event.get("message")] if event.get("type") == "error" else []
    return _ENGINE_DIED in msgspec.json.encode(errors)


async def _read_error(connection: UpstreamConnection) -> bytes:
    """Return the whole body of an error.

    Raises:
        ReplicaError: the body is larger than 1 MiB, or the connection ended.
    """
    body = bytearray()
    while data := await connection.read():
        body += data
        if len(body) > _MAX_HELD_BYTES:
            raise ReplicaError("A replica's refusal is larger than 1 MiB.")
    return bytes(body)
