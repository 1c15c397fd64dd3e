"""What the commands show on the terminal: safe text, tables, progress bars."""

from __future__ import annotations

import signal
import sys
import termios
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Self

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from rich.progress import Progress

# Control characters, which terminals obey, become pictures of them.
_CONTROLS: Final = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    0x0D: None,
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


def printable(text: str) -> str:
    """Return `text` without characters that would control a terminal."""
    return text.translate(_CONTROLS)


def show_table(lines: Sequence[tuple[str, ...]], right: Container[int] | None = None) -> None:
    """Print rows of cells; the columns `right`, or all but the first, are aligned right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.rjust(width) if (index in right if right else index) else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        click.echo(printable("  ".join(cells).rstrip()))


class Bar:
    """A progress bar of bytes, or of things, on standard error, if that is a terminal."""

    def __init__(
        self, *, patience_s: float = 0.0, quiet: bool = False, counts: bool = False
    ) -> None:
        """Appear after `patience_s` seconds; never, and write no lines, if `quiet`.

        With `counts` numbers are of things and not of bytes.
        """
        self._counts = counts
        self._from_s = time.monotonic() + patience_s
        self._quiet, self._is_shown = quiet, not quiet and sys.stderr.isatty()
        self._progress: Progress | None = None
        self._label = ""

    def __enter__(self) -> Self:
        """Show it while the block runs."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Take it off the screen."""
        if self._progress is not None:
            self._progress.stop()

    def show(self, label: str, done_bytes: int, total_bytes: int | None) -> None:
        """Show what is being done and how far it is."""
        if not self._is_shown or time.monotonic() < self._from_s:
            return
        if self._progress is None:
            self._progress = _progress(counts=self._counts)
            self._progress.start()
        progress, task = self._progress, self._progress.task_ids[0]
        if label != self._label:
            self._label = label
            progress.reset(task, description=printable(label))
        progress.update(task, completed=done_bytes, total=total_bytes)

    def say(self, text: str) -> None:
        """Write a line on standard error that stays; above the bar, if there is one."""
        if self._progress is not None:
            self._progress.console.print(printable(text), markup=False, highlight=False)
        elif not self._quiet:
            sys.stderr.write(f"{printable(text)}\n")


def _progress(*, counts: bool) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    of_bytes = (DownloadColumn(), TransferSpeedColumn())
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *((MofNCompleteColumn(), TimeRemainingColumn()) if counts else of_bytes),
        console=Console(stderr=True),
        transient=True,
    )
    progress.add_task("", total=None)
    return progress


@contextmanager
def on_interrupt(action: Callable[[], None]) -> Iterator[None]:
    """While the block runs, the first Ctrl-C calls `action`; the next one raises as usual."""

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        action()

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def no_echo() -> Iterator[None]:
    """While the block runs, the terminal does not show keys; programs still receive them."""
    try:
        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
    except (OSError, ValueError, termios.error):  # not a terminal
        yield
        return
    silent = before.copy()
    silent[3] &= ~termios.ECHO  # 3: the local modes
    termios.tcsetattr(keyboard, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSANOW, before)
