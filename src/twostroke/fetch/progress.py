"""Progress reports of downloads and checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a download or a check.

    `phase` is "choose" (`note` names the choice), "wait" (another process fetches the same model),
    "download", "unpack" or "verify". `total_bytes` is None while it is not known.
    """

    phase: str
    done_bytes: int = 0
    total_bytes: int | None = None
    note: str | None = None


Watcher: TypeAlias = "Callable[[Progress], None]"
# Returns the family of the model whose file begins as the path's, None if more is needed to tell;
# raises ModelFormatError, which calls the file by the name, for a model that cannot run here.
Inspect: TypeAlias = "Callable[[Path, str], str | None]"


def ignore(progress: Progress) -> None:
    """Watch nothing."""
    del progress
