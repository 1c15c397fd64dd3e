"""Stores files atomically: written under a temporary name, synced, and renamed."""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from functools import partial
from mmap import ACCESS_READ, mmap
from typing import TYPE_CHECKING, Final, Self

from twostroke.core.errors import TwostrokeError
from twostroke.core.files import open_regular_file

if TYPE_CHECKING:
    from pathlib import Path


class Folder:
    """The files of a records folder, by id. Its owner makes ids; they never come from clients."""

    def __init__(self, path: Path) -> None:
        """Use the folder `path`, which is made if it is not there; only its owner may read files.

        Raises:
            RecordsError: it cannot be made.
        """
        self._files, self._unfinished = path / "files", path / "unfinished"
        self.doubtful: set[str] = set()  # whose records may not have been kept
        try:
            for one in (path, self._files, self._unfinished):
                one.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise RecordsError(f"{one} is not a folder.") from None
        except OSError as error:
            raise explain(error, path) from None

    def path(self, id_: str) -> Path:
        """Return where a file is."""
        return self._files / id_

    def begin(self) -> Temporary:
        """Return a new file to write.

        Raises:
            RecordsError: it cannot be made.
        """
        return Temporary(self._unfinished / secrets.token_hex(8), self._files)

    def remove(self, id_: str) -> None:
        """Delete a file, if it is there; what cannot be deleted now is at the next start."""
        with suppress(OSError):
            self.path(id_).unlink(missing_ok=True)

    def ids(self) -> set[str]:
        """Return the ids of all files."""
        return {path.name for path in self._files.iterdir()}

    def remove_unfinished(self) -> None:
        """Delete files that were not written whole, which a crash has left."""
        for path in self._unfinished.iterdir():
            with suppress(OSError):
                path.unlink()


_READ_BYTES: Final = 1 << 20
new_hash: Final = partial(hashlib.blake2b, digest_size=16)


def has_digest(path: Path, digest: str) -> bool:
    """Return whether a file has this digest, or the digest is empty. Raises OSError."""
    if not digest:
        return True
    with open_regular_file(path, follows_links=False) as file:
        content_hash = new_hash()
        while data := file.read(_READ_BYTES):
            content_hash.update(data)
        return content_hash.hexdigest() == digest


class Temporary:
    """A file that is being written; it is deleted at the end of the block unless it was kept."""

    def __init__(self, path: Path, folder: Path) -> None:
        """Make it."""
        self.num_bytes = 0
        self._hash = new_hash()
        self._path, self._folder = path, folder
        try:
            self._file = path.open("x+b")
        except OSError as error:
            raise explain(error, path) from None

    def __enter__(self) -> Self:
        """Return the file."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Delete what was not kept."""
        with suppress(OSError):  # the rest cannot be written on a full disk
            self._file.close()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Append bytes; raises RecordsError."""
        try:
            self._file.write(data)
        except OSError as error:
            raise explain(error, self._path) from None
        self._hash.update(data)
        self.num_bytes += len(data)

    @property
    def digest(self) -> str:
        """The digest of the bytes that were written."""
        return self._hash.hexdigest()

    def read(self) -> mmap:
        """Return what was written, which is not nothing; raises RecordsError."""
        try:
            self._file.flush()
            return mmap(self._file.fileno(), 0, access=ACCESS_READ)
        except OSError as error:
            raise explain(error, self._path) from None

    def keep(self, id_: str) -> None:
        """Give the file its name, in place of an older one; then it survives a loss of power.

        Raises:
            RecordsError: the file may or may not have its name; doing all again is safe.
        """
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._path.replace(self._folder / id_)
            sync_folder(self._folder)
        except OSError as error:
            raise explain(error, self._folder / id_) from None


class FolderMarker:
    """A file of a records folder that says, apart from the database, what it once had."""

    def __init__(self, path: Path, name: str) -> None:
        """Use the file `name` of the folder `path`."""
        self.path = path / name

    @property
    def is_there(self) -> bool:
        """Whether it was made."""
        return self.path.exists()

    def make(self) -> None:
        """Make it, if it is not there; raises RecordsError."""
        try:
            if not self.is_there:
                self.path.touch(mode=0o600)
                sync_folder(self.path.parent)
        except OSError as error:
            raise explain(error, self.path) from None

    def remove(self) -> None:
        """Remove it, as far as the folder allows."""
        with suppress(OSError):
            self.path.unlink()


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a loss of power; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def explain(error: OSError, path: Path) -> RecordsError:
    """Return the error for a path that failed."""
    return RecordsError(f"{path} cannot be used: {error.strerror or error}.")


class RecordsError(TwostrokeError):
    """The database or a file cannot be read or written; the message has its path."""

    http_status = 503
    code = "records_unavailable"
