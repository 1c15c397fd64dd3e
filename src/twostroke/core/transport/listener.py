"""Authenticated connections between processes: `Listener` accepts them, `connect` makes them.

By TCP both processes prove that they know a secret (`handshake.py`). Processes of one user on one
machine can also use a Unix socket in the abstract name space, and need no secret: the kernel tells
each which user the other process has.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from contextlib import suppress
from queue import Empty, Queue
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from twostroke.core.frozen import Frozen
from twostroke.core.transport.handshake import handshake_as_client, handshake_as_listener

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.core.transport.connection import Connection

T = TypeVar("T")

HANDSHAKE_TIMEOUT_S: Final = 5.0
MAX_HANDSHAKES: Final = 32  # at the same time
_ACCEPT_PAUSE_S: Final = 0.05  # after a connection that could not be accepted
_MAX_REPORTED_STRANGERS: Final = 32
_LISTEN_BACKLOG: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")  # of a Unix socket's peer: process, user, group
_LOCAL_HOSTS: Final = ("127.0.0.1", "localhost", "::1")


class SharedSecret(Frozen):
    """A secret that processes must know to connect to each other.

    Attributes:
        value: the secret.
        sides: the names of the process that connects and of the process that listens.
        variable: the environment variable that has the secret.
        may_be_empty: whether processes may connect with an empty secret. Otherwise a process
            that listens without a secret refuses every TCP connection.
    """

    value: bytes
    sides: tuple[bytes, bytes]
    variable: str
    may_be_empty: bool = False


class LocalSocket(Frozen):
    """The name of a Unix socket, by which processes of one user on one machine can connect.

    Attributes:
        name: the beginning of the socket's name; the number of the TCP port follows.
        file: an open file that the listening process sends to each process that connects; None
            for none.
    """

    name: str
    file: int | None = None

    def address(self, port: int) -> str:
        """Return the address, in the abstract name space, of the Unix socket for a TCP port."""
        return f"\0{self.name}-{port}"


class AuthenticationError(PermissionError):
    """The process that listens at an address did not prove that it knows the secret."""


class Listener(Generic[T]):
    """Accepts connections of other processes, after they have proved that they know the secret.

    By a Unix socket, processes of the same user need no secret.

    Attributes:
        is_open: whether connections are accepted.
        port: the TCP port.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: SharedSecret,
        *,
        open_connection: Callable[[socket.socket], Connection[T]],
        on_refused: Callable[[str, OSError], None],
        serve: Callable[[Connection[T]], None] | None = None,
        local: LocalSocket | None = None,
        max_handshakes: int = MAX_HANDSHAKES,
    ) -> None:
        """Listen for connections at an address; port 0 takes a free port.

        Each connection is passed to `serve`, in a separate thread; without `serve`, `accept`
        returns the connections. `open_connection` makes a `Connection` of an accepted socket.
        `on_refused(host, error)` is called once for each host and kind of error, with a
        `PermissionError` if a process took part in the handshake and failed.

        Raises:
            OSError: the address is taken, or does not belong to this machine.
        """
        self.is_open = True
        self._secret = secret
        self._open_connection = open_connection
        self._on_refused = on_refused
        self._accepted: Queue[Connection[T]] = Queue()
        self._serve = serve or self._queue_connection
        self._local = local
        self._handshakes = threading.Semaphore(max_handshakes)
        self._strangers: set[tuple[str, bool]] = set()
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        tcp_socket = socket.socket(family)
        self._sockets = [tcp_socket]
        tcp_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tcp_socket.bind(address)
            self.port: int = tcp_socket.getsockname()[1]
            if local is not None:
                self._sockets.append(socket.socket(socket.AF_UNIX))
                self._sockets[-1].bind(local.address(self.port))
            for sock in self._sockets:
                sock.listen(_LISTEN_BACKLOG)
        except OSError:
            self.close()
            raise
        for sock in self._sockets:
            threading.Thread(
                target=self._accept, args=(sock,), name="twostroke-listen", daemon=True
            ).start()

    def accept(self, timeout_s: float) -> Connection[T] | None:
        """Return the next connection, if there is no `serve` function; None after the timeout."""
        with suppress(Empty):
            return self._accepted.get(timeout=timeout_s)
        return None

    def close(self) -> None:
        """Stop listening, and close connections that `accept` has not returned yet."""
        self.is_open = False
        for sock in self._sockets:
            with suppress(OSError):  # ends `accept` in the other threads
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._close_unaccepted()

    def _queue_connection(self, connection: Connection[T]) -> None:
        self._accepted.put(connection)
        if not self.is_open:  # closed meanwhile, so that the connection would never be accepted
            self._close_unaccepted()

    def _close_unaccepted(self) -> None:
        with suppress(Empty):
            while True:
                self._accepted.get_nowait().close()

    def _accept(self, listening: socket.socket) -> None:
        while self.is_open:
            try:
                sock, address = listening.accept()
            except OSError:  # closed, or this process may not open more files
                time.sleep(_ACCEPT_PAUSE_S)
                continue
            host = "this machine" if sock.family == socket.AF_UNIX else address[0]
            if not self._handshakes.acquire(blocking=False):
                sock.close()
                continue
            try:  # a process that sends nothing must not delay other connections
                threading.Thread(target=self._shake_hands, args=(sock, host), daemon=True).start()
            except RuntimeError:  # no more threads
                self._handshakes.release()
                sock.close()
                time.sleep(_ACCEPT_PAUSE_S)

    def _shake_hands(self, sock: socket.socket, host: str) -> None:
        try:
            sock.settimeout(HANDSHAKE_TIMEOUT_S)
            if sock.family == socket.AF_UNIX:
                _check_user(sock)
                file = self._local.file if self._local is not None else None
                files = [] if file is None else [file]
                socket.send_fds(sock, [bytes([len(files)])], files)
            elif not self._secret.value and not self._secret.may_be_empty:
                raise PermissionError(f"this engine has no {self._secret.variable}")
            else:
                handshake_as_listener(sock, self._secret.value, self._secret.sides)
            connection = self._open_connection(sock)
        except OSError as error:
            sock.close()
            self._report(host, error)
            return
        finally:
            self._handshakes.release()
        self._serve(connection)

    def _report(self, host: str, error: OSError) -> None:
        """Call `on_refused` for a refused connection, once for each host and kind of error."""
        stranger = host, isinstance(error, PermissionError)
        is_full = len(self._strangers) == _MAX_REPORTED_STRANGERS
        if self.is_open and not is_full and stranger not in self._strangers:
            self._strangers.add(stranger)
            self._on_refused(host, error)


def connect(address: tuple[str, int], secret: SharedSecret) -> socket.socket:
    """Connect by TCP to the `Listener` of another process, and check that it knows the secret.

    Raises:
        UnicodeError: the host is not a valid name.
        AuthenticationError: the process has another secret, or is no `Listener`.
        OSError: nothing answers at the address.
    """
    sock = socket.create_connection(address, timeout=HANDSHAKE_TIMEOUT_S)
    try:
        handshake_as_client(sock, secret.value, secret.sides)
    except OSError as error:
        sock.close()
        raise AuthenticationError(str(error)) from None
    return sock


def connect_locally(local: LocalSocket, port: int) -> tuple[socket.socket, int | None]:
    """Connect by Unix socket to the `Listener` of a process of the same user on this machine.

    `port` is the TCP port of that process. Returns the socket, and the file descriptor that the
    process shares, None if it shares none.

    Raises:
        OSError: no such process answers.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        sock.connect(local.address(port))
        _check_user(sock)
        count, files, _, _ = socket.recv_fds(sock, 1, 1)
        if not count:
            raise ConnectionError("the connection ended")
    except OSError:
        sock.close()
        raise
    return sock, files[0] if files else None


def is_own_address(host: str) -> bool:
    """Return whether a host name or address belongs to this machine.

    Of the loopback addresses 127.0.0.0/8, only 127.0.0.1 counts.
    """
    if host in _LOCAL_HOSTS or host.startswith("127."):
        return host in _LOCAL_HOSTS
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((host, 0))
        return True
    return False


def _check_user(sock: socket.socket) -> None:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.getuid():
        raise PermissionError("it belongs to another user of this machine")
