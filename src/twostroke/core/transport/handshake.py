"""How two processes prove to each other that they know a secret, without sending it.

Both sign the nonces of both. `sides` name who connects and who listens, so that a proof of one
protocol or direction is of no use in another.
"""

from __future__ import annotations

import hmac
import os
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket

    Sides = tuple[bytes, bytes]

_NONCE: Final = 32
_MAC: Final = 32


def admit(sock: socket.socket, secret: bytes, sides: Sides) -> None:
    """Check the process that connected, as the one that listens.

    Raises:
        PermissionError: it does not know the secret.
        OSError: it does not answer.
    """
    nonce = os.urandom(_NONCE)
    sock.sendall(nonce)
    answer = receive_exactly(sock, _NONCE + _MAC)
    theirs, mac = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(mac, _mac(secret, sides[0], nonce, theirs)):
        raise PermissionError("it does not know the secret")
    sock.sendall(_mac(secret, sides[1], theirs, nonce))


def introduce(sock: socket.socket, secret: bytes, sides: Sides) -> None:
    """Check the process that listens, as the one that connected; errors as `admit`."""
    theirs, nonce = receive_exactly(sock, _NONCE), os.urandom(_NONCE)
    sock.sendall(nonce + _mac(secret, sides[0], theirs, nonce))
    if not hmac.compare_digest(receive_exactly(sock, _MAC), _mac(secret, sides[1], nonce, theirs)):
        raise PermissionError("it does not know the secret")


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Return `count` bytes; OSError if the other end closes before, or exceeds the timeout.

    The timeout is for all of them together, for peers that send a byte now and then.
    """
    data, patience_s, began_s = b"", sock.gettimeout(), time.monotonic()
    while len(data) < count:
        if patience_s is not None:
            sock.settimeout(max(1e-3, began_s + patience_s - time.monotonic()))
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionError("the connection ended")
        data += part
    sock.settimeout(patience_s)
    return data


def _mac(secret: bytes, side: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(secret, side + b"".join(nonces), "sha256")
