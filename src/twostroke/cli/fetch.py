"""Fetching a model with a bar: what `pull` does, and every command that needs the model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.weights import Progress

_PHASES: Final = {
    "wait": "Waiting for another download of",
    "download": "Downloading",
    "unpack": "Unpacking",
    "verify": "Verifying",
}


class ProgressBar:
    """Shows a pull's phases as bars on standard error; says nothing when nobody watches."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._shown = sys.stderr.isatty()
        self._phase = ""

    def __enter__(self) -> Self:
        if self._shown:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TransferSpeedColumn,
            )

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(f"Fetching {self._name}", total=None)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._shown:
            self._bar.stop()

    def watch(self, progress: Progress) -> None:
        """Show how far the pull is."""
        if not self._shown:
            return
        if progress.phase != self._phase:
            self._phase = progress.phase
            self._bar.reset(self._task, description=f"{_PHASES[progress.phase]} {self._name}")
        self._bar.update(self._task, completed=progress.done_bytes, total=progress.total_bytes)


def fetch(model: str) -> Path:
    """Return where `model` lies; a catalogue model that is not in the cache is fetched first.

    Raises:
        ModelNotFoundError: neither a path nor a known name.
        DownloadError: it cannot be fetched whole.
    """
    from twostroke.weights import pull

    with ProgressBar(model) as bar:
        return pull(model, bar.watch)
