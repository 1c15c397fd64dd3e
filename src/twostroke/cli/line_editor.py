"""Reads the messages that a user types into `twostroke chat`, with GNU readline.

Readline edits the line, recalls messages of earlier conversations with the arrow keys, and takes a
pasted text of several lines as one message. Where Python has no `readline` module, the terminal's
own line input is used, without history. libedit, which some builds of Python have in place of GNU
readline, knows neither pastes of several lines nor Alt-Enter.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import click

from twostroke.core.env import cache_dir

try:
    import readline
except ImportError:  # Python was built without it
    readline = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_MAX_HISTORY_ENTRIES: Final = 1000  # of earlier conversations, that the arrow keys recall
_KEY_BINDINGS: Final = (
    "set enable-bracketed-paste on",
    r'"\e\C-m": "\C-v\C-j"',  # Alt-Enter inserts a line break
    r'"\e\C-j": "\C-v\C-j"',
)
_READ_KEY_TYPE: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_PASTE_BEGIN: Final = b"\x1b[200~"  # what terminals send before and after a pasted text
_PASTE_END: Final = b"\x1b[201~"


def typed_messages() -> Iterator[str]:
    """Yield the messages that the user types in `twostroke chat`, until Ctrl-D.

    Ctrl-C clears the line. Empty lines are skipped. Messages are kept in the file `chat_history` of
    the cache folder.
    """
    history_path = cache_dir() / "chat_history"
    if readline is not None:
        for binding in _KEY_BINDINGS:
            readline.parse_and_bind(binding)
        readline.set_auto_history(False)
        readline.clear_history()
        for entry in read_history(history_path):
            _recall(entry)
    while True:
        try:
            with _single_line_ends():
                message = input("> ")
        except KeyboardInterrupt:
            click.echo()  # the cleared line stays on the screen
            continue
        except EOFError:
            click.echo()
            return
        if message.strip():
            _recall(message)
            append_to_history(history_path, message)
            yield message


@contextmanager
def _single_line_ends() -> Iterator[None]:
    """Let readline read each CRLF of a pasted text as one line break, within the `with` block.

    Readline takes each CR and each LF as a line break, so a line that ends with both would be
    followed by an empty line. Python's module cannot change this. So the variable
    `rl_getc_function`, which points to the function by which readline reads each key, is replaced.
    """
    try:
        is_gnu = readline is not None and "libedit" not in (readline.__doc__ or "")
        library = ctypes.CDLL(getattr(readline, "__file__", None)) if is_gnu else None
        variable = ctypes.c_void_p.in_dll(library, "rl_getc_function") if library else None
    except (OSError, ValueError):  # Python contains a readline without public names
        variable = None
    if variable is None or variable.value is None:
        yield
        return
    address = variable.value
    read_key = _READ_KEY_TYPE(address)
    keys = bytearray()  # the last ones
    is_pasting = False

    def read_next(stream: int) -> int:
        nonlocal is_pasting
        key: int = read_key(stream)
        if key == ord("\n") and is_pasting and keys.endswith(b"\r"):
            key = read_key(stream)
        keys.append(key & 0xFF)
        del keys[: -len(_PASTE_BEGIN)]
        is_pasting = keys.endswith(_PASTE_BEGIN) or (is_pasting and not keys.endswith(_PASTE_END))
        return key

    callback = _READ_KEY_TYPE(read_next)
    variable.value = ctypes.cast(callback, ctypes.c_void_p).value
    try:
        yield
    finally:
        variable.value = address


def _recall(message: str) -> None:
    """Add a message to the history of the arrow keys, if readline can show it in this locale."""
    if readline is not None:
        with suppress(ValueError):  # characters that the locale lacks, or a null character
            readline.add_history(message)


def read_history(path: Path) -> Iterable[str]:
    """Return the last messages of a history file, oldest first; none if it cannot be read.

    An entry is a comment line with the time (`# ...`), then the message's lines, each after a `+`.
    """
    entries: deque[str] = deque(maxlen=_MAX_HISTORY_ENTRIES)
    lines: list[str] = []
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("+"):
                lines.append(line[1:].rstrip("\n"))
            elif lines:
                entries.append("\n".join(lines))
                lines = []
    if lines:
        entries.append("\n".join(lines))
    return entries


def append_to_history(path: Path, message: str) -> None:
    """Append a message to a history file; do nothing if the file cannot be written.

    A new file is readable by its owner only, since messages can be private.
    """
    lines = "".join(f"+{line}\n" for line in message.split("\n"))
    entry = f"\n# {time.strftime('%Y-%m-%d %H:%M:%S')}\n{lines}"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "w", encoding="utf-8", errors="replace") as stream:
            stream.write(entry)
