"""Progress reports of downloads and checks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHUNK_BYTES = 1 << 20


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


def file_sha256(path: Path, watch: Watcher, before: int = 0, total_bytes: int | None = None) -> str:
    """Return the SHA-256 of a file, in hexadecimal.

    If it is one of several, `before` bytes of `total_bytes` were checked before it.
    """
    digest, done = hashlib.sha256(), before
    total = path.stat().st_size if total_bytes is None else total_bytes
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            watch(Progress("verify", done, total))
    return digest.hexdigest()
