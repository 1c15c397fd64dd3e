"""Responses are read as HTTP/1.1 wants them, at every cut, and refused otherwise."""

from __future__ import annotations

import pytest

from twostroke.fleet.router.response import ReplicaError, ResponseReader

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
_WHOLE_RESPONSES = {
    "length": (_HEAD + b"content-length: 5\r\n\r\nhello", b"hello", False),
    "chunks": (
        _HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n",
        b"hello",
        False,
    ),
    "trailer": (
        _HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx: y\r\n\r\n",
        b"hello",
        False,
    ),
    "interim": (
        b"HTTP/1.1 100 Continue\r\n\r\n" + _HEAD + b"content-length: 5\r\n\r\nhello",
        b"hello",
        False,
    ),
    "no body": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", False),
    "close": (_HEAD + b"connection: close\r\ncontent-length: 5\r\n\r\nhello", b"hello", True),
    "old": (b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello", b"hello", True),
    "more": (_HEAD + b"content-length: 5\r\n\r\nhelloHTTP/1.1", b"hello", True),
}


@pytest.mark.parametrize("name", _WHOLE_RESPONSES)
def test_a_response_is_the_same_wherever_it_is_cut(name: str) -> None:
    text, body, is_last = _WHOLE_RESPONSES[name]
    for step in (1, 2, 3, 7, len(text)):
        reader, body_read = ResponseReader(), b""
        for at in range(0, len(text), step):
            if not reader.is_whole:
                body_read += reader.feed(text[at : at + step])
                at_end = at + step
        assert (reader.is_whole, body_read) == (True, body)
        assert reader.is_last is is_last or at_end < len(text)


@pytest.mark.parametrize(
    "text",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        _HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        _HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
        _HEAD + b"content-length: -5\r\n\r\n",
        _HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n",
        _HEAD + b"content-length : 5\r\n\r\n",
        _HEAD + b" folded: 5\r\n\r\n",
        _HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\n",
        _HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nhello\r\n",
        _HEAD + b"x: " + b"y" * 70_000,
        _HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"0" * 5000,
    ],
)
def test_a_response_that_two_readers_may_take_differently_is_refused(text: bytes) -> None:
    with pytest.raises(ReplicaError, match="not valid"):
        ResponseReader().feed(text)


def test_the_end_of_a_connection_ends_only_a_body_without_length() -> None:
    reader = ResponseReader()
    assert reader.feed(_HEAD + b"\r\nhel") + reader.feed(b"lo") == b"hello"
    assert not reader.is_whole
    assert reader.close()
    for cut in (_HEAD, _HEAD + b"content-length: 5\r\n\r\nhel",
                _HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"):  # fmt: skip
        reader = ResponseReader()
        reader.feed(cut)
        assert not reader.close()


def test_a_response_to_head_has_no_body() -> None:
    reader = ResponseReader(is_head=True)
    assert reader.feed(_HEAD + b"content-length: 5\r\n\r\n") == b""
    assert reader.is_whole
