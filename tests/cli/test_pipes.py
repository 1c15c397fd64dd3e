"""Pipes such as `<(command)` in a shell: every option that reads a file reads them completely."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from twostroke.core.files import read_at_most, read_small_file

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def piped(data: bytes) -> Iterator[str]:
    """Yield the path of a pipe that delivers `data`, as a shell names it."""
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as out:
            out.write(data)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield f"/dev/fd/{reading}"
    finally:
        os.close(reading)
        writer.join()


def test_more_than_a_pipe_holds_is_read_up_to_the_limit() -> None:
    data = os.urandom(1 << 17)
    with piped(data) as path:
        assert read_small_file(Path(path)) == data
    with piped(data) as path, Path(path).open("rb") as file:
        assert read_at_most(file, 70_000) == data[:70_000]
        assert read_at_most(file, 1 << 40) == data[70_000:]


def test_the_file_of_a_fleet_is_read_from_a_pipe(cli, config) -> None:
    pytest.importorskip("highspy", reason="the extra [plan] is not installed")
    lines = f"models:\n- model: {config}\n  requests_per_s: 2\ndevices: [L40S, L4]\n"
    with piped(lines.encode()) as path:
        assert "llama-8b" in cli("plan", "fleet", path).out
    with piped(f"{lines}budget: 0.01\n".encode()) as path:
        assert "times the budget" in cli("plan", "fleet", path).err


def test_an_error_found_later_has_its_line_in_a_pipe(cli) -> None:
    with piped(b"models:\n- requests_per_s: 1\n  model: ./nothing.gguf\n") as path:
        ran = cli("plan", "fleet", path)
    assert ran.code == 3
    assert ", line 3: " in ran.err


def test_prices_of_apis_are_read_from_a_pipe(cli, config) -> None:
    prices = b"model,input_usd_per_1m,output_usd_per_1m,source_date\nMine,1,2,2026-07\n"
    arguments = ("plan", "buy", config, "--on", "H100-SXM", "--requests-per-day", "100000")
    with piped(prices) as path:
        assert any(
            line.startswith("Mine ") for line in cli(*arguments, "--prices", path).out.split("\n")
        )


def test_prices_of_tokens_are_read_from_a_pipe(cli, tmp_path) -> None:
    (tmp_path / "records").mkdir()
    with piped(b"[models.tiny]\ninput = true\n") as path:
        ran = cli("usage", "--records", str(tmp_path / "records"), "--prices", path)
    assert "at model 'tiny'" in ran.err


@pytest.mark.parametrize(
    ("option", "data", "words"),
    [
        ("--file", b"Hello", ""),
        ("--json-schema", b'{"type": "booleam"}', "booleam"),
        ("--grammar", b"start: nothing_here", "nothing_here"),
        ("--chat-template-file", b"{% for %}", "template"),
    ],
)
def test_texts_for_an_answer_are_read_from_a_pipe(cli, tiny, option, data, words) -> None:
    prompt = () if option == "--file" else ("-p", "Hi")
    with piped(data) as path:
        ran = cli("generate", tiny, *prompt, option, path, "--max-tokens", "1")
    assert words in ran.err
    assert (ran.code == 0) == (not words)
