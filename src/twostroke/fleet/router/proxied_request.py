"""A client's request in the form in which the router sends it to replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.fleet.router.upstream import request_head
from twostroke.fleet.router.usage_meter import ProxyLog, asking
from twostroke.server.auth.keys import TENANT_HEADER
from twostroke.server.auth.usage_header import USAGE_HEADER
from twostroke.server.http.body_limits import FREE_BYTES
from twostroke.server.http.request_context import served_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive, Scope, Send

    from twostroke.fleet.router.replica_registry import Replica
    from twostroke.fleet.router.upstream import UpstreamConnection
    from twostroke.fleet.router.usage_meter import UsageMeter
    from twostroke.server.http.request_context import ServedRequest

    Headers = list[tuple[bytes, bytes]]

HOPS: Final = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade".split()
)
_NOT_SENT: Final = HOPS | {
    *b"accept-encoding host content-length expect origin x-request-id x-forwarded-for".split(),
    USAGE_HEADER,
}


class ProxiedRequest:
    """One request to be passed on.

    `body` is whole, or comes piece by piece from the client; then it can be sent only once. A
    request that `is_safe` may be sent again after a replica has lost it. `model` is the one that it
    names; `content` is the hash of its content, empty if no engine computes it.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        body: bytes | AsyncIterator[bytes],
        replica_key: str | None = None,
        *,
        meter: UsageMeter | None = None,
        model: str = "",
    ) -> None:
        """Pass on the request of a scope; `replica_key` is shown in place of the client's."""
        self.replica_key = replica_key
        self.scope, self.receive, self.send, self.body = scope, receive, send, body
        self.meter, self.model = meter, model
        self.content = b""
        self.sent_s = 0.0  # when it was sent to a replica last
        self.passage = ProxyLog(meter)
        self.served: ServedRequest = served_of(scope)
        self.served.running = self.passage
        self.is_safe = True
        self.was_stale = False  # sent on a connection that had ended
        self.has_begun = False  # the response to the client
        self.connection: UpstreamConnection | None = None
        self.is_gone = False  # the client
        self.media_type = b""  # of the response
        self.is_foreign = False  # the replica, as it was sent there
        self.asks_usage = False  # in the body, for the client, which does not
        self._num_held = 0  # bytes of the body that count as arriving

    def hold(self) -> None:
        """Count the body, which has just arrived, until `free`: it may have to be sent again."""
        num_bytes = len(self.body) - FREE_BYTES if isinstance(self.body, bytes) else 0
        if num_bytes > 0 and self.served.body_memory is not None:
            self.served.body_memory.take(self.served.tenant, num_bytes)
            self._num_held = num_bytes

    def free(self) -> None:
        """Drop the body, which is not sent any more."""
        if self._num_held and self.served.body_memory is not None:
            self.served.body_memory.release(self.served.tenant, self._num_held)
            self.body, self._num_held = b"", 0

    def request_to(self, replica: Replica) -> tuple[bytes, bytes | AsyncIterator[bytes]]:
        """Return the head and the body of the request to a replica."""
        body, path = self.body, self.scope["path"]
        self.asks_usage, self.is_foreign = False, replica.is_foreign
        if self.meter is not None:
            self.meter.restart()
            asked = asking(body, path) if replica.is_foreign and isinstance(body, bytes) else None
            self.asks_usage, body = asked is not None, asked or body
        return self._head(replica, body), body

    def _head(self, replica: Replica, body: bytes | AsyncIterator[bytes]) -> bytes:
        scope = self.scope
        named = {
            token
            for name, value in scope["headers"]
            if name == b"connection"
            for token in tokens(value)
        }
        headers: Headers = [
            pair
            for pair in scope["headers"]
            if pair[0] not in _NOT_SENT and pair[0] not in CREDENTIALS and pair[0] not in named
        ]
        headers += credentials(scope, self.replica_key)
        headers.append((b"x-request-id", self.served.request_id.encode()))
        headers.append((b"accept-encoding", b"identity"))  # events and usage are read
        if self.meter is not None and not replica.is_foreign:
            headers.append((USAGE_HEADER, b"1"))
        client = scope.get("client")
        before = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
        if client:
            headers.append((b"x-forwarded-for", b", ".join([*before, client[0].encode()])))
        length: int | None = None
        if isinstance(body, bytes):
            if body or scope["method"] not in {"GET", "HEAD", "DELETE", "OPTIONS"}:
                length = len(body)
        else:
            given = next((v for n, v in scope["headers"] if n == b"content-length"), None)
            length = int(given) if given is not None else None
            if given is None:
                headers.append((b"transfer-encoding", b"chunked"))
        query = scope["query_string"]
        target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
        return request_head(replica.address, scope["method"], target, headers, length)


def tokens(value: bytes) -> list[bytes]:
    """Return the words of a header in lower case."""
    return [part.strip().lower() for part in value.split(b",") if part.strip()]


CREDENTIALS: Final = frozenset((b"authorization", b"x-api-key", TENANT_HEADER))


def credentials(scope: Scope, replica_key: str | None) -> Headers:
    """Return the client's own, or with a `replica_key` this and the client's tenant."""
    if replica_key is None:
        return [pair for pair in scope["headers"] if pair[0] in CREDENTIALS - {TENANT_HEADER}]
    served = served_of(scope)
    found = [(b"authorization", b"Bearer " + replica_key.encode())]
    if served.tenant:
        classes = served.key.classes if served.key is not None else None
        named = "" if classes is None else f" {','.join(classes)}"
        found.append((TENANT_HEADER, f"{served.tenant} {served.weight:.9g}{named}".encode()))
    return found
