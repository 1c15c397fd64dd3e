"""Sends equal requests in flight to one replica, which computes them once.

Two requests are equal here if they have the same path, tenant and body, their body sets temperature
0 or a seed, and no header excludes shared answers. The replica itself decides which requests share
an answer; the router only sends equal requests to the same replica.
"""

from __future__ import annotations

import re
from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from twostroke.server.http.retry_after import TIMEOUT_HEADER

if TYPE_CHECKING:
    from collections.abc import Iterable

# Finds the fields in any part of the body: a wrong match only sends equal bodies to one replica.
_REPEATABLE: Final = re.compile(rb'"(?:temperature"\s*:\s*0(?:\.0*)?|seed"\s*:\s*\d+)\s*[,}]')


def equal_key(
    path: str, tenant: str, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> bytes:
    """Return a hash that equal requests share; empty if the request cannot share a computation.

    A request whose answers are random, or whose headers set a timeout, `no-cache` or `no-store`,
    cannot share a computation.
    """
    if _REPEATABLE.search(body) is None or any(map(_is_exclusive, headers)):
        return b""
    digest = blake2b(body, digest_size=16)
    digest.update(f"{path}\n{tenant}".encode())
    return digest.digest()


def _is_exclusive(header: tuple[bytes, bytes]) -> bool:
    """Return whether a header excludes that a request shares a computation with equal requests."""
    name, value = header
    if name == b"cache-control":
        return b"no-" in value.lower()
    return name == TIMEOUT_HEADER.encode()


class EqualRequests:
    """Counts which replicas compute which requests without randomness, by their `equal_key`."""

    def __init__(self) -> None:
        """Start with no requests."""
        self._replicas: dict[bytes, Counter[int]] = {}  # by key: requests by index of the replica

    def add(self, key: bytes, replica: int) -> None:
        """Note that the replica with this index begins a request; an empty key does not count."""
        if key:
            self._replicas.setdefault(key, Counter())[replica] += 1

    def remove(self, key: bytes, replica: int) -> None:
        """Note that a replica has ended a request."""
        if not key:
            return
        counts = self._replicas[key]
        counts[replica] -= 1
        if not counts[replica]:
            del counts[replica]
        if not counts:
            del self._replicas[key]

    def replica_of(self, key: bytes) -> int | None:
        """Return the index of the replica that computes most requests with this key, if any."""
        counts = self._replicas.get(key)
        return counts.most_common(1)[0][0] if counts else None
