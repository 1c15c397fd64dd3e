"""Passes a request on to a replica, and its response back as it comes."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import EngineDiedError, OverloadedError, TwostrokeError
from twostroke.fleet.router.engine_killers import MAX_TRIES, Killers, refused
from twostroke.fleet.router.paths import COMPUTED, FREE
from twostroke.fleet.router.proxied_request import HOPS, tokens
from twostroke.fleet.router.replica_registry import ReplicaState
from twostroke.fleet.router.response import FailedReplicaError, LostError, ReplicaError
from twostroke.fleet.routing.prompt import UNREADABLE
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

_MOST_HELD: Final = 1 << 20  # of an event that is not complete
_BUSY: Final = frozenset((429, 503, 529))  # another replica may have room
# The router has its own of these.
_NOT_RETURNED: Final = HOPS | frozenset(
    [*b"date server x-request-id request-id".split(), USAGE_HEADER]
)
# Comments of a stream and spaces before JSON, sent while nothing is computed yet.
_WITH_LAST_LINE: Final = ("/v1/chat/completions", "/v1/completions")  # OpenAI's `[DONE]`
_SIGNS_OF_LIFE: Final = re.compile(rb"(?::[^\r\n]*[\r\n]|\s)+")
_ENGINE_DIED: Final = EngineDiedError.SENTENCE.encode()
_ID: Final = re.compile(rb'"id": ?"((?:resp_|chatcmpl-|conv_)[A-Za-z0-9_-]{1,80})"')


_logger = logging.getLogger("twostroke.router")


class Forwarder:
    """Passes requests on to the replicas of a fleet."""

    def __init__(self, fleet: ReplicaRegistry) -> None:
        """Choose among `fleet`'s replicas."""
        self._fleet = fleet
        self.running: set[ProxiedRequest] = set()
        self.killers = Killers()

    async def run(self, errand: ProxiedRequest, asked: RoutingKey) -> None:
        """Pass a request on to where its first token comes soonest; elsewhere if that fails.

        Raises:
            NoReplicaError: no replica is ready for as long as it may wait.
            ReplicaError: replicas have lost the request.
            EngineKillerError: engines died while they computed it, or others with its content.
        """
        fleet, dispatcher = self._fleet, self._fleet.dispatcher
        loop, tried = asyncio.get_running_loop(), set[int]()
        until_s = loop.time() + fleet.options.wait_s
        error: TwostrokeError | None = None
        while True:
            async with self.killers.turn(errand.content):
                choice = dispatcher.decide(asked, fleet.suits(errand.model), tried)
                if choice is not None:
                    failure = await self._try_choice(errand, choice)
                    if failure is None:
                        return None
                    error = failure
                    tried.add(choice.place)
            if choice is None:
                busy = error if isinstance(error, _BusyError) else None
                if (busy is not None and busy.is_full) or not await fleet.wait(until_s):
                    if busy is not None:
                        return await busy.pass_on(errand)
                    raise error or fleet.nothing(errand.model)
                tried.clear()
                continue

    async def _try_choice(
        self, request: ProxiedRequest, choice: RoutedRequest
    ) -> TwostrokeError | None:
        """Let a replica answer a request; return its error if another replica may be tried.

        Raises:
            ReplicaError: the replica failed, and the request must not be sent again.
        """
        try:
            await self._try(request, self._fleet.at(choice.place), choice)
        except (ReplicaError, _BusyError) as error:
            if request.has_begun:
                raise
            if isinstance(error, ReplicaError):
                if request.passage.num_tries >= MAX_TRIES or not request.is_safe:
                    raise
            elif not request.is_safe:
                await error.pass_on(request)
                return None
            elif request.passage.num_tries >= MAX_TRIES:
                raise refused(MAX_TRIES) from None
            return error
        finally:
            self._fleet.dispatcher.end(choice)
        return None

    async def run_at(self, errand: ProxiedRequest, replica: Replica) -> None:
        """Pass a request on to one replica, which alone can answer it. Raises as `run`."""
        if replica.state is ReplicaState.DOWN:
            raise ReplicaError(f"{replica.url}, which stores this, is down: {replica.reason}")
        try:
            async with self.killers.turn(errand.content):
                await self._try(errand, replica, None)
        except _BusyError as error:
            await error.pass_on(errand)

    async def _try(
        self, errand: ProxiedRequest, replica: Replica, ticket: RoutedRequest | None
    ) -> None:
        """Send a request to a replica, and its response to the client."""
        errand.sent_s = time.monotonic()
        replica.num_requests += 1
        errand.passage.replica = replica
        errand.served.known_model = replica.name_of(errand.model)
        try:
            connection = await self._send(errand, replica)
            try:
                await self._answer(errand, replica, ticket, connection)
            finally:
                errand.connection = None
                connection.release()
        except ReplicaError as error:
            if isinstance(error, FailedReplicaError):
                self.killers.note_loss(errand.content)
            if errand.has_begun:
                replica.num_errors += 1
            else:
                replica.num_failed += 1
            replica.look.set()
            raise

    def _note_death(self, request: ProxiedRequest, replica: Replica) -> None:
        """Note that a replica's engine died while it computed a request."""
        request.passage.num_tries += 1
        self.killers.note_death(request.content, replica.url, request.sent_s)
        id_, count = request.served.request_id, self.killers.count(request.content)
        _logger.warning(
            "The engine of %s died with request %s: %d deaths.", replica.url, id_, count
        )
        replica.look.set()

    async def _send(self, errand: ProxiedRequest, replica: Replica) -> UpstreamConnection:
        """Return a connection on which the request was sent, and the response has begun."""
        head, body = errand.request_to(replica)
        is_head = errand.scope["method"] == "HEAD"
        while True:
            connection = await self._take(replica)
            errand.connection = connection
            if errand.is_gone:
                connection.release()
                raise ClientGoneError("The client left before its request was sent.")
            try:
                connection.send(head, body if isinstance(body, bytes) else b"", is_head=is_head)
                if not isinstance(body, bytes):
                    errand.is_safe = False
                    await self._upload(errand, connection, body)
                await connection.head()
            except ReplicaError:
                connection.release()
                # It may have closed an idle connection before it knew of the request.
                is_stale = connection.num_requests > 1 and not connection.has_answered
                if is_stale and isinstance(body, bytes) and errand.is_safe and not errand.was_stale:
                    errand.was_stale = True
                    errand.passage.num_tries += 1  # for the request may have ended it, too
                    self.killers.note_loss(errand.content)
                    replica.pool.close_idle()
                    continue
                errand.passage.num_tries += 1
                raise
            except BaseException:
                connection.release()
                raise
            return connection

    async def _take(self, replica: Replica) -> UpstreamConnection:
        try:
            return await replica.pool.take()
        except ReplicaError as error:
            self._fleet.set(replica, ReplicaState.DOWN, str(error))
            raise

    async def _upload(
        self, errand: ProxiedRequest, connection: UpstreamConnection, body: AsyncIterator[bytes]
    ) -> None:
        is_chunked = not any(name == b"content-length" for name, _ in errand.scope["headers"])
        async for part in body:
            await connection.write(b"%x\r\n%s\r\n" % (len(part), part) if is_chunked else part)
        if is_chunked:
            await connection.write(b"0\r\n\r\n")

    async def _answer(
        self,
        errand: ProxiedRequest,
        replica: Replica,
        ticket: RoutedRequest | None,
        connection: UpstreamConnection,
    ) -> None:
        """Pass the response on. Its head waits for its first byte, so that a loss costs nothing."""
        head, meter = await connection.head(), errand.meter
        if meter is not None:
            is_silent = not replica.is_foreign and errand.scope["path"] not in COMPUTED
            meter.begin(head, is_silent=is_silent, strips=errand.asks_usage)
        if head.status in _BUSY:
            body = await _whole(connection)
            if _ENGINE_DIED in body:
                self._note_death(errand, replica)
            raise _BusyError(head, body)
        if head.status == 500 and errand.is_foreign and ticket is not None:
            await self._fail(errand, replica, _BusyError(head, await _whole(connection)))
            return
        try:
            data = await connection.read()
        except ReplicaError:
            errand.passage.num_tries += 1
            raise
        await errand.send(
            {
                "type": "http.response.start",
                "status": head.status,
                "headers": _returned(head),
            }
        )
        errand.has_begun = True
        errand.free()
        errand.media_type = head.media_type
        while not connection.is_read and _SIGNS_OF_LIFE.fullmatch(data) and MARK not in data:
            await errand.send({"type": "http.response.body", "body": data, "more_body": True})
            data = await connection.read()
        if head.status < 300 and (found := _ID.search(data, 0, 4096)):
            self._fleet.store(found[1].decode(), replica)
        is_computed = errand.scope["path"] not in FREE  # others say nothing of the pace
        if ticket is not None and head.status < 300 and is_computed:
            is_whole = head.media_type not in STREAMS
            self._fleet.dispatcher.begin(ticket, is_whole=is_whole)
        pieces = _Pieces(STREAMS.get(errand.media_type), meter)
        await self._pass_body(errand, connection, data, pieces)
        if pieces.has_died:
            self._note_death(errand, replica)
        elif head.status < 300:
            self.killers.clear(errand.content)

    async def _fail(self, errand: ProxiedRequest, replica: Replica, error: _BusyError) -> None:
        """Pass an error of another server on, or let another replica answer if it has failed."""
        if await replica.is_well():
            return await error.pass_on(errand)
        errand.passage.num_tries += 1
        raise FailedReplicaError(f"{replica.url} answers with an error and is not healthy.")

    async def _pass_body(
        self, request: ProxiedRequest, connection: UpstreamConnection, data: bytes, pieces: _Pieces
    ) -> None:
        """Pass a body on as it comes, from its first bytes on."""
        meter, send = request.meter, request.send
        write, take = request.scope["extensions"].get(WRITE_NOW), pieces.take

        def write_on(data: bytes) -> bool:
            if not write(b""):
                return False
            if data := take(data):
                write(data)
            return True

        if pieces.ends is not None and write is not None:
            connection.sink = write_on
        while not connection.is_read:
            if data := take(data):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await connection.read()
        data = take(data, is_last=True)
        request.passage.num_open = 0
        if meter is not None:
            meter.finish(request.served)
        await send({"type": "http.response.body", "body": data, "more_body": False})

    async def guard(self, errand: ProxiedRequest, work: Any) -> None:
        """Do `work` for a client as long as it is there; end a response that has begun."""
        errand.hold()
        disconnect: asyncio.Future[None] | None = None
        if isinstance(errand.body, bytes):
            disconnect = asyncio.ensure_future(until_disconnect(errand.receive))
        self.running.add(errand)

        def leave(_: object) -> None:
            errand.is_gone = True
            if errand.connection is not None:
                errand.connection.fail(ClientGoneError("The client has left."))

        if disconnect is not None:
            disconnect.add_done_callback(leave)
        try:
            await work
        except (ReplicaError, ClientGoneError) as error:
            if not errand.has_begun:
                raise
            if isinstance(error, ReplicaError):
                await self._end(errand, error)
        finally:
            self.running.discard(errand)
            errand.free()
            if disconnect is not None:
                disconnect.remove_done_callback(leave)
                disconnect.cancel()
                await asyncio.gather(disconnect, return_exceptions=True)

    async def _end(self, errand: ProxiedRequest, error: TwostrokeError) -> None:
        """End a response after its begin: with an event where the protocol has one, or a cut."""
        report(error, errand.scope)
        if isinstance(error, ReplicaError):
            error = LostError("The server that wrote this answer was lost.")
            errand.served.error = error.code
        scope, form = errand.scope, errand.served.error_form
        body = form.body(error, errand.served.request_id, str)
        kind = errand.media_type
        if kind == b"text/event-stream":
            name = b"event: error\n" if form is ANTHROPIC else b""
            body = name + b"data: " + body + b"\n\n"
            if scope["path"] in _WITH_LAST_LINE:
                body += b"data: [DONE]\n\n"
        elif kind == b"application/x-ndjson":
            body += b"\n"
        else:
            await abort_connection(scope)
            return
        await errand.send({"type": "http.response.body", "body": body, "more_body": True})
        await errand.send({"type": "http.response.body", "body": b"", "more_body": False})


class _Pieces:
    """Cuts a stream after whole events, so that an error can follow; a space is a heartbeat.

    `has_died` says whether an event of the stream reported the death of the engine.
    """

    def __init__(self, ends: tuple[bytes, ...] | None, meter: UsageMeter | None) -> None:
        self.ends = ends
        self.has_died = False
        self._meter = meter
        self._held_data = b""

    def take(self, data: bytes, *, is_last: bool = False) -> bytes:
        """Return what may be sent now that `data` has come."""
        ends = self.ends
        if self._held_data:
            data, self._held_data = self._held_data + data, b""
        if ends and not is_last and not data.endswith(ends) and not data.isspace():
            end = max((data.rfind(one) + len(one) for one in ends if one in data), default=0)
            if len(data) - end < _MOST_HELD:
                data, self._held_data = data[:end], data[end:]
        if ends and _ENGINE_DIED in data:
            self.has_died |= any(map(_tells_death, data.splitlines()))
        return self._meter.take(data) if data and self._meter is not None else data


class _BusyError(OverloadedError):
    """A replica has no room for a request; its response is kept, for the case that none has."""

    def __init__(self, head: Head, body: bytes) -> None:
        super().__init__("The replica has no room.")
        self.head, self.body, self.is_full = head, body, head.status != 503

    async def pass_on(self, errand: ProxiedRequest) -> None:
        """Let the client read the replica's own response."""
        head = {"status": self.head.status, "headers": _returned(self.head)}
        await errand.send({"type": "http.response.start", **head})
        errand.has_begun = True
        errand.passage.num_open = 0
        await errand.send({"type": "http.response.body", "body": self.body, "more_body": False})


def _tells_death(line: bytes) -> bool:
    """Return whether a line of a stream is an error about the death of the engine.

    A line with the same words in the text of an answer does not count.
    """
    if _ENGINE_DIED not in line:
        return False
    try:
        event = msgspec.json.decode(line.removeprefix(b"data:"))
    except UNREADABLE:
        return False
    if not isinstance(event, dict):
        return False
    response = event.get("response")
    errors = [event.get("error"), response.get("error") if isinstance(response, dict) else None]
    errors += [event.get("message")] if event.get("type") == "error" else []
    return _ENGINE_DIED in msgspec.json.encode(errors)


async def _whole(connection: UpstreamConnection) -> bytes:
    body = bytearray()
    while data := await connection.read():
        body += data
        if len(body) > _MOST_HELD:
            raise ReplicaError("A replica's refusal is larger than 1 MiB.")
    return bytes(body)


def _returned(head: Head) -> Headers:
    named = set(tokens(head.value(b"connection")))
    return [
        pair
        for pair in head.headers
        if pair[0] not in _NOT_RETURNED
        and pair[0] not in named
        and not pair[0].startswith(b"access-control-")
    ]
