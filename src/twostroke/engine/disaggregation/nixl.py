"""Moves pages by NIXL, in a process that can be ended.

NIXL releases a transfer that is in progress, and the pages are written all the same once a peer
that was stopped goes on; closing an agent instead lets the peer's process abort. So each connection
has a process, the carrier (`carrier.py`), in which nothing but NIXL runs. It maps the engine's
pages, and once it has been ended nothing can read or write them from outside.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core import env
from twostroke.core.frozen import Frozen
from twostroke.core.transport.frames import WireError, frame, read_frame
from twostroke.engine.disaggregation.connection import PeerLostError
from twostroke.engine.disaggregation.messages import NixlAddress  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGE: Final = "nixl_cu12"
INSTALL: Final = "NIXL is not installed: run pip install --no-deps nixl-cu12."
PROBE_BYTES: Final = 1 << 21  # of the memory that is moved to measure a link
_ENTRY: Final = "twostroke.engine.disaggregation.nixl_process"
_OPEN_S: Final = 20.0
# Shared memory of UCX could be written by a peer after the carrier has been ended.
_ENVIRONMENT: Final = {"UCX_TLS": "^shm", "UCX_LOG_LEVEL": "fatal", "UCX_HANDLE_ERRORS": "none"}


# To a carrier, which answers each with `Done`.


class Meet(Frozen, array_like=True, tag=1):
    """Another engine's carrier: the one with which pages are exchanged."""

    place: NixlAddress


class Move(Frozen, array_like=True, tag=2):
    """Write pages there, or read them here; without pages, the memory for probes."""

    is_write: bool
    own: list[int]
    theirs: list[int]


class AgentOpened(Frozen, array_like=True, tag=1):
    """The first message of a carrier."""

    place: NixlAddress


class Done(Frozen, array_like=True, tag=2):
    """A question was done, or failed with this reason."""

    fault: str | None = None


questions: Final[msgspec.msgpack.Decoder[Meet | Move]] = msgspec.msgpack.Decoder(Meet | Move)
answers: Final[msgspec.msgpack.Decoder[AgentOpened | Done]] = msgspec.msgpack.Decoder(
    AgentOpened | Done
)
_encoder: Final = msgspec.msgpack.Encoder()


def pack(message: Meet | Move | AgentOpened | Done) -> bytes:
    """Return a message as a frame."""
    return frame(_encoder.encode(message))


def obstacle() -> str | None:
    """Return why NIXL cannot be used here, or None."""
    return None if find_spec(PACKAGE) else INSTALL


class NixlProcessError(PeerLostError):
    """NIXL did not move pages, and its process has ended."""


class NixlProcess:
    """A process that moves pages between an engine's memory and that of another engine.

    After an error it has ended: nothing reads or writes the pages any more.
    """

    def __init__(self, memory: int, num_pages: int, page_bytes: int) -> None:
        """Start it; `memory` is the open file of the engine's pages.

        Raises:
            CarrierError: NIXL does not work here.
        """
        if (reason := obstacle()) is not None:
            raise NixlProcessError(reason)
        self._lock = threading.Lock()
        self._is_ended = False
        ours: socket.socket | None = None
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                files = theirs.fileno(), memory
                given = map(str, (*files, num_pages, page_bytes))
                self._process = subprocess.Popen(  # noqa: S603 - this package's own program
                    [sys.executable, "-P", "-m", _ENTRY, *given],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=files,
                    env=env.child_environment(_ENVIRONMENT),
                    start_new_session=True,
                )
        except OSError as error:
            if ours is not None:
                ours.close()
            raise NixlProcessError(f"NIXL's process cannot be started: {error}.") from None
        self._socket = ours
        self._file = ours.makefile("rb")
        answer = self._receive(_OPEN_S)
        if not isinstance(answer, AgentOpened):
            self.close()
            raise NixlProcessError(f"NIXL does not work here: {answer.fault}")
        self.place = answer.place

    def meet(self, place: NixlAddress, within_s: float) -> None:
        """Exchange pages with the carrier at `place`; errors as `move`."""
        self._ask(Meet(place), within_s)

    def move(
        self, own: Sequence[int], theirs: Sequence[int], within_s: float, *, is_write: bool
    ) -> None:
        """Write own pages to the other engine's, or read these, and wait until that has ended.

        Raises:
            CarrierError: it failed or took longer, and the carrier was ended.
        """
        self._ask(Move(is_write, list(own), list(theirs)), within_s)

    def probe(self, within_s: float, *, is_write: bool) -> None:
        """Move the memory for probes; errors as `move`."""
        self._ask(Move(is_write, [], []), within_s)

    def end(self) -> None:
        """End the process; a thread that waits for it gets an error. Any thread may."""
        with self._lock:
            if not self._is_ended:
                self._process.kill()

    def close(self) -> None:
        """End it, and wait until it has ended."""
        self.end()
        with self._lock:
            if not self._is_ended:
                self._process.wait()
                self._is_ended = True
                self._file.close()
                self._socket.close()

    def _ask(self, question: Meet | Move, within_s: float) -> None:
        try:
            self._socket.sendall(pack(question))
        except OSError:
            self.close()
            raise NixlProcessError("NIXL's process has ended.") from None
        answer = self._receive(within_s)
        if isinstance(answer, AgentOpened) or answer.fault is not None:
            self.close()
            fault = "an answer to nothing" if isinstance(answer, AgentOpened) else answer.fault
            raise NixlProcessError(f"NIXL moved no pages: {fault}.")

    def _receive(self, within_s: float) -> Any:
        try:
            self._socket.settimeout(within_s)
            return read_frame(self._file, answers)
        except TimeoutError:
            reason = f"NIXL took longer than {within_s:.1f} s."
        except (WireError, OSError, ValueError):
            reason = "NIXL's process has ended."
        self.close()
        raise NixlProcessError(reason)
