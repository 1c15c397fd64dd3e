"""The program of a NIXL process, which moves pages for an engine (see nixl.py).

It is started as `python -m twostroke.engine.disaggregation.nixl_process`.

Arguments: two file descriptors, of a socket to the engine and of the engine's page memory; the
number of pages; and the bytes of a page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.process_tuning import request_short_time_slices
from twostroke.core.transport.connection import Connection
from twostroke.core.transport.frames import ConnectionLostError
from twostroke.engine.disaggregation.messages import NixlAddress
from twostroke.engine.disaggregation.nixl import (
    PROBE_BYTES,
    RECEIVED_BY_NIXL_PROCESS,
    AgentOpened,
    ConnectAgents,
    Done,
    MovePages,
    NixlRequest,
)

if TYPE_CHECKING:
    from types import ModuleType

_UCX_POLL_US: Final = 2_000  # UCX's thread polls at this interval, and wakes on arrivals
_POLL_S: Final = 2e-4
_MAX_CALL_S: Final = 60  # after which the system kills a process that hangs in a NIXL call


def main() -> None:
    """Carry out the messages of the engine that started this process, until the engine ends."""
    socket_file, page_file, num_pages, page_bytes = map(int, sys.argv[1:])
    connection = Connection(socket.socket(fileno=socket_file), RECEIVED_BY_NIXL_PROCESS)
    agent: _Agent | None = None
    while True:
        reply: AgentOpened | Done = Done()
        try:
            if agent is None:
                signal.alarm(_MAX_CALL_S)
                agent = _Agent(page_file, num_pages, page_bytes)
                for thread in Path("/proc/self/task").iterdir():
                    request_short_time_slices(int(thread.name))  # engines compute on all cores
                reply = AgentOpened(agent.address)
            else:
                request = connection.receive()
                signal.alarm(_MAX_CALL_S)
                _carry_out(agent, request, connection)
        except ConnectionLostError:
            os._exit(0)  # the engine has ended
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common type
            reply = Done(f"{type(error).__name__}: {error}")
        signal.alarm(0)
        with suppress(ConnectionLostError):
            connection.send(reply)
        if agent is None:
            os._exit(1)


def _carry_out(agent: _Agent, request: NixlRequest, connection: Connection[NixlRequest]) -> None:
    """Carry out one message of the engine and answer it; exit if the engine ends meanwhile."""
    if isinstance(request, ConnectAgents):
        agent.connect(request.address)
        return
    transfer = agent.begin(request)
    while not agent.has_ended(transfer):
        if select.select([connection], [], [], _POLL_S)[0]:
            os._exit(0)  # the engine has ended, since it sends nothing before it has the answer


class _Agent:
    """A NIXL agent with the UCX backend, and the engine's memory that it may move.

    Attributes:
        address: where other agents reach this one.
    """

    def __init__(self, page_file: int, num_pages: int, page_bytes: int) -> None:
        from nixl_cu12 import _bindings

        self._nixl: ModuleType = _bindings
        config = _bindings.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = _UCX_POLL_US
        config.syncMode = _bindings.NIXL_THREAD_SYNC_STRICT
        self._agent = _bindings.nixlAgent(f"twostroke-{os.urandom(8).hex()}", config)
        self._backends = [self._agent.createBackend("UCX", {})]
        self._page_bytes = page_bytes
        self._maps = mmap.mmap(page_file, num_pages * page_bytes), mmap.mmap(-1, PROBE_BYTES)
        pages, probe = (ctypes.addressof(ctypes.c_char.from_buffer(map_)) for map_ in self._maps)
        memory_list = _bindings.nixlRegDList(_bindings.DRAM_SEG)
        for address, map_ in zip((pages, probe), self._maps, strict=True):
            memory_list.append((address, len(map_), 0, b""))
        self._agent.registerMem(memory_list, self._backends)
        self.address = NixlAddress(self._agent.getLocalMD(), pages, probe)
        self._peer_address = self.address
        self._peer_name = ""

    def connect(self, address: NixlAddress) -> None:
        """Connect to the NIXL agent of another engine."""
        name = self._agent.loadRemoteMD(address.metadata)
        self._peer_name = name.decode() if isinstance(name, bytes) else name
        self._peer_address = address
        self._agent.makeConnection(self._peer_name, self._backends)

    def begin(self, move: MovePages) -> int:
        """Begin to move KV pages, or the memory for probes; return NIXL's number of the request."""
        operation = self._nixl.NIXL_WRITE if move.is_write else self._nixl.NIXL_READ
        is_probe = not move.own_pages
        request: int = self._agent.createXferReq(
            operation,
            self._descriptors(self.address, move.own_pages, is_probe=is_probe),
            self._descriptors(self._peer_address, move.peer_pages, is_probe=is_probe),
            self._peer_name,
            "",
            self._backends,
        )
        self._agent.postXferReq(request)
        return request

    def has_ended(self, request: int) -> bool:
        """Whether a NIXL request is complete; raises NIXL's error if it failed."""
        if self._agent.getXferStatus(request) == self._nixl.NIXL_IN_PROG:
            return False
        self._agent.releaseXferReq(request)
        return True

    def _descriptors(self, address: NixlAddress, pages: list[int], *, is_probe: bool) -> Any:
        """Return NIXL's list of the memory of KV pages, or of the memory for probes."""
        descriptors = self._nixl.nixlXferDList(self._nixl.DRAM_SEG)
        if is_probe:
            descriptors.append((address.probe, PROBE_BYTES, 0))
            return descriptors
        for page in pages:
            start = address.pages + page * self._page_bytes
            descriptors.append((start, self._page_bytes, 0))
        return descriptors


if __name__ == "__main__":
    main()
