"""The chunks of a streamed response are correct for every kind of client."""

from __future__ import annotations

import http.client
import io
from typing import TYPE_CHECKING

import pytest

from support.servers import chat_body, post_bytes, read_all

if TYPE_CHECKING:
    from support.servers import LiveServer


class _Received:
    """The bytes of a response as a file, from which `http.client` reads."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_stream_is_framed_as_its_client_reads_it(server: LiveServer, version: str) -> None:
    body = chat_body(stream=True, max_tokens=20, ignore_eos=True)
    request = post_bytes("/v1/chat/completions", body, headers="Connection: close\r\n")
    with server.connect() as connection:
        connection.sendall(request.replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1))
        received = read_all(connection)
    response = http.client.HTTPResponse(_Received(received))  # type: ignore[arg-type]
    response.begin()
    assert response.status == 200
    assert (response.getheader("transfer-encoding") == "chunked") is (version == "1.1")
    events = response.read().split(b"\n\n")
    assert len(events) > 10
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(event.startswith(b"data: {") for event in events[:-2])
