"""Multipart forms are parsed correctly, however their bytes are divided."""

from __future__ import annotations

import pytest

from twostroke.core.errors import RequestError
from twostroke.server.http.errors import BodySizeError, MissingFieldError
from twostroke.server.http.multipart import _Form

_HEAD = b'Content-Disposition: form-data; name="'
_TEXT = b"\r\n--b\r\n--bounda\r\n--boundar\r\n"
_FORM = b'--boundary\r\n%bpurpose"\r\n\r\nbatch\r\n--boundary\r\n' % _HEAD
_FORM += b'%bfile"; filename="a"\r\n\r\n%b\r\n--boundary--\r\n' % (_HEAD, _TEXT)


def read(data: bytes, size: int, max_bytes: int = 1000) -> tuple[dict[str, str], bytes]:
    file = bytearray()
    form = _Form(b"\r\n--boundary", file.extend, max_bytes)
    for start in range(0, len(data), size):
        form.feed(data[start : start + size])
    return form.finish(), bytes(file)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 11, 1000])
def test_a_file_is_the_same_however_its_form_is_cut(size: int) -> None:
    assert read(_FORM, size) == ({"purpose": "batch", "file": "a"}, _TEXT)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_every_cut_of_a_form_is_refused(size: int) -> None:
    for end in range(len(_FORM) - 4):
        with pytest.raises((RequestError, MissingFieldError)):
            read(_FORM[:end], size)


def test_a_file_may_be_as_large_as_the_limit() -> None:
    assert read(_FORM, 5, len(_TEXT))[1] == _TEXT
    with pytest.raises(BodySizeError):
        read(_FORM, 5, len(_TEXT) - 1)


@pytest.mark.parametrize("size", [10, 5000])
def test_a_field_may_be_as_long_as_its_limit(size: int) -> None:
    for length in (1024, 1025):
        form = _FORM.replace(b"batch", b"b" * length)
        if length == 1024:
            assert len(read(form, size)[0]["purpose"]) == length
        else:
            with pytest.raises(RequestError, match="longer than"):
                read(form, size)
