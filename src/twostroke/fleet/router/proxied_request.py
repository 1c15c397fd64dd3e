"""A client's request in the form in which the router sends it to replicas."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from twostroke.fleet.router.upstream import request_head
from twostroke.fleet.router.usage_meter import ProxyLog, with_usage_option
from twostroke.server.auth.keys import TENANT_HEADER
from twostroke.server.auth.usage_header import USAGE_HEADER
from twostroke.server.http.body_limits import FREE_BYTES
from twostroke.server.http.request_context import served_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive, Scope, Send

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
# Headers of the client that the router drops, or replaces by its own.
_NOT_FORWARDED: Final = (
    HOP_HEADERS
    | CREDENTIALS
    | {
        *b"accept-encoding host content-length expect origin x-request-id x-forwarded-for".split(),
        USAGE_HEADER,
    }
)
# Headers of replicas that the router replaces by its own.
_NOT_RETURNED: Final = HOP_HEADERS | frozenset(
    [*b"date server x-request-id request-id".split(), USAGE_HEADER]
)


class ProxiedRequest:
    """A request to forward.

    Attributes:
        scope, receive, send: the client's request, by ASGI.
        body: the whole body, or the parts of a body that is forwarded as it comes.
        key: the routing key.
        model: the model that the request names.
        content: the hash of its content; empty if no engine computes it.
        stored_id: the id of a stored answer or conversation, whose replica must answer; else empty.
        only_replica: the replica that must answer; None if the policy chooses.
        meter: measures the usage; None if usage is not kept.
        log: where the request goes, for logs and usage records.
        context: the request's context in the HTTP layers.
        sent_s: when it was sent to a replica last.
        give_up_s: when it is given up if no replica is ready, on the event loop's clock; 0.0 if it
            does not wait for a replica yet.
        may_resend: whether it may be sent again after a replica has lost it.
        was_stale: whether it has been sent again because a connection had been closed.
        has_begun: whether the response to the client has begun.
        has_left: whether the client has disconnected.
        connection: the connection to the replica.
        media_type: the type of the response.
        is_foreign: whether the replica is a server other than Twostroke.
        strips_usage: whether the body asks for usage on behalf of the router, and the client gets
            none.
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
        """Take over the request of a scope."""
        self.scope = scope
        self.receive = receive
        self.send = send
        self.body = body
        self.key = key
        self.model = model
        self.content = b""
        self.stored_id = ""
        self.only_replica: Replica | None = None
        self.meter = meter
        self.log = ProxyLog(meter)
        self.context: ServedRequest = served_of(scope)
        self.context.running = self.log
        self.sent_s = 0.0
        self.give_up_s = 0.0
        self.may_resend = True
        self.was_stale = False
        self.has_begun = False
        self.has_left = False
        self.connection: UpstreamConnection | None = None
        self.media_type = b""
        self.is_foreign = False
        self.strips_usage = False
        self._num_held_bytes = 0

    def hold_body(self) -> None:
        """Count the body as arriving until `free_body`, since it may have to be sent again."""
        num_bytes = len(self.body) - FREE_BYTES if isinstance(self.body, bytes) else 0
        if num_bytes > 0 and self.context.body_memory is not None:
            self.context.body_memory.take(self.context.tenant, num_bytes)
            self._num_held_bytes = num_bytes

    def free_body(self) -> None:
        """Drop the body, which will not be sent any more."""
        if self._num_held_bytes and self.context.body_memory is not None:
            self.context.body_memory.release(self.context.tenant, self._num_held_bytes)
            self.body = b""
            self._num_held_bytes = 0

    def message_to(
        self, replica: Replica, replica_key: str | None
    ) -> tuple[bytes, bytes | AsyncIterator[bytes]]:
        """Record that the request goes to a replica; return its head and its body.

        `replica_key` is the key to show to replicas in place of the client's; None to show the
        client's.
        """
        body = self.body
        self.sent_s = time.monotonic()
        self.log.replica = replica
        self.context.known_model = replica.model_name(self.model)
        self.is_foreign = replica.is_foreign
        self.strips_usage = False
        if self.meter is not None:
            self.meter.restart()
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
        headers += credentials(scope, replica_key)
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

    async def begin_response(self, head: Head) -> None:
        """Send the head of a replica's response, without headers that concern its connection.

        From now on no other replica can answer, so the request's body is dropped.
        """
        dropped = _NOT_RETURNED | set(header_tokens(head.value(b"connection")))
        headers = [
            (name, value)
            for name, value in head.headers
            if name not in dropped and not name.startswith(b"access-control-")
        ]
        await self.send({"type": "http.response.start", "status": head.status, "headers": headers})
        self.has_begun = True
        self.media_type = head.media_type
        self.free_body()


async def _chunked(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of a body of unknown length in HTTP's chunked encoding."""
    async for part in parts:
        yield b"%x\r\n%s\r\n" % (len(part), part)
    yield b"0\r\n\r\n"


def header_tokens(value: bytes) -> list[bytes]:
    """Return the comma-separated words of a header in lower case."""
    return [part.strip().lower() for part in value.split(b",") if part.strip()]


def credentials(scope: Scope, replica_key: str | None) -> Headers:
    """Return the headers by which a replica knows the client.

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
