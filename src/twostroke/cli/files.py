"""Text from files that a user names; what goes wrong is one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        UsageError: it cannot be read, or is not UTF-8.
    """
    try:
        return decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"The file '{path}' cannot be read: {error.strerror}.") from None


def decoded(data: bytes, source: str) -> str:
    """Return bytes as text; `source` is what they come from.

    Raises:
        UsageError: they are not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        message = f"{source} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}."
        raise UsageError(message) from None
