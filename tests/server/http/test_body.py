"""Requests that are answered before their whole body has arrived: clients can read the answer."""

from __future__ import annotations

import asyncio
import json
import logging
import select
import socket
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import LiveServer, chat_body, live_server, post_bytes, read_all
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.http.connection import BodyReader
from twostroke.server.http.limits import RequestLimits
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import Message, Receive, Scope, Send

PATH = "/v1/chat/completions"
LARGE = 32 << 20  # more than a connection holds that nobody reads


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    limits = RequestLimits(max_body_bytes=1000, max_dropped_bytes=1 << 20, body_timeout_s=0.5)
    with live_server(tmp_path_factory.mktemp("brief"), ServeOptions(limits=limits)) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    limits = RequestLimits(max_body_bytes=1000, body_timeout_s=1000)
    with live_server(tmp_path_factory.mktemp("patient"), ServeOptions(limits=limits)) as server:
        yield server
        server.wait_idle()


@pytest.mark.parametrize("is_chunked", [False, True])
def test_client_that_sends_too_much_can_read_the_error(
    server: LiveServer, is_chunked: bool
) -> None:
    status, error = _ask_and_then_read(server, is_chunked=is_chunked)
    assert (status, error["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("path", "kind", "status"), [(PATH, "text/plain", 415), ("/v1/chat", "application/json", 404)]
)
def test_connection_is_reused_after_a_refused_body(
    server: LiveServer, path: str, kind: str, status: int
) -> None:
    with server.connect() as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
        connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % LARGE + b" " * LARGE)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answers = b""
        while data := connection.recv(65536):
            answers += data
    assert answers.startswith(b"HTTP/1.1 %d" % status)
    assert b"HTTP/1.1 200" in answers


def test_client_that_sends_much_without_a_key_can_read_the_error(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    options = ServeOptions(api_keys=ApiKeys({"sk": ""}))
    with live_server(tmp_path_factory.mktemp("keys"), options) as server:
        status, error = _ask_and_then_read(server)
    assert (status, error["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("size", [2000, 9_999_999_999])
@pytest.mark.parametrize("kind", ["text/plain", "application/json"])
def test_rest_of_a_body_is_awaited_for_a_limited_time(
    brief: LiveServer, size: int, kind: str
) -> None:
    with brief.connect() as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
        connection.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode())
        assert b"HTTP/1.1 4" in connection.recv(65536)
        connection.sendall(b" ")
        while connection.recv(65536):
            pass


@pytest.mark.parametrize(("path", "status"), [(PATH, 413), ("/v1/chat", 404)])
def test_refused_client_that_expects_100_must_close(
    patient: LiveServer, path: str, status: int
) -> None:
    answers = read_all(_asked_first(patient, path, 9_999_999))
    assert answers.startswith(b"HTTP/1.1 %d" % status)
    assert answers.lower().count(b"\r\nconnection: close\r\n") == 1


def test_expect_100_continue_is_answered(patient: LiveServer) -> None:
    body = json.dumps(chat_body(max_tokens=1)).encode()
    with _asked_first(patient, PATH, len(body)) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_client_that_does_not_wait_for_continue_can_read_the_error(patient: LiveServer) -> None:
    with _asked_first(patient, PATH, LARGE, b" " * 100) as connection:
        connection.sendall(b" " * (LARGE - 100))
        assert read_all(connection).startswith(b"HTTP/1.1 413")


def test_client_that_sends_after_a_refusal_can_read_it(patient: LiveServer) -> None:
    with _asked_first(patient, PATH, LARGE) as connection:
        select.select([connection], [], [], 20)
        connection.sendall(b" " * LARGE)
        assert read_all(connection).startswith(b"HTTP/1.1 413")


def test_endless_rest_of_a_body_is_cut_off(brief: LiveServer) -> None:
    with brief.connect() as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + b"Content-Length: 9999999999\r\n\r\n")
        assert b"HTTP/1.1 413" in connection.recv(65536)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(b" " * (100 << 20))


@pytest.mark.parametrize("wait", [b"", b"HTTP/1.1 404"])
def test_invalid_bytes_after_a_request_are_not_logged_as_a_failure(
    server: LiveServer, wait: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """This holds before and after the response, so a client cannot fill the log with tracebacks."""
    with server.connect() as connection:
        head = b"POST /v1/chat HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head if wait else head + b"no chunk\r\n")
        answers = b""
        while data := connection.recv(65536):
            answers += data
            if wait and len(answers) == len(data):
                connection.sendall(b"no chunk\r\n")
    assert answers.startswith(wait or b"HTTP/1.1 400")
    assert answers.count(b"HTTP/1.1") == 1
    server.wait_idle()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_stopping_server_does_not_wait_for_the_rest_of_a_body(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    limits = RequestLimits(body_timeout_s=1000)
    options = ServeOptions(drain_s=1000, limits=limits)
    with socket.socket() as connection:
        with live_server(tmp_path_factory.mktemp("stopping"), options) as server:
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(
                b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
            )
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
        assert connection.recv(65536) == b""


@pytest.mark.parametrize("has_some", [False, True])
def test_stopping_server_refuses_an_incomplete_body(
    tmp_path_factory: pytest.TempPathFactory, has_some: bool, caplog: pytest.LogCaptureFixture
) -> None:
    limits = RequestLimits(body_timeout_s=1000)
    options = ServeOptions(drain_s=1000, limits=limits)
    request = post_bytes(PATH, chat_body(), headers="" if has_some else "Expect: 100-continue\r\n")
    head, _, body = request.partition(b"\r\n\r\n")
    with socket.socket() as connection:
        connection.settimeout(20)
        with live_server(tmp_path_factory.mktemp("stopping"), options) as server:
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(head + b"\r\n\r\n" + (body[:-1] if has_some else b""))
            if has_some:
                assert server.chat(max_tokens=1).status_code == 200  # the bytes before have arrived
            else:
                assert connection.recv(65536).startswith(b"HTTP/1.1 100")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"engine_stopped" in answer
    assert b"retry-after" in answer
    assert not [record.message for record in caplog.records if record.levelname != "INFO"]


def test_body_that_arrives_as_the_server_stops_is_read() -> None:
    messages: asyncio.Queue[Message] = asyncio.Queue()
    read = []

    async def send(_message: Message) -> None:
        pass

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        reader.hurry()
        asyncio.get_running_loop().call_soon(
            messages.put_nowait, {"type": "http.request", "body": b"whole"}
        )
        read.append((await receive())["body"])
        messages.put_nowait({"type": "http.disconnect"})
        read.append((await receive())["type"])

    reader = BodyReader(messages.get, send, RequestLimits())
    assert asyncio.run(asyncio.wait_for(reader.answer(app, {"type": "http"}), 10))
    assert read == [b"whole", "http.disconnect"]


def test_slow_body_gets_no_extra_time_after_the_response() -> None:
    async def serve() -> bool:
        loop, answered = asyncio.get_running_loop(), asyncio.Event()
        time = loop.time

        async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
            loop.time = lambda: time() + 1000  # type: ignore[method-assign]
            await send({"type": "http.response.body", "body": b"whole"})

        async def send(_message: Message) -> None:
            answered.set()

        async def receive() -> Message:
            return await asyncio.Future()

        reader = BodyReader(receive, send, RequestLimits(body_timeout_s=1000))
        answering = asyncio.create_task(reader.answer(app, {"type": "http"}))
        await answered.wait()
        done, _ = await asyncio.wait({answering}, timeout=10)
        return bool(done)

    assert asyncio.run(serve())


def test_response_after_the_stop_does_not_wait_for_the_rest() -> None:
    sent = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return await asyncio.Future()

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        reader.hurry()
        await send({"type": "http.response.body", "body": b"whole"})

    reader = BodyReader(receive, send, RequestLimits(body_timeout_s=1000))
    assert not asyncio.run(asyncio.wait_for(reader.answer(app, {"type": "http"}), 10))
    assert [(message["body"], message.get("more_body")) for message in sent] == [
        (b"whole", True),
        (b"", None),
    ]


def test_stop_at_the_time_limit_of_the_rest_is_not_an_error() -> None:
    async def serve() -> bool:
        async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
            await send({"type": "http.response.body", "body": b"whole"})

        async def send(_message: Message) -> None:
            pass

        async def receive() -> Message:
            try:
                return await asyncio.Future()
            except asyncio.CancelledError:  # the limit is expiring
                reader.hurry()
                raise

        reader = BodyReader(receive, send, RequestLimits(body_timeout_s=0.01))
        return await asyncio.wait_for(reader.answer(app, {"type": "http"}), 10)

    assert not asyncio.run(serve())


def _asked_first(server: LiveServer, path: str, size: int, body: bytes = b"") -> socket.socket:
    """Return a connection on which a client has sent `Expect: 100-continue`.

    The client has also sent the bytes `body` of its request body.
    """
    connection = server.connect()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Expect: 100-continue\r\nContent-Length: {size}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def _ask_and_then_read(server: LiveServer, *, is_chunked: bool = False) -> tuple[int, Any]:
    """Send a large body like a client that reads no response before it has sent everything."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        body = [b" " * LARGE] if is_chunked else b" " * LARGE
        connection.request("POST", PATH, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())["error"]
    finally:
        connection.close()
