"""Progress reports of downloads and checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class DownloadProgress(Frozen):
    """The state of a download or a check.

    `phase` is "choose" (`note` names the choice), "wait" (another process fetches the same model),
    "download", "unpack" or "verify". `total_bytes` is None while it is not known.
    """

    phase: str
    done_bytes: int = 0
    total_bytes: int | None = None
    note: str | None = None


Watcher: TypeAlias = "Callable[[DownloadProgress], None]"
# Takes the path of a file's beginning, and the file's name for errors. Returns the model's family,
# None if the beginning is too short; raises ModelFormatError if the model cannot run here.
Inspect: TypeAlias = "Callable[[Path, str], str | None]"


def ignore(progress: DownloadProgress) -> None:
    """Watch nothing."""
    del progress
