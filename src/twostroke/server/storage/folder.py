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
    """The files of a records folder, by id. The caller makes the ids; clients never choose them."""

    def __init__(self, path: Path) -> None:
        """Use the folder `path`, and create it if necessary, readable by its owner only.

        Raises:
            RecordsError: the folder cannot be created.
        """
        self._files = path / "files"
        self._unfinished = path / "unfinished"
        self.doubtful: set[str] = set()  # ids of files whose database rows may be missing
        try:
            for folder in (path, self._files, self._unfinished):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise RecordsError(f"{folder} is not a folder.") from None
        except OSError as error:
            raise explain(error, path) from None

    def path(self, id_: str) -> Path:
        """Return the path of the file with this id."""
        return self._files / id_

    def begin(self) -> Temporary:
        """Return a new temporary file to write to.

        Raises:
            RecordsError: the file cannot be created.
        """
        return Temporary(self._unfinished / secrets.token_hex(8), self._files)

    def remove(self, id_: str) -> None:
        """Delete a file if it exists; if that fails, the next start of the server deletes it."""
        with suppress(OSError):
            self.path(id_).unlink(missing_ok=True)

    def ids(self) -> set[str]:
        """Return the ids of all files."""
        return {path.name for path in self._files.iterdir()}

    def remove_unfinished(self) -> None:
        """Delete temporary files that a crash has left."""
        for path in self._unfinished.iterdir():
            with suppress(OSError):
                path.unlink()


_READ_BYTES: Final = 1 << 20
new_hash: Final = partial(hashlib.blake2b, digest_size=16)


def has_digest(path: Path, digest: str) -> bool:
    """Whether a file has this digest; an empty digest matches every file. Raises OSError."""
    if not digest:
        return True
    with open_regular_file(path, follows_links=False) as file:
        content_hash = new_hash()
        while data := file.read(_READ_BYTES):
            content_hash.update(data)
        return content_hash.hexdigest() == digest


class Temporary:
    """A file that is being written; leaving its `with` block deletes it unless it was kept."""

    def __init__(self, path: Path, folder: Path) -> None:
        """Create the file at `path`; `keep` moves it into `folder`."""
        self.num_bytes = 0
        self._hash = new_hash()
        self._path = path
        self._folder = folder
        try:
            self._file = path.open("x+b")
        except OSError as error:
            raise explain(error, path) from None

    def __enter__(self) -> Self:
        """Return this file."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the file, and delete it unless it was kept."""
        with suppress(OSError):  # on a full disk, buffered bytes cannot be written
            self._file.close()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Append bytes. Raises RecordsError."""
        try:
            self._file.write(data)
        except OSError as error:
            raise explain(error, self._path) from None
        self._hash.update(data)
        self.num_bytes += len(data)

    @property
    def digest(self) -> str:
        """The digest of the bytes written so far, as hexadecimal digits."""
        return self._hash.hexdigest()

    def read(self) -> mmap:
        """Map the written bytes, at least one, into memory. Raises RecordsError."""
        try:
            self._file.flush()
            return mmap(self._file.fileno(), 0, access=ACCESS_READ)
        except OSError as error:
            raise explain(error, self._path) from None

    def keep(self, id_: str) -> None:
        """Move the file to its final name and sync it; an older file of that name is replaced.

        Raises:
            RecordsError: the file may or may not have its final name; a retry is safe.
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
    """An empty file in a records folder that notes a fact outside of the database."""

    def __init__(self, path: Path, name: str) -> None:
        """Use the file `name` of the folder `path`."""
        self.path = path / name

    @property
    def is_there(self) -> bool:
        """Whether the file exists."""
        return self.path.exists()

    def make(self) -> None:
        """Create the file if it does not exist. Raises RecordsError."""
        try:
            if not self.is_there:
                self.path.touch(mode=0o600)
                sync_folder(self.path.parent)
        except OSError as error:
            raise explain(error, self.path) from None

    def remove(self) -> None:
        """Delete the file; errors are ignored."""
        with suppress(OSError):
            self.path.unlink()


def sync_folder(path: Path) -> None:
    """Sync a folder, so that its new names survive a loss of power. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def explain(error: OSError, path: Path) -> RecordsError:
    """Return the error about a path that the operating system cannot use."""
    return RecordsError(f"{path} cannot be used: {error.strerror or error}.")


class RecordsError(TwostrokeError):
    """The database or a file cannot be read or written; the message has its path."""

    http_status = 503
    code = "records_unavailable"
