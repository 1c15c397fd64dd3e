"""Messages typed or pasted into `twostroke chat`, and their history."""

from __future__ import annotations

import json
import os
import pty
import random
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from twostroke.cli import line_editor
from twostroke.cli.line_editor import append_to_history, read_history

if TYPE_CHECKING:
    from pathlib import Path


def test_history_returns_what_was_appended(tmp_path: Path) -> None:
    rng = random.Random(1)
    parts = ["a", "+", "# no comment", "", " ", "grüße 漢", "\n", "\n\n", "\\"]
    messages = ["".join(rng.choices(parts, k=rng.randint(1, 6))) for _ in range(200)]
    path = tmp_path / "folder" / "chat_history"
    for message in messages:
        append_to_history(path, message)
    assert list(read_history(path)) == messages
    assert path.stat().st_mode & 0o777 == 0o600


def test_history_of_a_missing_or_unwritable_file_is_empty(tmp_path: Path) -> None:
    append_to_history(tmp_path, "a folder is no file")
    assert list(read_history(tmp_path)) == []
    assert list(read_history(tmp_path / "missing")) == []


def test_only_the_last_entries_are_recalled(tmp_path: Path) -> None:
    path = tmp_path / "chat_history"
    for number in range(1005):
        append_to_history(path, str(number))
    entries = list(read_history(path))
    assert (entries[0], entries[-1], len(entries)) == ("5", "1004", 1000)


def test_history_that_the_locale_cannot_show_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "twostroke" / "chat_history"
    for message in ("grüße", "a\0b", "plain"):
        append_to_history(path, message)
    script = (
        "from twostroke.cli import line_editor\n"
        "list(line_editor.typed_messages())\n"
        "import readline\n"
        "print(readline.get_history_item(readline.get_current_history_length()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "TWOSTROKE_CACHE": str(path.parent)},
        input="",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == "plain"


_PRINT_MESSAGES = """
import json
from twostroke.cli.line_editor import typed_messages

for message in typed_messages():
    print("MESSAGE", json.dumps(message))
"""


def messages_of_keys(cache: Path, keys: bytes) -> list[str]:
    """Return the messages that a user types on a terminal by these keys, and then Ctrl-D."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TWOSTROKE_CACHE": str(cache), "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", _PRINT_MESSAGES],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        start_new_session=True,
    ):
        os.close(terminal)
        screen = b""
        while b"> " not in screen:
            screen += os.read(controller, 4096)
        os.write(controller, keys + b"\x04")
        try:
            while data := os.read(controller, 4096):
                screen += data
        except OSError:  # the program has ended
            os.close(controller)
    lines = screen.decode().splitlines()
    return [json.loads(line.partition("MESSAGE ")[2]) for line in lines if "MESSAGE " in line]


@pytest.mark.skipif(
    line_editor.readline is None or "libedit" in (line_editor.readline.__doc__ or ""),
    reason="Python has no GNU readline, which takes pasted texts of several lines",
)
@pytest.mark.parametrize("line_end", ["\r\n", "\n", "\r"])
def test_pasted_lines_have_one_line_break_each(tmp_path: Path, line_end: str) -> None:
    texts = ["a\nb\n\nc", "\n\nx\n", "one line"]
    pastes = [f"\x1b[200~{text}\x1b[201~\r".replace("\n", line_end) for text in texts]
    assert messages_of_keys(tmp_path, "".join(pastes).encode()) == texts
