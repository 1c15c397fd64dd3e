"""Moves KV pages by NIXL, in a separate process that can be killed.

NIXL can release a transfer in progress, but a peer process that was suspended still writes the
pages when it continues. Closing an agent makes the peer's process abort. So each connection has a
process in which only NIXL runs (`nixl_process.py`). This process maps the engine's pages into its
memory; once it has ended, no other engine can read or write the pages.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from twostroke.core import env
from twostroke.core.frozen import Frozen
from twostroke.core.transport.connection import Connection
from twostroke.core.transport.frames import ConnectionLostError, MessageFormat
from twostroke.engine.disaggregation.messages import NixlAddress  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGE: Final = "nixl_cu12"
INSTALL: Final = "NIXL is not installed: run pip install --no-deps nixl-cu12."
PROBE_BYTES: Final = 1 << 21  # size of the memory that is moved to measure a link
_ENTRY: Final = "twostroke.engine.disaggregation.nixl_process"
_OPEN_S: Final = 20.0  # maximum time until NIXL has started
_SEND_TIMEOUT_S: Final = 2  # maximum time in which the NIXL process must take a message
# UCX's shared memory is off: a peer could still write to it after the process was killed.
_ENVIRONMENT: Final = {"UCX_TLS": "^shm", "UCX_LOG_LEVEL": "fatal", "UCX_HANDLE_ERRORS": "none"}


# Messages to the NIXL process, which answers each with `Done`.


class ConnectAgents(Frozen, array_like=True, tag=1):
    """A message to an engine's NIXL process: connect to the NIXL process of another engine."""

    address: NixlAddress


class MovePages(Frozen, array_like=True, tag=2):
    """A message to a NIXL process: write this engine's pages to the other engine, or read from it.

    Without pages, the memory for probes is moved, to measure the link.
    """

    is_write: bool
    own_pages: list[int]
    peer_pages: list[int]


# Messages from the NIXL process.


class AgentOpened(Frozen, array_like=True, tag=1):
    """The first message of a NIXL process: it has started, and can be reached at this address."""

    address: NixlAddress


class Done(Frozen, array_like=True, tag=2):
    """A NIXL process's answer to a message: it was carried out, or failed because of `fault`."""

    fault: str | None = None


NixlRequest = ConnectAgents | MovePages
NixlReply = AgentOpened | Done

RECEIVED_BY_NIXL_PROCESS: Final[MessageFormat[NixlRequest]] = MessageFormat(NixlRequest)
_RECEIVED_BY_ENGINE: Final[MessageFormat[NixlReply]] = MessageFormat(NixlReply)


def obstacle() -> str | None:
    """Return the reason why NIXL cannot be used on this machine; None if it can."""
    return None if find_spec(PACKAGE) else INSTALL


class NixlProcessError(ConnectionLostError):
    """NIXL failed to move KV pages, and its process has ended."""


class NixlProcess:
    """A process that moves KV pages between this engine and another engine by NIXL.

    After an error the process has ended: nothing reads or writes the pages any more.

    Attributes:
        address: where the other engine's NIXL process reaches this one.
    """

    def __init__(self, page_file: int, num_pages: int, page_bytes: int) -> None:
        """Start the NIXL process; `page_file` is the open file of the engine's KV pages.

        The file has `num_pages` pages of `page_bytes` bytes.

        Raises:
            NixlProcessError: NIXL does not work here.
        """
        if (reason := obstacle()) is not None:
            raise NixlProcessError(reason)
        self._lock = threading.Lock()
        self._has_ended = False
        own_end: socket.socket | None = None
        try:
            own_end, child_end = socket.socketpair()
            with child_end:
                files = child_end.fileno(), page_file
                arguments = [str(number) for number in (*files, num_pages, page_bytes)]
                self._process = subprocess.Popen(  # noqa: S603 - this package's own program
                    [sys.executable, "-P", "-m", _ENTRY, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=files,
                    env=env.child_environment(_ENVIRONMENT),
                    start_new_session=True,
                )
        except OSError as error:
            if own_end is not None:
                own_end.close()
            raise NixlProcessError(f"NIXL's process cannot be started: {error}.") from None
        self._connection = Connection(own_end, _RECEIVED_BY_ENGINE, send_timeout_s=_SEND_TIMEOUT_S)
        reply = self._receive(_OPEN_S)
        if not isinstance(reply, AgentOpened):
            self.close()
            raise NixlProcessError(f"NIXL does not work here: {reply.fault}")
        self.address = reply.address

    def connect(self, address: NixlAddress, within_s: float) -> None:
        """Connect to the NIXL process at `address`, to exchange KV pages from now on.

        Raises:
            NixlProcessError: it failed or took longer than `within_s`.
        """
        self._request(ConnectAgents(address), within_s)

    def move(
        self,
        own_pages: Sequence[int],
        peer_pages: Sequence[int],
        within_s: float,
        *,
        is_write: bool,
    ) -> None:
        """Write own KV pages to the other engine's pages, or read them; wait for the end.

        `own_pages[i]` is copied to `peer_pages[i]` with `is_write`, otherwise the other way. Pages
        are given by their indices in the two engines' pools.

        Raises:
            NixlProcessError: the move failed or took longer than `within_s`.
        """
        self._request(MovePages(is_write, list(own_pages), list(peer_pages)), within_s)

    def probe(self, within_s: float, *, is_write: bool) -> None:
        """Move the memory for probes, to measure the link by NIXL; raises the errors of `move`.

        With `is_write` it is written to the other engine, otherwise it is read from there.
        """
        self._request(MovePages(is_write, [], []), within_s)

    def end(self) -> None:
        """Kill the NIXL process; a thread that waits for it gets an error.

        Any thread may call this.
        """
        with self._lock:
            if not self._has_ended:
                self._process.kill()

    def close(self) -> None:
        """Kill the NIXL process, and wait until it has ended."""
        self.end()
        with self._lock:
            if not self._has_ended:
                self._process.wait()
                self._has_ended = True
                self._connection.close()

    def _request(self, request: NixlRequest, within_s: float) -> None:
        try:
            self._connection.send(request)
        except ConnectionLostError:
            self.close()
            reason = f"NIXL's process has ended, or took no message for {_SEND_TIMEOUT_S} s."
            raise NixlProcessError(reason) from None
        reply = self._receive(within_s)
        if isinstance(reply, AgentOpened) or reply.fault is not None:
            self.close()
            fault = "an unexpected answer" if isinstance(reply, AgentOpened) else reply.fault
            raise NixlProcessError(f"NIXL moved no pages: {fault}.")

    def _receive(self, within_s: float) -> NixlReply:
        reason = f"NIXL took longer than {within_s:.1f} s."
        try:
            if (reply := self._connection.receive(within_s)) is not None:
                return reply
        except ConnectionLostError:
            reason = "NIXL's process has ended."
        self.close()
        raise NixlProcessError(reason)
