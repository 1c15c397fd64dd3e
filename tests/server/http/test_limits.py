"""Hostile requests, byte by byte: their size, nesting and slowness, and bytes that are not HTTP."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from support.servers import LiveServer, chat_body, live_server, post_bytes, read_all
from support.waiting import wait_for
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.http.limits import RequestLimits
from twostroke.server.http.server import LoopExceptionHandler
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    limits = RequestLimits(
        max_body_bytes=10_000,
        max_header_bytes=2_000,
        header_timeout_s=0.5,
        body_timeout_s=0.5,
    )
    options = ServeOptions(drain_s=1, limits=limits)
    with live_server(tmp_path_factory.mktemp("strict"), options) as server:
        yield server
        assert server.chat(max_tokens=1).status_code == 200
        server.wait_idle()


def test_announced_oversize_is_refused_without_being_read(strict: LiveServer) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = talk(strict, head.encode() + b"Content-Length: 9999999999\r\n\r\n")
    assert b"413" in answer.split(b"\r\n")[0]
    assert b"10000 bytes" in answer


def test_chunked_oversize_is_refused_while_it_is_read(strict: LiveServer) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunk = b"1000\r\n" + b" " * 0x1000 + b"\r\n"
    answer = talk(strict, head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 4)
    assert b"413" in answer.split(b"\r\n")[0]
    head += "Connection: close\r\n"
    for size, status in ((10_000, b"400"), (10_001, b"413")):
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (size, b"x" * size)
        answer = talk(strict, head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + body)
        assert status in answer.split(b"\r\n")[0]


def test_body_at_the_limit_is_read(strict: LiveServer) -> None:
    body = b'{"messages":[],"user":"' + b"x" * 10_000
    body = body[: 10_000 - 2] + b'"}'
    response = strict.http.post(PATH, content=body, headers=JSON)
    assert response.json()["error"]["param"] == "messages"
    response = strict.http.post(PATH, content=body + b" ", headers=JSON)
    assert response.status_code == 413


def test_slow_body_times_out(strict: LiveServer) -> None:
    request = post_bytes(PATH, chat_body())
    connection = strict.connect()
    start_s = time.monotonic()
    connection.sendall(request[:-20])
    answer = drip(connection, request[-20:-1])
    assert b"408" in answer.split(b"\r\n")[0]
    assert 0.4 < time.monotonic() - start_s < 50


@pytest.mark.parametrize("keep_alive", [False, True])
def test_slow_headers_time_out(strict: LiveServer, keep_alive: bool) -> None:
    connection = strict.connect()
    if keep_alive:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = b""
        while not received.endswith(b"}"):
            received += connection.recv(4096)
    start_s = time.monotonic()
    assert drip(connection, b"GET /health HTTP/1.1\r\nX-Slow: " + b"a" * 100) == b""
    assert 0.4 < time.monotonic() - start_s < 50


def test_silent_connection_times_out(strict: LiveServer) -> None:
    connection = strict.connect()
    assert drip(connection, b"") == b""


def test_a_slow_client_does_not_slow_a_quick_one(strict: LiveServer) -> None:
    slow = [strict.connect() for _ in range(50)]
    for connection in slow:
        connection.sendall(b"POST / HTTP/1.1\r\nHost")
    assert strict.chat(max_tokens=1).status_code == 200
    for connection in slow:
        connection.close()


def test_too_many_headers_are_refused(strict: LiveServer) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: " + b"b" * 3000
    assert b"431" in talk(strict, head + b"\r\n\r\n").split(b"\r\n")[0]
    assert b"400" in talk(strict, head).split(b"\r\n")[0]


def test_a_chunk_ends_with_a_line_break(strict: LiveServer) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    for end in (b"XX", b"\n\n", b""):
        answer = talk(strict, head.encode() + b"2\r\n{}" + end + b"0\r\n\r\n")
        assert b"400" in answer.split(b"\r\n")[0]
        assert b"invalid_request" not in answer  # nobody has read it


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked", b"chunked "])
def test_a_body_with_two_lengths_is_refused_and_the_rest_is_not_read(
    strict: LiveServer, coding: bytes
) -> None:
    hidden = b"GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"
    lengths = b"Content-Length: %d\r\nTransfer-Encoding: %b\r\n" % (5 + len(hidden), coding)
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = talk(strict, head.encode() + lengths + b"\r\n0\r\n\r\n" + hidden)
    assert b"400" in answer.split(b"\r\n")[0]
    assert b"ambiguous_length" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01\x00\x01", b"GET\r\n\r\n", b"\x00" * 100, b"hello\n\n"]
)
def test_invalid_http_is_refused(strict: LiveServer, garbage: bytes) -> None:
    answer = talk(strict, garbage)
    assert answer == b"" or b"400" in answer.split(b"\r\n")[0]


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
def test_deep_json_is_refused(server: LiveServer, opening: bytes) -> None:
    deep = b'{"metadata":' + opening * 200_000
    error = server.http.post(PATH, content=deep, headers=JSON).json()["error"]
    assert error["code"] == "invalid_json"
    assert "at most 64" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"{",
        b'{"messages": [}',
        b"[]",
        b"null",
        b"5",
        b'"x"',
        b"\xff\xfe",
        b'{"messages":[]} {}',
    ],
)
def test_body_must_be_a_json_object(server: LiveServer, body: bytes) -> None:
    response = server.http.post(PATH, content=body, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["code"] in {"invalid_json", "invalid_value"}


def test_broken_utf_8_is_refused(server: LiveServer) -> None:
    body = b'{"messages":[{"role":"user","content":"\xff"}]}'
    error = server.http.post(PATH, content=body, headers=JSON).json()["error"]
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("identity", 200)])
def test_only_a_body_that_is_not_compressed_is_read(
    strict: LiveServer, encoding: str, status: int
) -> None:
    headers = {**JSON, "content-encoding": encoding}
    response = strict.http.post(PATH, json=chat_body(max_tokens=1), headers=headers)
    assert response.status_code == status
    assert ("'gzip'" in response.text) == (status == 415)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
@pytest.mark.parametrize("sign", ["origin", "sec-fetch-site", None])
def test_body_of_a_browser_must_say_that_it_is_json(
    server: LiveServer, kind: str, sign: str | None
) -> None:
    """A web page can make a browser send other media types to a server on the user's machine."""
    headers = {"content-type": kind} | ({sign: "http://localhost"} if sign else {})
    response = server.http.post(PATH, json=chat_body(max_tokens=1), headers=headers)
    if sign is None and kind != "text/plain":
        assert response.status_code == 200
        return
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


def test_large_prompt_does_not_block_the_event_loop(server: LiveServer) -> None:
    error = server.complete(prompt="the world " * 100_000).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_ids_that_cannot_fit_are_neither_read_nor_copied_for_each_answer(
    server: LiveServer,
) -> None:
    """A hundred copies of a body of token ids would take gigabytes."""
    error = server.complete(prompt=[10**9] * 100_000, n=128).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_request_id_is_the_clients_own_where_it_is_harmless(server: LiveServer) -> None:
    response = server.http.get("/health", headers={"x-request-id": "abc-1.2:3"})
    assert response.headers.get_list("x-request-id") == ["abc-1.2:3"]
    for bad in ("a b", "x" * 200, "a\tb", '"><script>', "é".encode()):
        answered = server.http.get("/health", headers={"x-request-id": bad})
        assert answered.headers["x-request-id"].startswith("req-")


def test_same_request_id_twice_cannot_collide(server: LiveServer) -> None:
    server.backend.gate.clear()
    connections = []
    request = post_bytes(
        PATH, chat_body(max_tokens=2), headers="X-Request-Id: same\r\nConnection: close\r\n"
    )
    for _ in range(2):
        connection = server.connect()
        connection.sendall(request)
        connections.append(connection)
    deadline = time.monotonic() + 10
    while server.num_busy < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    server.backend.gate.set()
    answers = []
    for connection in connections:
        answer = read_all(connection)
        assert b"200 OK" in answer
        assert b"x-request-id: same" in answer
        answers.append(answer.split(b'"id":"')[1][:40])
    assert answers[0] != answers[1]


def talk(server: LiveServer, data: bytes) -> bytes:
    """Send bytes, and return all bytes of the response."""
    connection = server.connect()
    connection.sendall(data)
    return read_all(connection)


def drip(connection: socket.socket, data: bytes) -> bytes:
    """Send a byte every 100 ms until the server answers or closes; return its answer."""
    connection.settimeout(0.1)
    try:
        for at in range(100):
            try:
                if (answer := connection.recv(65536)) is not None:
                    return answer
            except TimeoutError:
                connection.sendall(data[at : at + 1])
    except (ConnectionResetError, BrokenPipeError):
        return b""
    finally:
        connection.close()
    raise AssertionError("the server waited for ever")


def test_bodies_that_arrive_are_bounded_for_a_tenant_and_in_all(tmp_path: Path) -> None:
    bounds = RequestLimits(max_tenant_arriving_bytes=300_000, max_arriving_bytes=480_000)
    keys = {"key-a": "a", "key-b": "b", "key-c": "c"}
    options = ServeOptions(drain_s=1, limits=bounds, api_keys=ApiKeys(keys))
    with live_server(tmp_path, options=options) as server:

        def half_sent(key: str, num_sent: int, *, is_chunked: bool = False) -> socket.socket:
            head = f"X-API-Key: {key}\r\n"
            request_bytes = post_bytes("/v1/completions", b"x" * 250_000, headers=head)
            if is_chunked:
                request_bytes = request_bytes.replace(
                    b"Content-Length: 250000", b"Transfer-Encoding: chunked"
                )
                request_bytes = request_bytes.replace(b"\r\n\r\n", b"\r\n\r\n3d090\r\n")
            connection = server.connect()
            connection.settimeout(0.2)
            connection.sendall(request_bytes[: num_sent - 250_000])
            return connection

        def is_refused(key: str) -> bool:
            """Whether a request is refused before it has sent any of its body."""
            with half_sent(key, 0) as connection, suppress(TimeoutError):
                return connection.recv(99).startswith((b"HTTP/1.1 429", b"HTTP/1.1 503"))
            return False

        def long(key: str) -> httpx.Response:
            headers = {"x-api-key": key}
            return server.http.post(
                "/v1/completions", json={"prompt": "x" * 150_000}, headers=headers
            )

        def is_small_answered(key: str) -> bool:
            headers = {"x-api-key": key}
            sent = server.http.post(PATH, json=chat_body(max_tokens=1), headers=headers)
            return sent.status_code == 200

        connections = [half_sent("key-a", 200_000), half_sent("key-a", 200_000, is_chunked=True)]
        wait_for(lambda: is_refused("key-a"))
        refused = long("key-a")
        assert refused.json()["error"]["code"] == "bodies_limit"
        assert int(refused.headers["retry-after"]) >= 1
        third = half_sent("key-a", 200_000, is_chunked=True)
        third.settimeout(10)
        assert third.recv(99).startswith(b"HTTP/1.1 429")  # though its body never ends
        assert is_small_answered("key-a")
        assert long("key-b").status_code == 400  # longer than the context
        connections.append(half_sent("key-b", 200_000))
        wait_for(lambda: is_refused("key-c"))
        refused = long("key-c")
        assert "All request bodies" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert is_small_answered("key-c")
        for open_connection in (*connections, third):
            open_connection.close()
        wait_for(lambda: [long(key).status_code for key in keys] == [400] * 3)


def test_connections_are_bounded_and_idle_ones_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.server.http.server.raise_open_file_limit", lambda: 6)
    with live_server(tmp_path) as server:
        server.backend.gate.clear()
        busy = server.connect()
        busy.sendall(post_bytes("/v1/completions", {"prompt": "a", "max_tokens": 1}))
        wait_for(lambda: server.num_busy == 1)
        idle = [server.connect() for _ in range(5)]
        for _ in range(3):
            with server.connect() as first:
                first.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert first.recv(99).startswith(b"HTTP/1.1 200")
        server.backend.gate.set()
        assert busy.recv(99).startswith(b"HTTP/1.1 200")
        for first in (busy, *idle):
            first.close()


def test_longest_idle_connection_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.server.http.server.raise_open_file_limit", lambda: 10)
    with live_server(tmp_path) as server:
        opened = []

        def send_request(connection: socket.socket) -> None:
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                chunk = connection.recv(999)
                assert chunk
                answer += chunk

        for _ in range(5):
            opened.append(server.connect())
            send_request(opened[-1])
        send_request(opened[0])  # so that it is the last to become idle
        for longest in (*opened[1:], opened[0]):
            new = server.connect()
            send_request(new)
            longest.settimeout(5)
            with suppress(ConnectionResetError):
                assert longest.recv(9) == b""
            opened.append(new)
        for connection in opened:
            connection.close()


def test_log_has_one_line_about_many_connections_that_cannot_be_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        faults, loop = LoopExceptionHandler(), asyncio.get_running_loop()
        for _ in range(100):
            faults(loop, {"message": "accept", "exception": OSError(errno.EMFILE, "many")})
        faults(loop, {"message": "something else"})

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == [
        "New connections wait: this process may not open more files.",
        "something else",
    ]
