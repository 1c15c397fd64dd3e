"""A connection between two engines, and how it begins.

Engines of one machine and user find each other by a socket in the abstract name space, and need no
secret; the kernel says whose process is at the other end. All others connect by TCP, and each must
prove that it knows the secret (`TWOSTROKE_PEER_SECRET`).
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

_CREDENTIALS: Final = struct.Struct("3i")
_SIDES: Final = (b"decode", b"prefill")
_PATIENCE_S: Final = 5.0  # with a peer that has not proved itself
_MOST_STRANGERS: Final = 32  # at once
_PAUSE_S: Final = 0.05
_STALL_S: Final = 10  # that a peer may leave unread what was sent
_SILENCE_S: Final = 4  # of the other host, after which the connection ends
_MOST_BUFFERS: Final = 64  # of one call
_LOCAL_HOSTS: Final = ("127.0.0.1", "localhost", "::1")


class PeerLostError(BackendError):
    """The other engine is gone, or sent what is not a message."""


class RefusedError(PeerLostError):
    """The engines cannot use each other's pages."""


class PeerConnection:
    """Sends and receives messages. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        """Take over a connected socket, whose other end has proved itself."""
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _STALL_S, 0))
        self.is_local = sock.family == socket.AF_UNIX
        if not self.is_local:
            _watch(sock)
        self._socket, self._decoder = sock, decoder
        self._file = cast("BufferedReader", sock.makefile("rb", buffering=1 << 16))
        self._lock = threading.Lock()

    def send(self, message: Question | Answer, pages: Iterable[memoryview[Any]] = ()) -> None:
        """Send a message, and pages after it, which are read some at a time.

        Raises:
            PeerLostError: the other end is gone, or has not read for long.
        """
        parts = [memoryview(frame(messages.encoder.encode(message)))]
        rest = iter(pages)
        try:
            with self._lock:
                while parts := [*parts, *islice(rest, _MOST_BUFFERS - len(parts))]:
                    sent = self._socket.sendmsg(parts, (), socket.MSG_NOSIGNAL)
                    while parts and sent >= len(parts[0]):
                        sent -= len(parts.pop(0))
                    if sent:
                        parts[0] = parts[0][sent:]
        except (OSError, ValueError) as error:
            self.cut()
            raise PeerLostError(f"The connection ended: {error}.") from None

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            PeerLostError: the other end is gone, or what it sent is not a message.
        """
        try:
            return read_frame(self._file, self._decoder)
        except WireError as error:
            raise PeerLostError(str(error)) from None
        except (OSError, ValueError) as error:
            raise PeerLostError(f"The connection ended: {error}.") from None

    def receive_into(self, view: memoryview[Any]) -> None:
        """Fill a page with what follows a message; errors as `receive`."""
        try:
            count = self._file.readinto(view)
        except (OSError, ValueError) as error:
            raise PeerLostError(f"The connection ended: {error}.") from None
        if count != len(view):
            raise PeerLostError("The connection ended.")

    def cut(self) -> None:
        """End the connection, for both ends and all threads."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it, after the thread that receives has ended."""
        self.cut()
        self._file.close()
        self._socket.close()


class PeerListener:
    """Where decode engines connect to a prefill engine."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        memory: int | None,
        serve: Callable[[PeerConnection], None],
    ) -> None:
        """Listen, and call `serve` in a thread for each engine that has proved itself.

        Engines of this machine and user get the open file `memory`. Without a secret no others are
        admitted. Port 0 takes a free one.

        Raises:
            PortInUseError: the address is taken, or not of this machine.
        """
        self._secret, self._memory, self._serve = secret, memory, serve
        self.is_open, self._room = True, threading.Semaphore(_MOST_STRANGERS)
        host, port = address
        local = socket.socket(socket.AF_UNIX)
        others = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._sockets = [others, local]
        others.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            others.bind(address)
            self.port: int = others.getsockname()[1]
            local.bind(_local_name(self.port))
        except OSError as error:
            self.close()
            why = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                why = "another program has this port (--peer-address, peer_port of a fleet)"
            reason = f"Decode engines cannot connect to {host}:{port}: {why}."
            raise PortInUseError(reason) from None
        for sock in self._sockets:
            sock.listen(16)
            threading.Thread(
                target=self._accept, args=(sock,), name="twostroke-peers", daemon=True
            ).start()

    def close(self) -> None:
        """Accept no more engines."""
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
                time.sleep(_PAUSE_S)
                continue
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(sock,), daemon=True).start()
            else:
                sock.close()

    def _greet(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(_PATIENCE_S)
            if sock.family == socket.AF_UNIX:
                _check_user(sock)
                files = [] if self._memory is None else [self._memory]
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
            self._room.release()
        self._serve(PeerConnection(sock, messages.questions))


def connect(address: tuple[str, int], secret: bytes) -> tuple[PeerConnection, int | None]:
    """Connect to a prefill engine; return also the open file of its memory, if it is shared.

    Raises:
        PeerLostError: it does not answer, or has another secret.
    """
    host, port = address
    if is_own(host):
        with suppress(OSError):
            return _connect_locally(port)
    if not secret:
        reason = f"No prefill engine of this user answers at {host}:{port} on this machine; others "
        raise PeerLostError(reason + "need the same TWOSTROKE_PEER_SECRET here and there.")
    try:
        sock = socket.create_connection(address, timeout=_PATIENCE_S)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise PeerLostError(f"No prefill engine answers at {host}:{port} ({why}).") from None
    try:
        introduce(sock, secret, _SIDES)
    except OSError:
        sock.close()
        reason = f"What listens at {host}:{port} is not a prefill engine with the same secret: "
        raise PeerLostError(reason + "check TWOSTROKE_PEER_SECRET.") from None
    return PeerConnection(sock, messages.answers), None


def meet(connection: PeerConnection, kind: messages.KvCacheSpecMessage) -> int:
    """See that a prefill engine has pages of this kind, and return how many.

    Raises:
        RefusedError: it has others.
        PeerLostError: as `PeerConnection.receive`.
    """
    connection.send(messages.PeerHello(messages.VERSION, kind))
    welcome = connection.receive()
    if isinstance(welcome, messages.Refused):
        raise RefusedError(welcome.reason)
    if not isinstance(welcome, messages.Welcome) or welcome.version != messages.VERSION:
        raise RefusedError("The prefill engine has another version of Twostroke.")
    if (words := kind.difference(welcome.kind)) is not None:
        raise RefusedError(f"The prefill engine has {words}.")
    return welcome.num_pages


def _connect_locally(port: int) -> tuple[PeerConnection, int | None]:
    sock = socket.socket(socket.AF_UNIX)
    files: list[int] = []
    try:
        sock.settimeout(_PATIENCE_S)
        sock.connect(_local_name(port))
        _check_user(sock)
        count, files, _, _ = socket.recv_fds(sock, 1, 1)
        if not count:
            raise ConnectionError("the connection ended")
    except OSError:
        sock.close()
        raise
    return PeerConnection(sock, messages.answers), files[0] if files else None


def is_own(host: str) -> bool:
    """Whether an address is this machine's; loopback addresses beyond the usual are not counted."""
    if host in _LOCAL_HOSTS or host.startswith("127."):
        return host in _LOCAL_HOSTS
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((host, 0))
        return True
    return False


def _local_name(port: int) -> str:
    return f"\0twostroke-prefill-{port}"


def _check_user(sock: socket.socket) -> None:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.getuid():
        raise PermissionError("it belongs to another user of this machine")


def _watch(sock: socket.socket) -> None:
    """Let the connection end after the other host has been unreachable for some seconds."""
    for level, name, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENCE_S - 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000),
    ):
        sock.setsockopt(level, name, value)
