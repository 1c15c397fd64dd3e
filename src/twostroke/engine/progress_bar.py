"""A progress bar for the Python interface: downloads, and prompts of a long list."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from twostroke.model.hub import DownloadProgress

_SHOW_AFTER_S: Final = 0.5  # shorter work shows no bar


class ProgressBar:
    """A progress bar on standard error, or in a notebook."""

    def __init__(self, *, is_on: bool | None = None, is_bytes: bool = False) -> None:
        """Show a bar if `is_on`; None shows one on a terminal or in a notebook only.

        With `is_bytes` the bar counts bytes.
        """
        self._is_on = _is_watched() if is_on is None else is_on
        self._show_after_s = 0.0 if is_on else _SHOW_AFTER_S
        self._is_bytes = is_bytes
        self._start_s = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        """Return the progress bar, which the `with` block stops at its end."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop the progress bar; its last state stays on the screen."""
        if self._bar is not None:
            self._bar.stop()

    def show(self, label: str, done: float, total: float | None, note: str = "") -> None:
        """Show that `done` of `total` is done; `note` is written after the bar."""
        if not self._is_on or time.monotonic() - self._start_s < self._show_after_s:
            return
        if self._bar is None or self._task is None:
            self._bar = _make_bar(is_bytes=self._is_bytes)
            self._task = self._bar.add_task(label, total=None, note="")
            self._bar.start()
        self._bar.update(self._task, description=label, completed=done, total=total, note=note)

    def show_fetch(self, progress: DownloadProgress) -> None:
        """Show the progress of a model's download."""
        if progress.phase != "choose":
            label = f"{progress.phase.capitalize()} model"
            self.show(label, progress.done_bytes, progress.total_bytes)


def _is_watched() -> bool:
    """Whether a person can see the bar: standard error is a terminal, or this is a notebook."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return is_terminal or "ipykernel" in sys.modules


def _make_bar(*, is_bytes: bool) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    progress = Progress(console=Console(stderr="ipykernel" not in sys.modules))
    progress.columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn() if is_bytes else MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    return progress
