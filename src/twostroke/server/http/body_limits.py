"""Limits on request bodies: bytes in memory, for each tenant and in total, and JSON nesting."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

import numpy as np

from twostroke.core.errors import TwostrokeError

# Not counted of each body, since a connection may buffer this amount anyway. So long requests never
# cause the refusal of short requests.
FREE_BYTES: Final = 64 * 1024
_FULL_MESSAGE: Final = (
    "{whose} request bodies that arrive or wait to be read take {max_bytes} bytes of memory, the "
    "limit. Try again, or send fewer long requests at the same time."
)


class BodiesError(TwostrokeError):
    """The request bodies of all clients together would take too much memory."""

    http_status = 503
    code = "bodies_limit"


class TenantBodiesError(BodiesError):
    """The request bodies of one tenant together would take too much memory."""

    http_status = 429


class BodyMemory:
    """Limits the memory that arriving request bodies take, for each tenant and in total.

    A body counts while it arrives and until it is decoded. Call the methods only in the event
    loop's thread.
    """

    def __init__(self, max_bytes: int, max_tenant_bytes: int) -> None:
        """Start with no counted bodies.

        `max_bytes` limits the bodies of all tenants together, and `max_tenant_bytes` the bodies of
        each tenant.
        """
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._num_bytes = 0
        self._bytes_by_tenant: Counter[str] = Counter()

    def check(self, tenant: str, num_bytes: int) -> None:
        """Check that `num_bytes` more of a tenant's request bodies would be within the limits.

        Raises:
            TenantBodiesError: the tenant's bodies would take too much memory.
            BodiesError: all bodies together would take too much memory.
        """
        if self._bytes_by_tenant[tenant] + num_bytes > self._max_tenant_bytes:
            raise TenantBodiesError(
                _FULL_MESSAGE.format(whose="Your", max_bytes=self._max_tenant_bytes)
            )
        if self._num_bytes + num_bytes > self._max_bytes:
            raise BodiesError(_FULL_MESSAGE.format(whose="All", max_bytes=self._max_bytes))

    def take(self, tenant: str, num_bytes: int) -> None:
        """Count `num_bytes` more of a tenant's request bodies.

        Raises:
            TenantBodiesError: the tenant's bodies would take too much memory.
            BodiesError: all bodies together would take too much memory.
        """
        self.check(tenant, num_bytes)
        self.release(tenant, -num_bytes)

    def release(self, tenant: str, num_bytes: int) -> None:
        """Subtract `num_bytes` of a tenant's request bodies that are no longer in memory."""
        self._num_bytes -= num_bytes
        self._bytes_by_tenant[tenant] -= num_bytes
        if not self._bytes_by_tenant[tenant]:
            del self._bytes_by_tenant[tenant]


# Decoding creates all lists and objects while no other thread runs. This number takes some tenths
# of a second; a body of 8 MB can have 4,000,000.
MAX_CONTAINERS: Final = 250_000
_CURLY_BIT: Final = ord("{") ^ ord("[")  # the bit in which { differs from [, and } from ]
_SCAN_CHUNK_BYTES: Final = 1 << 18


class Nesting(NamedTuple):
    """Upper bounds of a JSON text's nesting depth, and of its number of lists and objects."""

    depth: int
    num_containers: int


def nesting_of(body: bytes, max_depth: int) -> Nesting:
    """Measure how deeply a JSON text is nested, without decoding it.

    Decoding recurses, so a server must refuse texts that are nested too deeply before it decodes
    them. If the text has at most `max_depth` brackets, the result is only an upper bound. The time
    is proportional to the text's length for any content, and other threads can run meanwhile.
    """
    num_brackets = body.count(b"[") + body.count(b"{")
    if num_brackets <= max_depth:
        return Nesting(num_brackets, num_brackets)
    if b"\\" in body:  # an escaped quote does not end a string
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    depth = deepest = num_containers = num_quotes = 0
    for start in range(0, len(body), _SCAN_CHUNK_BYTES):
        size = min(_SCAN_CHUNK_BYTES, len(body) - start)
        codes = np.frombuffer(body, np.uint8, size, start)
        quotes = np.cumsum(codes == ord('"'), dtype=np.int32) + num_quotes
        is_outside = quotes % 2 == 0
        squares = codes & ~np.uint8(_CURLY_BIT)
        opens = is_outside & (squares == ord("["))
        closes = is_outside & (squares == ord("]"))
        depths = np.cumsum(opens.astype(np.int32) - closes, dtype=np.int32) + depth
        deepest = max(deepest, int(depths.max()))
        depth, num_quotes = int(depths[-1]), int(quotes[-1])
        num_containers += int(np.count_nonzero(opens))
    return Nesting(deepest, num_containers)
