"""The connection between a prefill engine and a decode engine, and its handshake.

Engines of one user on one machine connect by a Unix socket in the abstract name space and need no
secret: the kernel tells each which user the other process has. All other engines connect by TCP,
and each proves to the other that it knows the secret (`TWOSTROKE_PEER_SECRET`).
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast

from twostroke.core.errors import BackendError, PortInUseError
from twostroke.core.transport.frames import WireError, frame, read_frame
from twostroke.core.transport.handshake import admit, introduce
from twostroke.engine.disaggregation import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from io import BufferedReader

    import msgspec

    from twostroke.engine.disaggregation.messages import Answer, Question

_logger = logging.getLogger("twostroke.handover")

_CREDENTIALS: Final = struct.Struct("3i")  # of a Unix socket's peer: process, user, group
_SIDES: Final = (b"decode", b"prefill")
_HANDSHAKE_TIMEOUT_S: Final = 5.0
_MAX_HANDSHAKES: Final = 32  # at the same time
_ACCEPT_PAUSE_S: Final = 0.05  # after a failed accept
_SEND_TIMEOUT_S: Final = 10  # in which a peer must read a part of the bytes sent to it
_SILENCE_S: Final = 4  # of the other host, after which the connection ends
_MAX_BUFFERS: Final = 64  # of one system call
_LOCAL_HOSTS: Final = ("127.0.0.1", "localhost", "::1")


class PeerLostError(BackendError):
    """The other engine of a KV transfer is gone, or sent an invalid message."""


class RefusedError(PeerLostError):
    """A prefill engine and a decode engine cannot exchange KV pages."""


class PeerConnection:
    """Sends and receives messages between a prefill and a decode engine.

    Any thread may send; one thread receives.

    Attributes:
        is_local: whether the other engine is on this machine, connected by a Unix socket.
    """

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        """Take over a connected socket after the handshake between the engines."""
        sock.settimeout(None)
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0)
        )
        self.is_local = sock.family == socket.AF_UNIX
        if not self.is_local:
            _detect_lost_host(sock)
        self._socket = sock
        self._decoder = decoder
        self._file = cast("BufferedReader", sock.makefile("rb", buffering=1 << 16))
        self._lock = threading.Lock()

    def send(self, message: Question | Answer, pages: Iterable[memoryview[Any]] = ()) -> None:
        """Send a message and the bytes of KV pages after it; `pages` is consumed step by step.

        Raises:
            PeerLostError: the other engine is gone, or has not read for too long.
        """
        buffers = [memoryview(frame(messages.encoder.encode(message)))]
        remaining = iter(pages)
        try:
            with self._lock:
                while buffers := [*buffers, *islice(remaining, _MAX_BUFFERS - len(buffers))]:
                    num_sent = self._socket.sendmsg(buffers, (), socket.MSG_NOSIGNAL)
                    while buffers and num_sent >= len(buffers[0]):
                        num_sent -= len(buffers.pop(0))
                    if num_sent:
                        buffers[0] = buffers[0][num_sent:]
        except (OSError, ValueError) as error:
            self.cut()
            raise PeerLostError(f"The connection ended: {error}.") from None

    def receive(self) -> Any:
        """Return the next message of the other engine.

        Raises:
            PeerLostError: the other engine is gone, or sent an invalid message.
        """
        try:
            return read_frame(self._file, self._decoder)
        except WireError as error:
            raise PeerLostError(str(error)) from None
        except (OSError, ValueError) as error:
            raise PeerLostError(f"The connection ended: {error}.") from None

    def receive_into(self, view: memoryview[Any]) -> None:
        """Fill a KV page with the next bytes after a message; errors as `receive`."""
        try:
            count = self._file.readinto(view)
        except (OSError, ValueError) as error:
            raise PeerLostError(f"The connection ended: {error}.") from None
        if count != len(view):
            raise PeerLostError("The connection ended.")

    def cut(self) -> None:
        """End the connection between the engines, for all threads; any thread may call this."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, after the receiving thread has ended."""
        self.cut()
        self._file.close()
        self._socket.close()


class PeerListener:
    """Accepts connections of decode engines to a prefill engine.

    Attributes:
        is_open: whether connections are accepted.
        port: the TCP port.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        *,
        page_file: int | None,
        serve: Callable[[PeerConnection], None],
    ) -> None:
        """Listen, and call `serve` in a new thread for each decode engine after its handshake.

        Engines of this machine and user get the open file of the pages. Without a secret no other
        engines are admitted. Port 0 takes a free port.

        Raises:
            PortInUseError: the address is in use, or does not belong to this machine.
        """
        self.is_open = True
        self._secret = secret
        self._page_file = page_file
        self._serve = serve
        self._handshakes = threading.Semaphore(_MAX_HANDSHAKES)
        host, port = address
        unix_socket = socket.socket(socket.AF_UNIX)
        tcp_socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._sockets = [tcp_socket, unix_socket]
        tcp_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tcp_socket.bind(address)
            self.port: int = tcp_socket.getsockname()[1]
            unix_socket.bind(_unix_socket_name(self.port))
        except OSError as error:
            self.close()
            cause = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                cause = "another program has this port (--peer-address, peer_port of a fleet)"
            reason = f"Decode engines cannot connect to {host}:{port}: {cause}."
            raise PortInUseError(reason) from None
        for sock in self._sockets:
            sock.listen(16)
            threading.Thread(
                target=self._accept, args=(sock,), name="twostroke-peers", daemon=True
            ).start()

    def close(self) -> None:
        """Stop accepting connections of decode engines."""
        self.is_open = False
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self, listener: socket.socket) -> None:
        while self.is_open:
            try:
                sock, _ = listener.accept()
            except OSError:  # closed, or this process may not open more files
                time.sleep(_ACCEPT_PAUSE_S)
                continue
            if self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._shake_hands, args=(sock,), daemon=True).start()
            else:
                sock.close()

    def _shake_hands(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(_HANDSHAKE_TIMEOUT_S)
            if sock.family == socket.AF_UNIX:
                _check_user(sock)
                files = [] if self._page_file is None else [self._page_file]
                socket.send_fds(sock, [bytes([len(files)])], files)
            elif not self._secret:
                raise PermissionError("this engine has no TWOSTROKE_PEER_SECRET")
            else:
                admit(sock, self._secret, _SIDES)
        except OSError as error:
            sock.close()
            if isinstance(error, PermissionError):
                _logger.warning("A decode engine was refused: %s.", error)
            return
        finally:
            self._handshakes.release()
        self._serve(PeerConnection(sock, messages.question_decoder))


def connect(address: tuple[str, int], secret: bytes) -> tuple[PeerConnection, int | None]:
    """Connect to a prefill engine; return also the open file of its KV pages, if shared.

    Raises:
        PeerLostError: the engine does not answer, or has another secret.
    """
    host, port = address
    if is_own_address(host):
        with suppress(OSError):
            return _connect_by_unix_socket(port)
    if not secret:
        reason = f"No prefill engine of this user answers at {host}:{port} on this machine; others "
        raise PeerLostError(reason + "need the same TWOSTROKE_PEER_SECRET here and there.")
    try:
        sock = socket.create_connection(address, timeout=_HANDSHAKE_TIMEOUT_S)
    except (OSError, UnicodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise PeerLostError(f"No prefill engine answers at {host}:{port} ({cause}).") from None
    try:
        introduce(sock, secret, _SIDES)
    except OSError:
        sock.close()
        reason = f"The program at {host}:{port} is not a prefill engine with the same secret: "
        raise PeerLostError(reason + "check TWOSTROKE_PEER_SECRET.") from None
    return PeerConnection(sock, messages.answer_decoder), None


def check_spec(connection: PeerConnection, spec: messages.KvCacheSpecMessage) -> int:
    """Check that a prefill engine's KV pages have the same spec; return how many it has.

    Raises:
        RefusedError: the engine has another spec or version.
        PeerLostError: as `PeerConnection.receive`.
    """
    connection.send(messages.PeerHello(messages.VERSION, spec))
    welcome = connection.receive()
    if isinstance(welcome, messages.Refused):
        raise RefusedError(welcome.reason)
    if not isinstance(welcome, messages.Welcome) or welcome.version != messages.VERSION:
        raise RefusedError("The prefill engine has another version of Twostroke.")
    if (difference := spec.difference(welcome.spec)) is not None:
        raise RefusedError(f"The prefill engine has {difference}.")
    return welcome.num_pages


def _connect_by_unix_socket(port: int) -> tuple[PeerConnection, int | None]:
    sock = socket.socket(socket.AF_UNIX)
    files: list[int] = []
    try:
        sock.settimeout(_HANDSHAKE_TIMEOUT_S)
        sock.connect(_unix_socket_name(port))
        _check_user(sock)
        count, files, _, _ = socket.recv_fds(sock, 1, 1)
        if not count:
            raise ConnectionError("the connection ended")
    except OSError:
        sock.close()
        raise
    return PeerConnection(sock, messages.answer_decoder), files[0] if files else None


def is_own_address(host: str) -> bool:
    """Whether an address belongs to this machine; of 127.0.0.0/8 only 127.0.0.1 does."""
    if host in _LOCAL_HOSTS or host.startswith("127."):
        return host in _LOCAL_HOSTS
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((host, 0))
        return True
    return False


def _unix_socket_name(port: int) -> str:
    return f"\0twostroke-prefill-{port}"


def _check_user(sock: socket.socket) -> None:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.getuid():
        raise PermissionError("it belongs to another user of this machine")


def _detect_lost_host(sock: socket.socket) -> None:
    """Make a TCP connection end if its other host is unreachable for `_SILENCE_S` seconds."""
    for level, name, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENCE_S - 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000),
    ):
        sock.setsockopt(level, name, value)
