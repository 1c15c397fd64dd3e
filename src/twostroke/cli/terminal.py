"""Output on the terminal: safe text, tables, progress bars, Ctrl-C."""

from __future__ import annotations

import signal
import sys
import termios
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Coroutine, Iterator, Sequence
    from types import FrameType

    from rich.progress import Progress

T = TypeVar("T")
# Control characters, which would control the terminal, become visible symbols.
_CONTROLS: Final = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    0x0D: None,
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


def printable(text: str) -> str:
    """Return `text` with visible symbols in place of control characters, safe for a terminal."""
    return text.translate(_CONTROLS)


def show_table(lines: Sequence[tuple[str, ...]], right: Container[int] | None = None) -> None:
    """Print rows of cells as a table on standard output.

    The columns in `right` align right; by default all columns except the first do.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.rjust(width) if (index in right if right else index) else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        click.echo(printable("  ".join(cells).rstrip()))


class TerminalProgressBar:
    """A progress bar on standard error; without a terminal, no bar is shown."""

    def __init__(self, *, delay_s: float = 0.0, quiet: bool = False, counts: bool = False) -> None:
        """Prepare a bar that appears after `delay_s` seconds.

        With `quiet`, neither the bar nor the lines of `say` are shown. With `counts`, progress is
        shown as a number of items instead of bytes.
        """
        self._counts = counts
        self._visible_from_s = time.monotonic() + delay_s
        self._quiet, self._is_shown = quiet, not quiet and sys.stderr.isatty()
        self._progress: Progress | None = None
        self._label = ""

    def __enter__(self) -> Self:
        """Return the progress bar, which the `with` block removes at its end."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove the progress bar from the screen."""
        if self._progress is not None:
            self._progress.stop()

    def show(self, label: str, done_bytes: int, total_bytes: int | None) -> None:
        """Show a label and the progress; without `total_bytes`, there is no percentage."""
        if not self._is_shown or time.monotonic() < self._visible_from_s:
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
        """Print a line to standard error that stays; a progress bar continues below the line."""
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
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
    ]
    if counts:
        columns += (MofNCompleteColumn(), TimeRemainingColumn())
    else:
        columns += (DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    progress.add_task("", total=None)
    return progress


@contextmanager
def on_interrupt(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` at the first Ctrl-C in the block; a second Ctrl-C raises KeyboardInterrupt."""

    def handle_first(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        action()

    before = signal.signal(signal.SIGINT, handle_first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_in_event_loop(running: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop, and return its result.

    SIGTERM and SIGHUP cancel the coroutine, and then end the command with the exit code 128 + the
    signal's number. If a signal handler raised an exception instead, it could leave the event loop
    at any point, and transports, which need the loop, could not be closed.
    """
    import asyncio  # commands without an event loop start sooner without it

    received: list[int] = []

    async def run_until_signal() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel(number: int, _frame: FrameType | None) -> None:
            received.append(number)
            loop.call_soon_threadsafe(task.cancel)

        numbers = (signal.SIGTERM, signal.SIGHUP)
        handlers = {number: signal.getsignal(number) for number in numbers}
        caught = [
            number for number in numbers if callable(handlers[number])
        ]  # nohup ignores SIGHUP
        for number in caught:
            signal.signal(number, cancel)
        try:
            return await running
        finally:
            for number in caught:
                signal.signal(number, handlers[number])

    try:
        return asyncio.run(run_until_signal())
    except asyncio.CancelledError:
        if not received:
            raise
        sys.exit(128 + received[0])


@contextmanager
def no_echo() -> Iterator[None]:
    """Do not show the keys that the user types during the block; programs still receive them."""
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
