"""The key of an API in a file, which is read again when the file changes."""

from __future__ import annotations

import logging
import stat
import time
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import UsageError
from twostroke.core.files import read_regular_file
from twostroke.server.http.api_key import WORD_FORM, WORD_PATTERN

if TYPE_CHECKING:
    from pathlib import Path

_CHECK_INTERVAL_S: Final = 1.0
_OTHERS_MAY_READ: Final = stat.S_IRGRP | stat.S_IROTH
_logger = logging.getLogger("twostroke.router")


class KeyFile:
    """A file with the key of an API.

    No error or log message contains the key, nor does `repr` of the object.

    Attributes:
        num_changes: how often the file's key has changed.
    """

    def __init__(self, path: Path) -> None:
        """Read the key.

        Raises:
            UsageError: the file cannot be read, or does not have one key.
        """
        self.path = path
        self.num_changes = 0
        self._identity: tuple[int, ...] = ()
        self._checked_s = 0.0
        self._key = ""
        self._key = self._read()
        if path.stat().st_mode & _OTHERS_MAY_READ:
            _logger.warning("%s can be read by other users: run chmod 600 %s.", path, path)

    def key(self) -> str:
        """Return the key; reads the file again if it has changed, at most once a second.

        Raises:
            UsageError: the file cannot be read now, or does not have one key.
        """
        now_s = time.monotonic()
        if self._key and now_s - self._checked_s < _CHECK_INTERVAL_S:
            return self._key
        key = self._read()
        if key != self._key:
            self._key = key
            self.num_changes += 1
        return self._key

    def _read(self) -> str:
        self._checked_s = time.monotonic()
        try:
            status = self.path.stat()
            identity = (status.st_ino, status.st_mtime_ns, status.st_size)
            if self._key and identity == self._identity:
                return self._key
            words = read_regular_file(self.path).decode("ascii").split()
        except (OSError, UnicodeDecodeError) as error:
            self._key = ""
            reason = error.strerror if isinstance(error, OSError) else "a key is ASCII characters"
            raise UsageError(f"The key file {self.path} cannot be read: {reason}.") from None
        if len(words) != 1 or not WORD_PATTERN.fullmatch(words[0]):
            self._key = ""
            reason = "is empty" if not words else f"does not have one key of {WORD_FORM}"
            raise UsageError(f"The key file {self.path} {reason}.")
        self._identity = identity
        return words[0]
