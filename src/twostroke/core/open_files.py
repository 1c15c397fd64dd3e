"""How many files and connections this process may have open."""

from __future__ import annotations

import resource
from typing import Final

_MOST_FILES: Final = 1 << 16  # if the system lets it


def allow_files() -> int:
    """Raise the limit of open files, which shells set low; return how many there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(_MOST_FILES, hard) if hard >= 0 else _MOST_FILES  # -1 is none
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
