"""The process in which NIXL runs (see nixl.py).

It is started as `python -m twostroke.engine.disaggregation.nixl_process`.

Arguments: a socket, the open file of the engine's pages, their number, and the bytes of one.
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

from twostroke.core.process_tuning import run_at_once
from twostroke.core.transport.frames import WireError, read_frame
from twostroke.engine.disaggregation.messages import NixlAddress
from twostroke.engine.disaggregation.nixl import (
    PROBE_BYTES,
    AgentOpened,
    Done,
    Meet,
    Move,
    pack,
    questions,
)

if TYPE_CHECKING:
    from types import ModuleType

_IDLE_US: Final = 2_000  # after which UCX's thread looks again, besides when something arrives
_TICK_S: Final = 2e-4
_STUCK_S: Final = 60  # in one call of NIXL, after which the system ends the process


class _Agent:
    """NIXL with the UCX backend, and the memory that it may move."""

    def __init__(self, memory: int, num_pages: int, page_bytes: int) -> None:
        from nixl_cu12 import _bindings

        self._nixl: ModuleType = _bindings
        config = _bindings.nixlAgentConfig()
        config.useProgThread, config.useListenThread = True, False
        config.pthrDelay = _IDLE_US
        config.syncMode = _bindings.NIXL_THREAD_SYNC_STRICT
        self._agent = _bindings.nixlAgent(f"twostroke-{os.urandom(8).hex()}", config)
        self._backends = [self._agent.createBackend("UCX", {})]
        self._page_bytes = page_bytes
        self._maps = mmap.mmap(memory, num_pages * page_bytes), mmap.mmap(-1, PROBE_BYTES)
        pages, probe = (ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in self._maps)
        memory_list = _bindings.nixlRegDList(_bindings.DRAM_SEG)
        for address, one in zip((pages, probe), self._maps, strict=True):
            memory_list.append((address, len(one), 0, b""))
        self._agent.registerMem(memory_list, self._backends)
        self.place = NixlAddress(self._agent.getLocalMD(), pages, probe)
        self._other, self._name = self.place, ""

    def meet(self, place: NixlAddress) -> None:
        """Connect to another agent."""
        name = self._agent.loadRemoteMD(place.metadata)
        self._name = name.decode() if isinstance(name, bytes) else name
        self._other = place
        self._agent.makeConnection(self._name, self._backends)

    def begin(self, move: Move) -> int:
        """Begin to move, and return the request."""
        size, operation = self._page_bytes, self._nixl.NIXL_READ
        if move.is_write:
            operation = self._nixl.NIXL_WRITE
        own, theirs = (
            self._list([(place.pages + page * size, size) for page in pages])
            if move.own
            else self._list([(place.probe, PROBE_BYTES)])
            for place, pages in ((self.place, move.own), (self._other, move.theirs))
        )
        request: int = self._agent.createXferReq(
            operation, own, theirs, self._name, "", self._backends
        )
        self._agent.postXferReq(request)
        return request

    def has_ended(self, request: int) -> bool:
        """Whether it has moved all; NIXL's error if that failed."""
        if self._agent.getXferStatus(request) == self._nixl.NIXL_IN_PROG:
            return False
        self._agent.releaseXferReq(request)
        return True

    def _list(self, parts: list[tuple[int, int]]) -> Any:
        """Return NIXL's form of (address, bytes)."""
        found = self._nixl.nixlXferDList(self._nixl.DRAM_SEG)
        for address, size in parts:
            found.append((address, size, 0))
        return found


def _do(agent: _Agent, question: Meet | Move, sock: socket.socket) -> None:
    """Do what the engine asks, and end if it ends."""
    if isinstance(question, Meet):
        agent.meet(question.place)
        return
    request = agent.begin(question)
    while not agent.has_ended(request):
        if select.select([sock], [], [], _TICK_S)[0]:
            os._exit(0)  # the engine has ended: it asks nothing before it has an answer


def main() -> None:
    """Answer an engine until it ends."""
    number, *given = map(int, sys.argv[1:])
    sock = socket.socket(fileno=number)
    file = sock.makefile("rb")
    agent: _Agent | None = None
    while True:
        answer: AgentOpened | Done = Done()
        try:
            if agent is None:
                signal.alarm(_STUCK_S)
                agent = _Agent(*given)
                for thread in Path("/proc/self/task").iterdir():
                    run_at_once(int(thread.name))  # engines compute on all cores
                answer = AgentOpened(agent.place)
            else:
                question = read_frame(file, questions)
                signal.alarm(_STUCK_S)
                _do(agent, question, sock)
        except (WireError, ConnectionError):
            os._exit(0)  # the engine has ended
        except Exception as error:  # noqa: BLE001 - NIXL's have no common type
            answer = Done(f"{type(error).__name__}: {error}")
        signal.alarm(0)
        with suppress(ConnectionError):
            sock.sendall(pack(answer))
        if agent is None:
            os._exit(1)


if __name__ == "__main__":
    main()
