"""A client's request on its way through the router: to a replica, and the response back."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Final

from twostroke.fleet.router.event_splitter import EventSplitter
from twostroke.fleet.router.kept_stream import PRIVATE_LINE, KeptStream, StoppedReplicaError
from twostroke.fleet.router.overflow_permission import OVERFLOW_HEADER
from twostroke.fleet.router.paths import COMPUTED_PATHS, ENGINELESS_PATHS
from twostroke.fleet.router.response import ReplicaError
from twostroke.fleet.router.upstream import request_head
from twostroke.fleet.router.usage_meter import ProxyLog, with_usage_option
from twostroke.server.auth.keys import TENANT_HEADER
from twostroke.server.auth.usage_header import STREAMS, USAGE_HEADER
from twostroke.server.http.body_limits import FREE_BYTES
from twostroke.server.http.errors import ClientGoneError
from twostroke.server.http.request_context import served_of
from twostroke.server.http.responses import until_disconnect
from twostroke.server.http.router_messages import NO_RECORDS, RESUME_HEADER
from twostroke.server.http.write_coalescer import WRITE_NOW

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive, Scope, Send

    from twostroke.fleet.router.overflow_permission import OverflowPermission
    from twostroke.fleet.router.replica_registry import Replica
    from twostroke.fleet.router.response import Head
    from twostroke.fleet.router.upstream import UpstreamConnection
    from twostroke.fleet.router.usage_meter import UsageMeter
    from twostroke.fleet.routing.dispatch import RoutingKey
    from twostroke.server.http.request_context import ServedRequest

    Headers = list[tuple[bytes, bytes]]

HOP_HEADERS: Final = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade".split()
)
CREDENTIALS: Final = frozenset((b"authorization", b"x-api-key", TENANT_HEADER))
# Comments of a stream, and spaces before JSON, that are sent before anything is computed.
_HEARTBEATS: Final = re.compile(rb"(?::[^\r\n]*[\r\n]|\s)+")
_MAX_ERROR_BYTES: Final = 1 << 20  # of an error to pass on
# Headers of the client that the router drops, or replaces by its own.
_NOT_FORWARDED: Final = (
    HOP_HEADERS
    | CREDENTIALS
    | {
        *b"accept-encoding host content-length expect origin x-request-id x-forwarded-for".split(),
        OVERFLOW_HEADER,
        USAGE_HEADER,
        RESUME_HEADER,
    }
)
# Headers of replicas that the router replaces by its own.
_NOT_RETURNED: Final = HOP_HEADERS | frozenset(
    [*b"date server x-request-id request-id".split(), USAGE_HEADER, RESUME_HEADER]
)


class ProxiedRequest:
    """A request to forward; its `async with` block watches the client, and keeps the body.

    Attributes:
        scope, receive, send: the client's request, by ASGI.
        body: the whole body, or the parts of a body that is forwarded as it arrives.
        key: the routing key.
        model: the model that the request names.
        content: the hash of the request's content; empty if no engine computes the answer.
        equal_key: the hash that equal requests share; empty if the answers are random.
        in_background: whether the response, unless it is streamed, says only that the answer will
            be computed.
        only_replica: the replica that must answer; None if the policy chooses.
        meter: measures the usage; None if usage is not recorded.
        log: the request's progress, for logs and usage records.
        context: the request's context in the HTTP layers.
        sent_s: when the request was last sent to a replica.
        give_up_s: when the request is given up if no replica is ready, on the event loop's clock;
            0.0 if the request does not wait for a replica yet.
        start_give_up_s: when the request is given up if the first replica of its model has not
            started, on the same clock; 0.0 if the request has not waited for a start.
        may_resend: whether the request may be sent again after a replica has lost it.
        was_stale: whether the request was sent twice to the replica, because the replica had closed
            the first connection.
        has_begun: whether the response to the client has begun.
        has_left: whether the client has disconnected.
        connection: the connection to the replica.
        is_foreign: whether the replica was not a server of Twostroke when the request was sent.
        media_type: the type of the response.
        is_streamed: whether the response is a stream of events.
        splitter: splits the response into events.
        kept_stream: the parts that another replica needs to continue the response; None if no other
            replica can.
        lost_s: monotonic time at which a replica failed after the response had begun; 0.0 if no
            replica failed then.
        strips_usage: whether the router has added a request for usage to the body, so that the
            usage must be removed from the response.
        may_overflow: whether an upstream may answer the request, if a rule says so.
        tried_upstreams: the names of the upstreams to which the request was sent.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        body: bytes | AsyncIterator[bytes],
        key: RoutingKey,
        model: str = "",
        meter: UsageMeter | None = None,
    ) -> None:
        """Create the request to forward from a client's request.

        Args:
            scope: the client's request, by ASGI.
            receive: returns the next ASGI message from the client.
            send: sends an ASGI message to the client.
            body: the whole body, or its parts as they arrive.
            key: the routing key, from which the policy chooses a replica.
            model: the model that the request names; empty if it names none.
            meter: measures the usage; None if usage is not recorded.
        """
        self._replica: Replica  # to which the request was sent last
        self.scope = scope
        self.receive = receive
        self.send = send
        self.body = body
        self.key = key
        self.model = model
        self.content = b""
        self.equal_key = b""
        self.in_background = False
        self.only_replica: Replica | None = None
        self.meter = meter
        self.log = ProxyLog(meter)
        self.context: ServedRequest = served_of(scope)
        self.context.running = self.log
        self.sent_s = 0.0
        self.give_up_s = 0.0
        self.start_give_up_s = 0.0
        self.may_resend = True
        self.was_stale = False
        self.has_begun = False
        self.has_left = False
        self.connection: UpstreamConnection | None = None
        self.is_foreign = False
        self.media_type = b""
        self.strips_usage = False
        self.is_streamed = False
        self.kept_stream: KeptStream | None = None
        self.lost_s = 0.0
        self.may_overflow = True
        self.tried_upstreams: set[str] = set()
        self.splitter: EventSplitter  # from the beginning of the response on
        self._num_held_bytes = 0
        self._disconnect: asyncio.Future[None] | None = None

    @property
    def is_computed(self) -> bool:
        """Whether an engine computes the answer."""
        return self.scope["path"] not in ENGINELESS_PATHS

    async def __aenter__(self) -> None:
        """Start to watch whether the client disconnects, and count the body as body memory.

        The body stays in memory until the response begins, since it may have to be sent again.
        """
        if isinstance(self.body, bytes):
            num_bytes = len(self.body) - FREE_BYTES
            if num_bytes > 0 and self.context.body_memory is not None:
                self.context.body_memory.take(self.context.tenant, num_bytes)
                self._num_held_bytes = num_bytes
            self._disconnect = asyncio.ensure_future(until_disconnect(self.receive))
            self._disconnect.add_done_callback(self._on_disconnect)

    async def __aexit__(self, *_: object) -> None:
        """Release the body, and stop to watch the client."""
        self._free_body()
        if self.kept_stream is not None:
            self.kept_stream.release()
        if self._disconnect is not None:
            self._disconnect.remove_done_callback(self._on_disconnect)
            self._disconnect.cancel()
            await asyncio.gather(self._disconnect, return_exceptions=True)

    async def send_to(
        self, replica: Replica, replica_key: str | None, permission: OverflowPermission
    ) -> Head:
        """Send the request over a connection to a replica; return the head of the response.

        If the replica closes a connection that was idle before, without an answer, the request is
        sent once more, over a new connection.

        Args:
            replica: the replica.
            replica_key: the key to show to replicas in place of the client's; None to show the
                client's.
            permission: decides whether upstreams may answer the request; a header tells this to the
                replica, which may itself be a router with upstreams.

        Raises:
            ReplicaError: the replica cannot be reached (then `connection` is None), or it has lost
                the request.
            ClientGoneError: the client has disconnected.
        """
        permission.refresh_owner(self.context)
        message, body = self._message_to(replica, replica_key, permission)
        is_head = self.scope["method"] == "HEAD"
        self.was_stale = False
        while True:
            connection = self.connection = await replica.pool.take()
            if self.has_left:
                raise ClientGoneError("The client left before its request was sent.")
            if not isinstance(body, bytes):
                self.may_resend = False
            try:
                head = await connection.request(message, body, is_head=is_head)
                break
            except ReplicaError:
                is_stale = connection.num_requests > 1 and not connection.has_answered
                if not is_stale or not self.may_resend or self.was_stale:
                    raise
            connection.release()
            self.connection = None
            replica.pool.close_idle()
            self.was_stale = True
            self.log.num_tries += 1
            self.sent_s = time.monotonic()
        if self.meter is not None:
            is_free_if_silent = not replica.is_foreign and self.scope["path"] not in COMPUTED_PATHS
            self.meter.begin(
                head, is_free_if_silent=is_free_if_silent, strips_usage=self.strips_usage
            )
        return head

    @property
    def first_bytes(self) -> bytes:
        """The first bytes of a response that another replica has begun; else empty."""
        return self.kept_stream.first_bytes if self.kept_stream is not None else b""

    @property
    def can_continue(self) -> bool:
        """Whether another replica can answer, even if the response to the client has begun."""
        return not self.has_begun or (
            self.kept_stream is not None and self.kept_stream.can_continue
        )

    async def begin_response(self, head: Head) -> bytes:
        """Begin the response to the client when the first byte of the replica's body arrives.

        Until then any replica can still answer. After that the request's body is dropped, unless
        `kept_stream` lets another replica continue the response. Heartbeats, which a replica sends
        before it computes anything, are sent to the client at once, after the status and headers.

        Returns:
            The first bytes of the body after the heartbeats; they are not sent yet.

        Raises:
            ReplicaError: the replica has lost the request.
        """
        connection = self.connection
        assert connection is not None
        data = await connection.read()
        if self.kept_stream is not None:
            self.kept_stream.begin(head, self._replica, self.model)
        if self.has_begun:  # at another replica
            self.splitter = self._make_splitter(
                self.splitter.event_ends, held_end=self.splitter.held_end
            )
        else:
            await self._send_head(head)
        while not connection.is_read and _HEARTBEATS.fullmatch(data) and PRIVATE_LINE not in data:
            await self.send({"type": "http.response.body", "body": data, "more_body": True})
            data = await connection.read()
        if self.is_streamed and self.log.first_byte_s is None:  # else another replica continues
            self.log.first_byte_s = time.monotonic()
        return data

    async def send_body(self, data: bytes) -> None:
        """Send the body of the replica's response to the client as it arrives; count its usage.

        `data` is the beginning of the body, as `begin_response` returns it.

        Raises:
            ReplicaError: the replica has lost the request, or reports that it cannot finish.
        """
        send, take, connection = self.send, self.splitter.take, self.connection
        write = self.scope["extensions"].get(WRITE_NOW)
        assert connection is not None

        def write_on(data: bytes) -> bool:
            if not write(b""):
                return False
            if data := take(data):
                write(data)
            return True

        if self.is_streamed and write is not None:
            connection.sink = write_on
        while not connection.is_read:
            if data := take(data):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await connection.read()
        data = take(data, is_last=True)
        if self.kept_stream is not None and self.kept_stream.lost_code:
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            raise StoppedReplicaError(self.kept_stream.lost_code)
        await self.end_response(data)

    async def read_error(self) -> bytes:
        """Return the whole body of a response that refuses the request.

        Raises:
            ReplicaError: the body is larger than 1 MiB, or the connection ended.
        """
        assert self.connection is not None
        body = bytearray()
        while data := await self.connection.read():
            body += data
            if len(body) > _MAX_ERROR_BYTES:
                raise ReplicaError("A replica's refusal is larger than 1 MiB.")
        return bytes(body)

    async def respond(self, head: Head, body: bytes) -> None:
        """Send a replica's response, such as a refusal, to the client; `body` is the whole body."""
        await self._send_head(head)
        await self.end_response(body)

    async def begin_upstream_response(self, head: Head) -> None:
        """Begin the response to the client with an upstream's head; no replica can continue it."""
        if self.kept_stream is not None:
            self.kept_stream.release()
            self.kept_stream = None
        await self._send_head(head)
        self.log.first_byte_s = time.monotonic()

    async def _send_head(self, head: Head) -> None:
        """Send the head of a replica's response, without headers that concern its connection."""
        dropped = _NOT_RETURNED | set(header_tokens(head.value(b"connection")))
        headers = [
            (name, value)
            for name, value in head.headers
            if name not in dropped and not name.startswith(b"access-control-")
        ]
        await self.send({"type": "http.response.start", "status": head.status, "headers": headers})
        self.has_begun = True
        self.media_type = head.media_type
        event_ends = STREAMS.get(head.media_type)
        self.is_streamed = event_ends is not None
        self.splitter = self._make_splitter(event_ends)
        self._free_body()

    def _make_splitter(
        self, event_ends: tuple[bytes, ...] | None, held_end: bytes = b""
    ) -> EventSplitter:
        """Return the splitter of a replica's response.

        `held_end` are the bytes that were held back of the previous replica's response.
        """
        return EventSplitter(
            event_ends,
            self.meter,
            self.kept_stream,
            holds_end=self.context.holds_end,
            held_end=held_end,
        )

    async def end_response(self, data: bytes) -> None:
        """Send the last bytes of the response, and determine the usage of the request."""
        self.log.num_open = 0
        if self.meter is not None:
            self.meter.finish(self.context)
        await self.context.settle()
        await self.send({"type": "http.response.body", "body": data, "more_body": False})

    def _message_to(
        self, replica: Replica, replica_key: str | None, permission: OverflowPermission
    ) -> tuple[bytes, bytes | AsyncIterator[bytes]]:
        """Return the head and the body of the message that carries the request to a replica.

        Credentials and connection headers are replaced by the router's own. Also notes in `log`
        that this replica gets the request.
        """
        body = self.body
        self.sent_s = time.monotonic()
        self.log.replica = self._replica = replica
        resume_headers: Headers = []
        is_continued = self.kept_stream is not None and self.kept_stream.can_continue
        if self.kept_stream is not None and is_continued:
            body, resume_headers = self.kept_stream.message(replica)
        elif self.content:
            resume_headers = [(RESUME_HEADER, NO_RECORDS)]
        self.context.known_model = replica.model_name(self.model)
        self.is_foreign = replica.is_foreign
        self.strips_usage = False
        if self.meter is not None:
            self.meter.restart(is_continued=is_continued)
            if replica.is_foreign and isinstance(body, bytes):
                changed_body = with_usage_option(body, self.scope["path"])
                if changed_body is not None:
                    self.strips_usage = True
                    body = changed_body
        scope = self.scope
        connection_headers = {
            token
            for name, value in scope["headers"]
            if name == b"connection"
            for token in header_tokens(value)
        }
        dropped = _NOT_FORWARDED | connection_headers
        headers: Headers = [pair for pair in scope["headers"] if pair[0] not in dropped]
        headers += credentials(scope, replica_key) + resume_headers
        headers += permission.headers(scope)
        headers.append((b"x-request-id", self.context.request_id.encode()))
        headers.append((b"accept-encoding", b"identity"))  # the router reads events and usage
        if self.meter is not None and not replica.is_foreign:
            headers.append((USAGE_HEADER, b"1"))
        client = scope.get("client")
        if client:
            hosts = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
            headers.append((b"x-forwarded-for", b", ".join([*hosts, client[0].encode()])))
        length: int | None = None
        if isinstance(body, bytes):
            if body or scope["method"] not in {"GET", "HEAD", "DELETE", "OPTIONS"}:
                length = len(body)
        else:
            lengths = [value for name, value in scope["headers"] if name == b"content-length"]
            if lengths:
                length = int(lengths[0])
            else:
                headers.append((b"transfer-encoding", b"chunked"))
                body = _chunked(body)
        query = scope["query_string"]
        target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
        return request_head(replica.address, scope["method"], target, headers, length), body

    def _free_body(self) -> None:
        """Release the memory of the request's body, which will not be sent any more."""
        if self._num_held_bytes and self.context.body_memory is not None:
            self.context.body_memory.release(self.context.tenant, self._num_held_bytes)
            self.body = b""
            self._num_held_bytes = 0

    def _on_disconnect(self, _: object) -> None:
        self.has_left = True
        if self.connection is not None:
            self.connection.fail(ClientGoneError("The client has left."))


async def _chunked(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of a body of unknown length in HTTP's chunked encoding."""
    async for part in parts:
        yield b"%x\r\n%s\r\n" % (len(part), part)
    yield b"0\r\n\r\n"


def header_tokens(value: bytes) -> list[bytes]:
    """Return the comma-separated words of a header's value in lower case."""
    return [part.strip().lower() for part in value.split(b",") if part.strip()]


def credentials(scope: Scope, replica_key: str | None) -> Headers:
    """Return the headers that tell a replica who the client is.

    These are the client's own credentials or, with a `replica_key`, this key and the client's
    tenant with its weight and service tiers.
    """
    if replica_key is None:
        return [pair for pair in scope["headers"] if pair[0] in CREDENTIALS - {TENANT_HEADER}]
    context = served_of(scope)
    headers = [(b"authorization", b"Bearer " + replica_key.encode())]
    if context.tenant:
        tiers = context.key.classes if context.key is not None else None
        allowed = "" if tiers is None else f" {','.join(tiers)}"
        headers.append((TENANT_HEADER, f"{context.tenant} {context.weight:.9g}{allowed}".encode()))
    return headers
