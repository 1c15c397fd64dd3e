"""A server drains when its spot machine gets notice; clouds are a stand-in with their answers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from support.engines import tiny_client
from support.waiting import wait_for
from twostroke.core.errors import UsageError
from twostroke.engine.process.served import LocalEngine
from twostroke.server.http import drain_notice
from twostroke.server.http.drain_notice import CLOUDS, DrainNotice
from twostroke.server.options import ServeOptions
from twostroke.server.run import serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ACTION = {"action": "terminate", "time": "2026-11-30T08:22:00Z"}
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


class Metadata:
    """A metadata service: responses by path, and the headers that each request must have."""

    def __init__(self) -> None:
        """Answer 404 to everything."""
        self.bodies: dict[str, str] = {}
        self.headers: dict[str, str] = {}
        self.status = 200
        self.url = ""


@contextmanager
def metadata() -> Iterator[Metadata]:
    service = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            has_headers = all(self.headers[name] == text for name, text in service.headers.items())
            body = service.bodies.get(self.path)
            self.send_response(404 if body is None else service.status if has_headers else 403)
            text = (body or "").encode()
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_PUT(self) -> None:  # AWS's session token
            token = b"a token" if self.headers["x-aws-ec2-metadata-token-ttl-seconds"] else b""
            self.send_response(200)
            self.send_header("content-length", str(len(token)))
            self.end_headers()
            self.wfile.write(token)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        service.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield service
        finally:
            server.shutdown()
            thread.join()


def test_aws_tells_it_by_an_item_that_appears() -> None:
    with metadata() as service:
        service.headers = {"x-aws-ec2-metadata-token": "a token"}
        assert not CLOUDS["aws"].has_notice(service.url)
        service.bodies["/latest/meta-data/spot/instance-action"] = json.dumps(_ACTION)
        assert CLOUDS["aws"].has_notice(service.url)


def test_google_tells_it_by_a_word() -> None:
    with metadata() as service:
        service.headers = {"metadata-flavor": "Google"}
        service.bodies["/computeMetadata/v1/instance/preempted"] = "FALSE"
        assert not CLOUDS["gcp"].has_notice(service.url)
        service.bodies["/computeMetadata/v1/instance/preempted"] = "TRUE"
        assert CLOUDS["gcp"].has_notice(service.url)


@pytest.mark.parametrize(
    ("kind", "machine", "is_given"),
    [("Preempt", "vm-1", True), ("Preempt", "vm-2", False), ("Reboot", "vm-1", False)],
)
def test_azure_tells_it_by_an_event_that_names_the_machine(
    kind: str, machine: str, *, is_given: bool
) -> None:
    event = {"EventType": kind, "Resources": [machine], "NotBefore": "Mon, 30 Nov 2026 08:00:00"}
    with metadata() as service:
        service.headers = {"metadata": "true"}
        service.bodies = {_EVENTS: '{"DocumentIncarnation":1,"Events":[]}', _NAME: "vm-1"}
        assert not CLOUDS["azure"].has_notice(service.url)
        service.bodies[_EVENTS] = json.dumps({"DocumentIncarnation": 2, "Events": [event]})
        assert CLOUDS["azure"].has_notice(service.url) is is_given


def test_a_url_tells_it_by_a_body_other_than_false() -> None:
    with metadata() as service:
        notice = DrainNotice(f"{service.url}/end")
        assert not notice.is_given()
        for body, is_given in (("false\n", False), ("", False), ("soon", True)):
            service.bodies["/end"] = body
            assert notice.is_given() is is_given


def test_a_source_that_cannot_be_read_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with metadata() as service:
        service.bodies["/end"] = "soon"
        service.status = 500
        notice = DrainNotice(f"{service.url}/end")
        assert not notice.is_given()
        assert not notice.is_given()
        service.status = 200
        assert notice.is_given()
    assert not notice.is_given()
    assert len(caplog.messages) == 2
    assert caplog.messages[0].endswith("the response has status 500.")


_PARTS = {
    "nothing": b"",
    "handshake": b"\x16\x03\x03\x0f\x00" + b"x" * 3840,  # of TLS
    "status line": b"HTTP/1.1 200 " + b"x" * 4000,
    "headers": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1000,
    "body": b"HTTP/1.1 200 OK\r\ncontent-length: 4000\r\n\r\n" + b"x" * 4000,
    "body until the end": b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 4000,
    "chunks": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1000,
}


@contextmanager
def dripping(data: bytes) -> Iterator[int]:
    """Yield the port of a server that sends each client one byte of `data` after another."""
    is_over = threading.Event()

    def drip(listener: socket.socket) -> None:
        while not is_over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                for number in range(len(data) or 4000):
                    if is_over.wait(0.05):
                        return
                    connection.sendall(data[number : number + 1])

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=drip, args=(listener,), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            is_over.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


@pytest.mark.parametrize("part", _PARTS)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_source_that_drips_is_no_notice_and_does_not_hold_the_check(
    scheme: str, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    given: list[bool] = []
    with dripping(_PARTS[part]) as port:
        notice = DrainNotice(f"{scheme}://127.0.0.1:{port}/end")
        check = threading.Thread(target=lambda: given.append(notice.is_given()), daemon=True)
        check.start()
        check.join(20)  # to read all takes 200 s
        assert not check.is_alive()
    assert given == [False]
    assert "cannot be read (--drain-notice" in caplog.text


@pytest.mark.parametrize(
    "source", ["ftp://x/notice", "http://", "/no/such/folder/notice", "amazon/x", "AWS", "azur"]
)
def test_a_wrong_source_is_refused(source: str) -> None:
    with pytest.raises(UsageError, match="drain_notice must be"):
        DrainNotice(source)


def test_an_answer_of_another_form_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with metadata() as service:
        azure = replace(CLOUDS["azure"], address=service.url)
        monkeypatch.setitem(CLOUDS, "azure", azure)
        service.bodies[_EVENTS] = '{"Events": [{"EventType": "Preempt", "Resources": 1}]}'
        assert not DrainNotice("azure").is_given()
    assert "cannot be read (--drain-notice azure)" in caplog.text


def test_the_wait_ends_when_a_file_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_notice, "_INTERVAL_S", 0.01)
    path = tmp_path / "notice"

    async def run() -> None:
        waiting = asyncio.create_task(DrainNotice(str(path)).wait())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        path.touch()
        await asyncio.wait_for(waiting, 5)

    asyncio.run(run())


def test_a_server_stops_after_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_notice, "_INTERVAL_S", 0.05)
    path, urls, codes = tmp_path / "notice", list[str](), list[int]()
    stops = list[int]()
    with tiny_client(tmp_path) as (client, _):
        options = ServeOptions(port=0, drain_notice=str(path), coalesces=False)

        def run() -> None:
            codes.append(
                serve(LocalEngine(client), options, on_ready=urls.append, on_stop=stops.append)
            )

        thread = threading.Thread(target=run)
        thread.start()
        wait_for(lambda: bool(urls))
        path.touch()
        thread.join(20)
    assert codes == [0]
    assert stops == [0]
