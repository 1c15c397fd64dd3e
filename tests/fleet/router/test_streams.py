"""Streams are passed on event by event, in few packets; unread ones and bodies are bounded."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from support.replicas import Exchange, FakeReplica, Loop, live_router
from support.waiting import wait_for
from twostroke.fleet.router.upstream import Address, ConnectionPool, UpstreamConnection
from twostroke.server.http.limits import RequestLimits

_CHAT = "/v1/chat/completions"
_BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def test_a_reader_that_does_not_read_holds_its_replica_back(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())
    num_sent = [0]

    async def much(exchange: Exchange) -> None:
        await exchange.begin_events()
        while num_sent[0] < 100_000_000:
            await exchange.chunk(b"data: " + b"x" * 100_000 + b"\n\n")
            num_sent[0] += 100_000

    def is_held_up() -> bool:
        before = num_sent[0]
        time.sleep(0.5)
        return num_sent[0] == before

    replica.behaviour = much
    with (
        live_router(replica.url) as router,
        socket.create_connection(("127.0.0.1", int(router.url.rpartition(":")[2]))) as client,
    ):
        body = json.dumps(_BODY).encode()
        head = f"POST {_CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: num_sent[0] > 0)
        wait_for(is_held_up)
        assert num_sent[0] < 30_000_000


def test_a_reader_that_never_reads_is_cut_off(fakes: Loop) -> None:
    replica, ends = fakes.start(FakeReplica()), list[str]()

    async def much(exchange: Exchange) -> None:
        await exchange.begin_events()
        try:
            while True:
                await exchange.chunk(b"data: " + b"x" * 100_000 + b"\n\n")
        except ConnectionError:
            ends.append(exchange.path)

    replica.behaviour = much
    with (
        live_router(replica.url, limits=RequestLimits(reader_timeout_s=0.2)) as router,
        socket.create_connection(("127.0.0.1", int(router.url.rpartition(":")[2]))) as client,
    ):
        head = f"POST {_CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: 2\r\n\r\n{{}}".encode())
        wait_for(lambda: ends == [_CHAT])
        wait_for(lambda: router.router.num_running == 0)
        received = b"".join(iter(lambda: client.recv(1 << 20), b""))
    assert received.startswith(b"HTTP/1.1 200")
    assert not received.endswith(b"0\r\n\r\n")


def test_events_stay_whole_and_in_order_for_a_reader_that_pauses(fakes: Loop) -> None:
    replica, rng = fakes.start(FakeReplica()), random.Random(1)
    all_events = b"".join(b"data: %d %s\n\n" % (n, b"x" * rng.randrange(9000)) for n in range(500))

    async def in_pieces(exchange: Exchange) -> None:
        await exchange.begin_events()
        at = 0
        while at < len(all_events):
            size = rng.choice((1, 7, 500, 3000, 20_000))
            await exchange.chunk(all_events[at : at + size])
            at += size
            if rng.random() < 0.1:
                await asyncio.sleep(0.001)
        await exchange.say(b"0\r\n\r\n")

    replica.behaviour = in_pieces
    with (
        live_router(replica.url) as router,
        httpx.stream("POST", router.url + _CHAT, json=_BODY, timeout=20, trust_env=False) as answer,
    ):
        time.sleep(0.5)
        chunks = []
        for chunk in answer.iter_raw():
            chunks.append(chunk)
            if rng.random() < 0.02:
                time.sleep(0.05)
    assert b"".join(chunks) == all_events


def test_a_stream_has_a_packet_for_its_head_and_first_event_and_one_for_its_end(
    fakes: Loop,
) -> None:
    replica, go_on = fakes.start(FakeReplica()), asyncio.Event()

    async def events(exchange: Exchange) -> None:
        await exchange.begin_events()
        await exchange.chunk(b"data: 1\n\n")
        await go_on.wait()
        await exchange.say(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

    replica.behaviour = events
    with (
        live_router(replica.url) as router,
        socket.create_connection(("127.0.0.1", int(router.url.rpartition(":")[2]))) as client,
    ):
        head = f"POST {_CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: 2\r\n\r\n{{}}".encode())
        first = client.recv(65536)
        fakes.loop.call_soon_threadsafe(go_on.set)
        assert first.startswith(b"HTTP/1.1 200")
        assert first.endswith(b"\r\n\r\n9\r\ndata: 1\n\n\r\n")
        assert client.recv(65536) == b"9\r\ndata: 2\n\n\r\n0\r\n\r\n"


class Silent(asyncio.Transport):
    """Sends nothing."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else default

    def setsockopt(self, *_: int) -> None:
        """Have no options."""

    def writelines(self, list_of_data: Any) -> None:
        """Write nowhere."""


def test_a_sink_gets_only_what_nothing_else_is_before() -> None:
    async def play() -> list[bytes]:
        connection, given_chunks = (
            UpstreamConnection(ConnectionPool(Address.of("http://a:1"))),
            list[bytes](),
        )
        connection.connection_made(Silent())
        requesting = asyncio.ensure_future(connection.request(b"GET"))
        await asyncio.sleep(0)
        connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        assert (await requesting).status == 200
        connection.sink = lambda data: given_chunks.append(data) is None
        connection.data_received(b"1\r\nb\r\n")
        assert await connection.read() == b"ab"
        reading = asyncio.ensure_future(connection.read())
        await asyncio.sleep(0)
        connection.data_received(b"1\r\nc\r\n")
        connection.data_received(b"1\r\nd\r\n0\r\n\r\n")
        assert (await reading, connection.is_read) == (b"d", True)
        return given_chunks

    assert asyncio.run(play()) == [b"c"]


def test_bodies_count_until_their_answers_begin(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())
    may_begin, has_begun, may_end = (threading.Event() for _ in range(3))

    async def answer(exchange: Exchange) -> None:
        await asyncio.to_thread(may_begin.wait, 10)
        await exchange.begin_events()
        await exchange.chunk(b'data: {"n":1}\n\n')
        await asyncio.to_thread(may_end.wait, 10)
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.say(b"0\r\n\r\n")

    def stream(url: str) -> int:
        with httpx.stream("POST", url + _CHAT, json=long, trust_env=False) as answer:
            for _ in answer.iter_bytes():
                has_begun.set()
            return answer.status_code

    replica.behaviour, long = answer, _BODY | {"user": "u" * 200_000}
    limits = RequestLimits(max_tenant_arriving_bytes=200_000)
    with live_router(replica.url, limits=limits) as router, ThreadPoolExecutor() as pool:
        first = pool.submit(stream, router.url)
        wait_for(lambda: bool(replica.seen))
        refused = httpx.post(router.url + _CHAT, json=long, trust_env=False)
        may_begin.set()
        assert has_begun.wait(60)
        second = pool.submit(stream, router.url)
        wait_for(lambda: len(replica.seen) == 2)
        may_end.set()
        assert (first.result(), second.result()) == (200, 200)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "bodies_limit")
