"""Forwards a request to a replica, and its response to the client as it comes."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import EngineDiedError, OverloadedError, TwostrokeError
from twostroke.fleet.router.engine_killers import MAX_TRIES, Killers, refused
from twostroke.fleet.router.paths import COMPUTED_PATHS, ENGINELESS_PATHS
from twostroke.fleet.router.proxied_request import HOP_HEADERS, header_tokens
from twostroke.fleet.router.replica_registry import ReplicaState
from twostroke.fleet.router.response import FailedReplicaError, LostError, ReplicaError
from twostroke.fleet.routing.prompt import JSON_ERRORS
from twostroke.server.auth.usage_header import MARK, STREAMS, USAGE_HEADER
from twostroke.server.http.error_forms import ANTHROPIC
from twostroke.server.http.errors import ClientGoneError, report
from twostroke.server.http.responses import abort_connection, until_disconnect
from twostroke.server.http.write_coalescer import WRITE_NOW

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from twostroke.fleet.router.proxied_request import Headers, ProxiedRequest
    from twostroke.fleet.router.replica_registry import Replica, ReplicaRegistry
    from twostroke.fleet.router.response import Head
    from twostroke.fleet.router.upstream import UpstreamConnection
    from twostroke.fleet.router.usage_meter import UsageMeter
    from twostroke.fleet.routing.dispatch import RoutedRequest, RoutingKey

_MAX_HELD_BYTES: Final = 1 << 20  # of an incomplete event, or of an error to pass on
_MAX_ID_OFFSET: Final = 4096  # within which the id of a stored answer is searched
_BUSY_STATUSES: Final = frozenset((429, 503, 529))  # another replica may have room
# Headers of replicas that the router replaces by its own.
_NOT_RETURNED: Final = HOP_HEADERS | frozenset(
    [*b"date server x-request-id request-id".split(), USAGE_HEADER]
)
_PATHS_WITH_DONE: Final = ("/v1/chat/completions", "/v1/completions")  # end with `[DONE]`
# Comments of a stream, and spaces before JSON, that are sent before anything is computed.
_HEARTBEATS: Final = re.compile(rb"(?::[^\r\n]*[\r\n]|\s)+")
_ENGINE_DIED: Final = EngineDiedError.SENTENCE.encode()
_STORED_ID: Final = re.compile(rb'"id": ?"((?:resp_|chatcmpl-|conv_)[A-Za-z0-9_-]{1,80})"')


_logger = logging.getLogger("twostroke.router")


class Forwarder:
    """Forwards requests to the replicas of a fleet.

    Attributes:
        running: requests that have not ended.
        killers: counts the engines that requests have killed.
    """

    def __init__(self, fleet: ReplicaRegistry) -> None:
        """Forward to the replicas of `fleet`."""
        self._fleet = fleet
        self.running: set[ProxiedRequest] = set()
        self.killers = Killers()

    async def run(self, request: ProxiedRequest, key: RoutingKey) -> None:
        """Forward a request to the replica that the policy chooses; to others if that fails.

        Raises:
            NoReplicaError: no replica became ready within `wait_s`.
            ReplicaError: replicas have lost the request.
            EngineKillerError: engines died while they computed this request or its content.
        """
        fleet, dispatcher = self._fleet, self._fleet.dispatcher
        deadline_s = asyncio.get_running_loop().time() + fleet.options.wait_s
        tried: set[int] = set()
        error: TwostrokeError | None = None
        while True:
            async with self.killers.turn(request.content):
                choice = dispatcher.decide(key, fleet.having_model(request.model), tried)
                if choice is not None:
                    failure = await self._try_choice(request, choice)
                    if failure is None:
                        return
                    error = failure
                    tried.add(choice.index)
            if choice is None:
                busy = error if isinstance(error, _BusyError) else None
                is_full = busy is not None and busy.is_full
                if is_full or not await fleet.wait_for_ready(deadline_s):
                    if busy is not None:
                        await busy.pass_on(request)
                        return
                    raise error or fleet.no_replica_error(request.model)
                tried.clear()

    async def run_at(self, request: ProxiedRequest, replica: Replica) -> None:
        """Forward a request to the only replica that can answer it; raises as `run`."""
        if replica.state is ReplicaState.DOWN:
            raise ReplicaError(f"{replica.url}, which stores this, is down: {replica.reason}")
        try:
            async with self.killers.turn(request.content):
                await self._try(request, replica, None)
        except _BusyError as error:
            await error.pass_on(request)

    async def guard(self, request: ProxiedRequest, work: Any) -> None:
        """Await `work` while the client is connected; end a response that has begun properly."""
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
            await work
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

    async def _try_choice(
        self, request: ProxiedRequest, choice: RoutedRequest
    ) -> TwostrokeError | None:
        """Let a replica answer a request; return its error if another replica may be tried.

        Raises:
            ReplicaError: the replica failed, and the request must not be sent again.
        """
        try:
            await self._try(request, self._fleet.by_index(choice.index), choice)
        except (ReplicaError, _BusyError) as error:
            if request.has_begun:
                raise
            if isinstance(error, ReplicaError):
                if request.log.num_tries >= MAX_TRIES or not request.may_resend:
                    raise
            elif not request.may_resend:
                await error.pass_on(request)
                return None
            elif request.log.num_tries >= MAX_TRIES:
                raise refused(MAX_TRIES) from None
            return error
        finally:
            self._fleet.dispatcher.end(choice)
        return None

    async def _try(
        self, request: ProxiedRequest, replica: Replica, routed: RoutedRequest | None
    ) -> None:
        """Send a request to a replica, and its response to the client."""
        request.sent_s = time.monotonic()
        replica.num_requests += 1
        request.log.replica = replica
        request.context.known_model = replica.model_name(request.model)
        try:
            connection = await self._send(request, replica)
            try:
                await self._answer(request, replica, routed, connection)
            finally:
                request.connection = None
                connection.release()
        except ReplicaError as error:
            if isinstance(error, FailedReplicaError):
                self.killers.note_loss(request.content)
            if request.has_begun:
                replica.num_lost_after += 1
            else:
                replica.num_lost_before += 1
            replica.check_now.set()
            raise

    def _note_death(self, request: ProxiedRequest, replica: Replica) -> None:
        """Record that a replica's engine died while it computed a request."""
        request.log.num_tries += 1
        self.killers.note_death(request.content, replica.url, request.sent_s)
        id_, count = request.context.request_id, self.killers.count(request.content)
        _logger.warning(
            "The engine of %s died with request %s: %d deaths.", replica.url, id_, count
        )
        replica.check_now.set()

    async def _send(self, request: ProxiedRequest, replica: Replica) -> UpstreamConnection:
        """Send the request; return the connection after the head of the response has come."""
        head, body = request.request_to(replica)
        is_head = request.scope["method"] == "HEAD"
        while True:
            connection = await self._take_connection(replica)
            request.connection = connection
            if request.has_left:
                connection.release()
                raise ClientGoneError("The client left before its request was sent.")
            try:
                connection.send(head, body if isinstance(body, bytes) else b"", is_head=is_head)
                if not isinstance(body, bytes):
                    request.may_resend = False
                    await self._upload(request, connection, body)
                await connection.head()
            except ReplicaError:
                connection.release()
                # The replica may have closed an idle connection before the request arrived.
                is_stale = connection.num_requests > 1 and not connection.has_answered
                may_repeat = request.may_resend and not request.was_stale
                request.log.num_tries += 1
                if is_stale and isinstance(body, bytes) and may_repeat:
                    request.was_stale = True
                    self.killers.note_loss(request.content)  # it may have died of the request
                    replica.pool.close_idle()
                    continue
                raise
            except BaseException:
                connection.release()
                raise
            return connection

    async def _take_connection(self, replica: Replica) -> UpstreamConnection:
        try:
            return await replica.pool.take()
        except ReplicaError as error:
            self._fleet.set_state(replica, ReplicaState.DOWN, str(error))
            raise

    async def _upload(
        self, request: ProxiedRequest, connection: UpstreamConnection, body: AsyncIterator[bytes]
    ) -> None:
        """Send a body in parts, chunked if its length is not known."""
        is_chunked = not any(name == b"content-length" for name, _ in request.scope["headers"])
        async for part in body:
            await connection.write(b"%x\r\n%s\r\n" % (len(part), part) if is_chunked else part)
        if is_chunked:
            await connection.write(b"0\r\n\r\n")

    async def _answer(
        self,
        request: ProxiedRequest,
        replica: Replica,
        routed: RoutedRequest | None,
        connection: UpstreamConnection,
    ) -> None:
        """Send the response to the client.

        Its head is sent after the first byte of its body has come, since another replica can still
        answer until then.
        """
        head, meter = await connection.head(), request.meter
        if meter is not None:
            is_free_if_silent = (
                not replica.is_foreign and request.scope["path"] not in COMPUTED_PATHS
            )
            meter.begin(
                head,
                is_free_if_silent=is_free_if_silent,
                strips_usage=request.strips_usage,
            )
        if head.status in _BUSY_STATUSES:
            body = await _read_error(connection)
            if _ENGINE_DIED in body:
                self._note_death(request, replica)
            raise _BusyError(head, body)
        if head.status == 500 and request.is_foreign and routed is not None:
            body = await _read_error(connection)
            await self._fail(request, replica, _BusyError(head, body))
            return
        try:
            data = await connection.read()
        except ReplicaError:
            request.log.num_tries += 1
            raise
        await request.send(
            {
                "type": "http.response.start",
                "status": head.status,
                "headers": _returned_headers(head),
            }
        )
        request.has_begun = True
        request.free_body()
        request.media_type = head.media_type
        while not connection.is_read and _HEARTBEATS.fullmatch(data) and MARK not in data:
            await request.send({"type": "http.response.body", "body": data, "more_body": True})
            data = await connection.read()
        if head.status < 300 and (match := _STORED_ID.search(data, 0, _MAX_ID_OFFSET)):
            self._fleet.set_stored_at(match[1].decode(), replica)
        is_computed = request.scope["path"] not in ENGINELESS_PATHS
        if routed is not None and head.status < 300 and is_computed:
            self._fleet.dispatcher.record_first_token(
                routed, is_whole_answer=head.media_type not in STREAMS
            )
        splitter = _EventSplitter(STREAMS.get(request.media_type), meter)
        await self._send_body(request, connection, data, splitter)
        if splitter.has_died:
            self._note_death(request, replica)
        elif head.status < 300:
            self.killers.clear(request.content)

    async def _fail(self, request: ProxiedRequest, replica: Replica, error: _BusyError) -> None:
        """Pass on the error of a healthy foreign server; raise if another replica should answer."""
        if await replica.check_is_ready():
            await error.pass_on(request)
            return
        request.log.num_tries += 1
        raise FailedReplicaError(f"{replica.url} answers with an error and is not healthy.")

    async def _send_body(
        self,
        request: ProxiedRequest,
        connection: UpstreamConnection,
        data: bytes,
        splitter: _EventSplitter,
    ) -> None:
        """Send a body to the client as it comes; `data` is its beginning."""
        meter, send = request.meter, request.send
        write, take = request.scope["extensions"].get(WRITE_NOW), splitter.take

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
        if meter is not None:
            meter.finish(request.context)
        await send({"type": "http.response.body", "body": data, "more_body": False})

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
        headers = _returned_headers(self.head)
        await request.send(
            {"type": "http.response.start", "status": self.head.status, "headers": headers}
        )
        request.has_begun = True
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


def _returned_headers(head: Head) -> Headers:
    """Return a replica's headers without the headers that belong to a connection or the router."""
    dropped = _NOT_RETURNED | set(header_tokens(head.value(b"connection")))
    return [
        (name, value)
        for name, value in head.headers
        if name not in dropped and not name.startswith(b"access-control-")
    ]
