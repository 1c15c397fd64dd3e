"""Stored files, which appear only when complete: written to a temporary name, synced, renamed."""

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
    """The stored files of a server, by id, in the folder of `--records`.

    The server makes the ids; clients never choose them.
    """

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
        """Return the path of the stored file with this id, whether it exists or not."""
        return self._files / id_

    def begin(self) -> Temporary:
        """Create a temporary file, which becomes a stored file when its content is complete.

        Raises:
            RecordsError: the file cannot be created.
        """
        return Temporary(self._unfinished / secrets.token_hex(8), self._files)

    def remove(self, id_: str) -> None:
        """Delete a stored file if it exists.

        If the deletion fails, the next start of the server deletes the file.
        """
        with suppress(OSError):
            self.path(id_).unlink(missing_ok=True)

    def ids(self) -> set[str]:
        """Return the ids of all stored files."""
        return {path.name for path in self._files.iterdir()}

    def remove_unfinished(self) -> None:
        """Delete the temporary files that a crash of the server has left."""
        for path in self._unfinished.iterdir():
            with suppress(OSError):
                path.unlink()


_READ_BYTES: Final = 1 << 20
new_hash: Final = partial(hashlib.blake2b, digest_size=16)


def has_digest(path: Path, digest: str) -> bool:
    """Check whether a stored file's content has the expected BLAKE2b digest, in hexadecimal.

    An empty digest matches every file.

    Raises:
        OSError: the file cannot be read.
    """
    if not digest:
        return True
    with open_regular_file(path, follows_links=False) as file:
        content_hash = new_hash()
        while data := file.read(_READ_BYTES):
            content_hash.update(data)
        return content_hash.hexdigest() == digest


class Temporary:
    """A stored file that is still being written, under a temporary name.

    Use it as a context manager: leaving the block deletes the file, unless `keep` was called.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        """Create an empty file at `path`; `keep` later moves it into `folder`."""
        self.num_bytes = 0
        self._hash = new_hash()
        self._path = path
        self._folder = folder
        try:
            self._file = path.open("x+b")
        except OSError as error:
            raise explain(error, path) from None

    def __enter__(self) -> Self:
        """Return this temporary file."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the temporary file, and delete it unless `keep` was called."""
        with suppress(OSError):  # on a full disk, buffered bytes cannot be written
            self._file.close()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Append bytes to the temporary file.

        Raises:
            RecordsError: the disk fails.
        """
        try:
            self._file.write(data)
        except OSError as error:
            raise explain(error, self._path) from None
        self._hash.update(data)
        self.num_bytes += len(data)

    @property
    def digest(self) -> str:
        """The BLAKE2b digest of the bytes written so far, in hexadecimal digits."""
        return self._hash.hexdigest()

    def read(self) -> mmap:
        """Map the bytes written so far, at least one, into memory.

        Raises:
            RecordsError: the file cannot be read.
        """
        try:
            self._file.flush()
            return mmap(self._file.fileno(), 0, access=ACCESS_READ)
        except OSError as error:
            raise explain(error, self._path) from None

    def keep(self, id_: str) -> None:
        """Sync the temporary file to the disk, and move it to its final name, `id_`.

        An older file with this id is replaced.

        Raises:
            RecordsError: the disk fails; the file may have its final name or not. A retry is safe.
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
    """An empty file in the folder of `--records`, whose existence notes a fact.

    Unlike a row of the database, the fact survives the loss of the database.
    """

    def __init__(self, path: Path, name: str) -> None:
        """Use the marker file `name` in the folder `path`, without creating it."""
        self.path = path / name

    @property
    def is_there(self) -> bool:
        """Whether the marker file exists."""
        return self.path.exists()

    def make(self) -> None:
        """Create the marker's empty file in the records folder, if it does not exist.

        Raises:
            RecordsError: the file cannot be created.
        """
        try:
            if not self.is_there:
                self.path.touch(mode=0o600)
                sync_folder(self.path.parent)
        except OSError as error:
            raise explain(error, self.path) from None

    def remove(self) -> None:
        """Delete the marker file; errors are ignored."""
        with suppress(OSError):
            self.path.unlink()


def sync_folder(path: Path) -> None:
    """Sync a folder to the disk, so that new file names survive a power loss.

    Raises:
        OSError: the folder cannot be synced.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def explain(error: OSError, path: Path) -> RecordsError:
    """Return a RecordsError that says which path failed, and why, from an OSError."""
    return RecordsError(f"{path} cannot be used: {error.strerror or error}.")


class RecordsError(TwostrokeError):
    """The database or a stored file cannot be read or written; the message has its path."""

    http_status = 503
    code = "records_unavailable"
