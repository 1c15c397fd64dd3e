"""The first hundreds of `make long SUITE=malformed`, and that its judges find faults."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
from typing import TYPE_CHECKING, Any

from malformed import run, sockets
from malformed.raw_client import Reply
from malformed.requests_of_schema import Case, Requests
from support.servers import live_server

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_malformed_requests_and_frames_do_no_harm(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = run.parse(["--http", "400", "--raw", "120", "--frames", "400"])
    assert run.run(options, tmp_path) == 0, capfd.readouterr().out
    output = capfd.readouterr().out
    assert "'batch completed': 2" in output or "'batch failed'" in output
    assert "'engine: closed'" in output
    assert "'server: refused'" in output


def test_the_same_seed_makes_the_same_requests(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        document = server.http.get("/openapi.json").json()
    first, other, third = Requests(document, 1), Requests(document, 1), Requests(document, 2)
    cases = [first.draw() for _ in range(300)]
    assert cases == [other.draw() for _ in range(300)]
    assert cases != [third.draw() for _ in range(300)]
    paths = {case.name.split()[1].partition("?")[0] for case in cases}
    assert set(_paths_with_bodies(document)) <= paths


def test_a_server_error_a_leak_and_a_smuggled_header_are_found() -> None:
    case = Case("GET /", "GET", b"")
    for reply in (
        Reply(500, {}, b"{}", closes=False),
        Reply(400, {"content-type": "application/json"}, b"{", closes=False),
        Reply(400, {}, b"Traceback (most recent call last)", closes=False),
        Reply(200, {"x-injected": "1"}, b"", closes=False),
    ):
        assert run._judge(case, reply)
    assert not run._judge(case, Reply(400, {}, b"", closes=True))


def test_a_second_answer_and_a_server_error_on_a_connection_are_found() -> None:
    raw = sockets._smuggled(random.Random(1))
    answer = b"HTTP/1.1 400 Bad Request\r\n\r\n"
    assert not sockets.judge(raw, answer)
    assert sockets.judge(raw, answer * 2)
    assert sockets.judge(raw, b"HTTP/1.1 500 Internal Server Error\r\n\r\n")
    assert sockets.judge(raw, b"oops")


def test_a_connection_that_stays_open_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_READ_S", 0.1)

    with socket.create_server(("127.0.0.1", 0)) as listener:  # nobody accepts
        raw = sockets.Raw("silent", [b"GET / HTTP/1.1\r\n"])
        result = asyncio.run(sockets.act(raw, listener.getsockname()[1]))
    assert result == ["silent: the connection stays open"]


def test_a_connection_that_ends_while_a_client_sends_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end_early(_: object) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(asyncio.StreamWriter, "write_eof", end_early)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        raw = sockets.Raw("headers", [b"GET / HTTP/1.1\r\n"])
        assert asyncio.run(sockets.act(raw, listener.getsockname()[1])) == []


def _paths_with_bodies(document: Any) -> list[str]:
    posts = {
        path: methods["post"] for path, methods in document["paths"].items() if "post" in methods
    }
    return [
        path
        for path, post in posts.items()
        if "application/json" in post.get("requestBody", {}).get("content", {})
    ]
