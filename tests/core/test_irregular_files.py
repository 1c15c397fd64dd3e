"""Readers of files by name refuse all that is no file: nothing waits for the writer of a pipe."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from twostroke.core.errors import TwostrokeError
from twostroke.core.files import IrregularFileError, open_regular_file, read_regular_file
from twostroke.core.json_io import read_json
from twostroke.engine.kv_offload.disk import entry_of, read_page
from twostroke.fleet.router.health_checker import _read_listing
from twostroke.lab.simulator.traces import read_trace
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.auth.prices import read_prices
from twostroke.server.batch.lines import read_lines

if TYPE_CHECKING:
    from collections.abc import Callable


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound_socket:
        bound_socket.bind(str(path))


IRREGULAR: dict[str, Callable[[Path], object]] = {
    "it is a pipe": os.mkfifo,
    "it is a folder": lambda path: path.mkdir(),
    "it is a socket": listen,
}


@pytest.mark.parametrize(("words", "make"), IRREGULAR.items(), ids=list(IRREGULAR))
def test_a_path_that_is_no_file_is_refused_with_what_it_is(
    tmp_path: Path, words: str, make: Callable[[Path], object]
) -> None:
    make(path := tmp_path / "x")
    with pytest.raises(IrregularFileError, match=words):
        open_regular_file(path)


def test_links_are_followed_unless_they_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    (link := tmp_path / "link").symlink_to("x")
    assert read_regular_file(link) == b"abc"
    with pytest.raises(IrregularFileError, match="symbolic link"):
        open_regular_file(link, follows_links=False)


def test_a_pipe_of_the_shell_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"abc")
    os.close(writing)
    try:
        assert read_regular_file(Path(f"/dev/fd/{reading}")) == b"abc"
    finally:
        os.close(reading)


READERS: dict[str, Callable[[Path], object]] = {
    "a page": lambda path: read_page(path, bytes(32), memoryview(bytearray(8))),
    "JSON": read_json,
    "keys": lambda path: ApiKeys.read(path, None),
    "prices": read_prices,
    "replicas": _read_listing,
    "lines of a batch": lambda path: list(read_lines(path, 100)),
    "a trace": lambda path: read_trace(str(path)),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=list(READERS))
@pytest.mark.parametrize("make", IRREGULAR.values(), ids=list(IRREGULAR))
def test_every_reader_refuses_a_path_that_is_no_regular_file(
    tmp_path: Path, reader: Callable[[Path], object], make: Callable[[Path], object]
) -> None:
    make(path := tmp_path / "x.csv")
    with pytest.raises((TwostrokeError, OSError)):
        reader(path)


def test_an_entry_of_the_page_cache_that_is_no_file_is_none(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "x")
    assert entry_of(path) is None
