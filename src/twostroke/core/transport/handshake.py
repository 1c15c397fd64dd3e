"""A handshake by which two processes prove that they know a secret, without sending it.

Each process sends a nonce and an HMAC of both nonces. `sides` are the names of the process that
connects and of the process that listens; they are signed as well, so that an HMAC of one protocol
or direction is not valid in another.
"""

from __future__ import annotations

import hmac
import os
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket

    Sides = tuple[bytes, bytes]

_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32


def handshake_as_listener(sock: socket.socket, secret: bytes, sides: Sides) -> None:
    """Do the handshake of a listening process: check that the connecting process knows `secret`.

    `sides` are the names of the two processes; see the module. The connecting process calls
    `handshake_as_client`.

    Raises:
        PermissionError: the process that connected does not know the secret.
        OSError: the process that connected does not answer in time.
    """
    own_nonce = os.urandom(_NONCE_BYTES)
    sock.sendall(own_nonce)
    answer = receive_exactly(sock, _NONCE_BYTES + _MAC_BYTES)
    peer_nonce, mac = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(mac, _mac(secret, sides[0], own_nonce, peer_nonce)):
        raise PermissionError("it does not know the secret")
    sock.sendall(_mac(secret, sides[1], peer_nonce, own_nonce))


def handshake_as_client(sock: socket.socket, secret: bytes, sides: Sides) -> None:
    """Do the handshake of a connecting process: check that the listening process knows `secret`.

    `sides` are the names of the two processes; see the module. The listening process calls
    `handshake_as_listener`.

    Raises:
        PermissionError: the process that listens does not know the secret.
        OSError: the process that listens does not answer in time.
    """
    peer_nonce = receive_exactly(sock, _NONCE_BYTES)
    own_nonce = os.urandom(_NONCE_BYTES)
    sock.sendall(own_nonce + _mac(secret, sides[0], peer_nonce, own_nonce))
    mac = receive_exactly(sock, _MAC_BYTES)
    if not hmac.compare_digest(mac, _mac(secret, sides[1], own_nonce, peer_nonce)):
        raise PermissionError("it does not know the secret")


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Return the next `count` bytes of a socket; raise OSError if they do not arrive in time.

    The socket's timeout is for all bytes together, so that a peer cannot send one byte now and then
    for ever.
    """
    data = b""
    timeout_s = sock.gettimeout()
    started_s = time.monotonic()
    while len(data) < count:
        if timeout_s is not None:
            sock.settimeout(max(1e-3, started_s + timeout_s - time.monotonic()))
        chunk = sock.recv(count - len(data))
        if not chunk:
            raise ConnectionError("the connection ended")
        data += chunk
    sock.settimeout(timeout_s)
    return data


def _mac(secret: bytes, side: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(secret, side + b"".join(nonces), "sha256")
