"""Measure the time of one message between processes, from one end of a connection to the other.

Run it with `python -m benchmarks.engine.messages`. Both ends are in this process, so a time is that
of encoding, of two system calls and of decoding. The fastest of many short runs is shown, which
other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import socket
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.common.report import positive
from twostroke.backends.parallel.connection import open_connection
from twostroke.backends.parallel.rank_messages import RankHeartbeat
from twostroke.core.request import NO_HINTS
from twostroke.core.sampling import SamplingParams
from twostroke.core.transport.connection import Connection
from twostroke.core.transport.event_loop import EventLoopConnection
from twostroke.engine.client import Caller
from twostroke.engine.disaggregation import messages as peer_messages
from twostroke.engine.output import Output
from twostroke.engine.process import messages as wire

if TYPE_CHECKING:
    from collections.abc import Callable

_RUN_S = 0.002
_PAGE_BYTES = 200_000
_NUM_PAGES = 64


def _measure(name: str, pass_message: Callable[[], object], num_runs: int) -> None:
    pass_message()
    start_s = time.perf_counter()
    pass_message()
    count = max(1, int(_RUN_S / (time.perf_counter() - start_s)))
    times_s = []
    for _ in range(num_runs):
        start_s = time.perf_counter()
        for _ in range(count):
            pass_message()
        times_s.append((time.perf_counter() - start_s) / count)
    print(f"{name:40} {min(times_s) * 1e6:10.2f} us")


def _engine_process(num_runs: int) -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    engine = Connection(ours, wire.RECEIVED_BY_ENGINE)
    server = EventLoopConnection(theirs, wire.RECEIVED_BY_SERVER)

    def pass_message(message: wire.EngineMessage) -> None:
        engine.send(message)
        while not list(server.receive_arrived()):
            pass

    for count in (1, 256):
        outputs = [(index, Output(0, "hello", (1234,))) for index in range(count)]
        batch = wire.OutputBatch(outputs)
        _measure(f"outputs of {count} streams", partial(pass_message, batch), num_runs)
    prompt = wire.Generate(1, [list(range(500))], SamplingParams(), Caller(), NO_HINTS)

    def pass_prompt() -> None:
        server.post(prompt)
        deque(engine.receive_arrived(1.0), 1)

    _measure("a prompt of 500 tokens", pass_prompt, num_runs)


def _ranks(num_runs: int) -> None:
    rank0, rank = map(open_connection, socket.socketpair())

    def pass_step(step: bytes) -> None:
        rank0.send_bytes(step)
        rank.receive()

    def pass_heartbeat() -> None:
        rank.try_send(RankHeartbeat(waits=True, progress=1))
        rank0.receive()

    for size in (300, 20_000):
        step = bytes(size)
        _measure(f"a step of {size} bytes for a rank", partial(pass_step, step), num_runs)
    _measure("a rank's heartbeat", pass_heartbeat, num_runs)


def _peers(num_runs: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    prefill = Connection(sock, peer_messages.RECEIVED_BY_PREFILL)
    decode = Connection(accepted, peer_messages.RECEIVED_BY_DECODE)
    offer = peer_messages.Offer(1, 2, [(0, index, index) for index in range(8)])
    page, target = (memoryview(bytearray(_PAGE_BYTES)) for _ in range(2))

    def pass_offer() -> None:
        prefill.send(offer)
        decode.receive()

    def receive_pages() -> None:
        decode.receive()
        for _ in range(_NUM_PAGES):
            decode.receive_into(target)

    def pass_pages() -> None:
        receiver = threading.Thread(target=receive_pages)
        receiver.start()
        content = peer_messages.Content(1, is_valid=True, num_bytes=_NUM_PAGES * _PAGE_BYTES)
        prefill.send(content, [page] * _NUM_PAGES)
        receiver.join()

    _measure("an offer of 8 KV pages", pass_offer, num_runs)
    _measure(f"{_NUM_PAGES} KV pages of {_PAGE_BYTES} bytes", pass_pages, num_runs)


def main() -> None:
    """Measure messages of each kind of connection, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=positive, default=300, help="short runs of each message")
    num_runs = parser.parse_args().runs
    for measure in (_engine_process, _ranks, _peers):
        measure(num_runs)


if __name__ == "__main__":
    main()
