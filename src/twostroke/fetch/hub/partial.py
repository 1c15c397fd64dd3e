"""A file that is still arriving: it grows at its end, survives interruptions, and is checked."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Self

from twostroke.core.errors import DownloadError
from twostroke.fetch.disk import mega, sync_folder
from twostroke.fetch.progress import CHUNK_BYTES, Progress

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.fetch.hub.choice import RepoFile
    from twostroke.fetch.progress import Watcher


class PartialFile:
    """The first `size` bytes of `file`, gathered at `path`."""

    def __init__(self, path: Path, file: RepoFile, watch: Watcher) -> None:
        """Take up what is there already."""
        self.path = path
        self.name = file.path
        self.size = 0
        self._file = file
        self._watch = watch
        self._restart_digest()

    def __enter__(self) -> Self:
        """Open it, and hash what is there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: what was counted is in the file, also when the disk is full.
        self._out = self.path.open("a+b", buffering=0)
        if self.path.stat().st_size > self._file.num_bytes:
            self._out.truncate(0)
        self._out.seek(0)
        while chunk := self._out.read(CHUNK_BYTES):
            self._digest.update(chunk)
            self.size += len(chunk)
            self._watch(Progress("verify", self.size, self._file.num_bytes))
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it; what has arrived stays."""
        # By the file itself: an interruption can come between a write and its being counted.
        is_empty = self._out.seek(0, os.SEEK_END) == 0
        self._out.close()
        if is_empty:
            self.drop()

    def write(self, offset: int, chunk: bytes) -> None:
        """Append bytes that begin at `offset`: the end, or 0 to begin anew."""
        if offset != self.size:
            self._out.truncate(0)
            self.size = 0
            self._restart_digest()
        if offset + len(chunk) > self._file.num_bytes:
            self.drop()
            raise DownloadError(
                f"{self._file.path!r} is larger than the {mega(self._file.num_bytes)} that the hub "
                "announced: try again."
            )
        rest = memoryview(chunk)
        while rest:
            written = self._out.write(rest)
            self._digest.update(rest[:written])
            self.size += written
            rest = rest[written:]

    def finish(self, target: Path) -> None:
        """Check the digest and give the file its final name; DownloadError if it is another."""
        if self._digest.hexdigest() != self._file.digest:
            self.drop()
            raise DownloadError(
                f"{self._file.path!r} arrived with a wrong checksum, and was dropped: try again; "
                "if it happens again, the hub or a mirror (HF_ENDPOINT) sends damaged files."
            )
        os.fsync(self._out.fileno())
        self.path.replace(target)
        sync_folder(target.parent)

    def drop(self) -> None:
        """Remove what has arrived."""
        self.path.unlink(missing_ok=True)

    def _restart_digest(self) -> None:
        if len(self._file.digest) == 64:
            self._digest = hashlib.sha256()
            return
        # Git's name of a small file: the SHA-1 of this and of its bytes.
        self._digest = hashlib.sha1(usedforsecurity=False)
        self._digest.update(b"blob %d\0" % self._file.num_bytes)
