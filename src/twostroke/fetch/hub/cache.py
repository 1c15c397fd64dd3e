"""The hub's own cache folder, shared with every other program that uses it.

Its layout, from huggingface_hub's guide "Understand caching": for each repository, `blobs/` holds
the files by their digests, `snapshots/<commit>/` links to them by name, `refs/` says which commit
a revision was.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.core.files import write_text
from twostroke.fetch.disk import is_locked
from twostroke.fetch.hub.choice import RepoFile
from twostroke.fetch.hub.names import is_safe_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from twostroke.fetch.hub.names import HubName

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RepoCache:
    """The part of the cache at `root` that belongs to one repository."""

    root: Path
    repo: str

    @property
    def folder(self) -> Path:
        """The repository's folder."""
        return self.root / f"models--{self.repo.replace('/', '--')}"

    def blob(self, file: RepoFile) -> Path:
        """Where the file's bytes lie once they are whole."""
        return self.folder / "blobs" / file.digest

    def partial(self, file: RepoFile) -> Path:
        """Where they gather until then."""
        return self.folder / "blobs" / f"{file.digest}.incomplete"

    def lock(self, file: RepoFile) -> Path:
        """The lock that huggingface_hub takes as well."""
        return self.root / ".locks" / self.folder.name / f"{file.digest}.lock"

    def snapshot(self, commit: str) -> Path:
        """The folder of a commit's files."""
        return self.folder / "snapshots" / commit

    def has(self, commit: str, file: RepoFile) -> bool:
        """Whether the file is there, by its size."""
        return _size(self.snapshot(commit) / file.path) == file.num_bytes

    def has_blob(self, file: RepoFile) -> bool:
        """Whether the file's bytes are there, perhaps of another commit."""
        return _size(self.blob(file)) == file.num_bytes

    def link(self, commit: str, file: RepoFile) -> None:
        """Make the file's name in the snapshot stand for its blob."""
        pointer, blob = self.snapshot(commit) / file.path, self.blob(file)
        pointer.parent.mkdir(parents=True, exist_ok=True)
        pointer.unlink(missing_ok=True)
        try:
            pointer.symlink_to(os.path.relpath(blob, pointer.parent))
        except FileExistsError:  # another program was as quick
            return
        except OSError:  # a file system without links: the hub's client moves the blob as well
            blob.replace(pointer)

    def remember(self, name: HubName, commit: str) -> None:
        """Note which commit a revision was."""
        ref = self.folder / "refs" / name.revision
        if name.revision == commit:
            return
        ref.parent.mkdir(parents=True, exist_ok=True)
        write_text(ref, commit)

    def known(self, name: HubName) -> tuple[str, tuple[RepoFile, ...]] | None:
        """Return the commit and the files that the cache has of a revision, without asking."""
        commit = name.revision
        if not _COMMIT.fullmatch(commit):
            try:
                commit = (self.folder / "refs" / name.revision).read_text().strip()
            except (OSError, ValueError):
                return None
        snapshot = self.snapshot(commit)
        if not _COMMIT.fullmatch(commit) or not snapshot.is_dir():
            return None
        files = []
        for path in sorted(snapshot.rglob("*")):
            inside = path.relative_to(snapshot).as_posix()
            if path.is_file() and is_safe_path(inside):
                digest = path.readlink().name if path.is_symlink() else ""
                files.append(RepoFile(inside, path.stat().st_size, digest))
        return commit, tuple(files)


def forget(pointer: Path, snapshot: Path) -> int:
    """Remove a file of a snapshot, and its blob if nothing else links to it; return bytes freed."""
    repo = snapshot.parent.parent
    blob = pointer.parent / pointer.readlink() if pointer.is_symlink() else None
    freed = 0 if blob else pointer.lstat().st_size
    pointer.unlink()
    if blob is not None and not _is_linked(repo, blob):
        freed = _size(blob) or 0
        blob.unlink(missing_ok=True)
    _prune(pointer.parent, snapshot.parent)
    if not snapshot.exists():
        for ref in [path for path in (repo / "refs").rglob("*") if path.is_file()]:
            if ref.read_text().strip() == snapshot.name:
                ref.unlink()
                _prune(ref.parent, repo)
    for folder in ("snapshots", "blobs", "refs"):
        _prune(repo / folder, repo.parent)
    return freed


def find_partials(roots: Iterable[Path]) -> Iterator[Path]:
    """Yield what interrupted downloads have left in the hub's caches; not what still arrives."""
    for root in roots:
        for path in sorted(root.glob("models--*/blobs/*.incomplete")):
            lock = root / ".locks" / path.parents[1].name / f"{path.stem}.lock"
            if _DIGEST.fullmatch(path.stem) and not (lock.exists() and is_locked(lock)):
                yield path


def drop_partial(path: Path) -> None:
    """Delete what an interrupted download has left, and the folders that this empties."""
    path.unlink(missing_ok=True)
    _prune(path.parent, path.parents[2])


def _is_linked(repo: Path, blob: Path) -> bool:
    name = blob.name
    links = (path for path in (repo / "snapshots").rglob("*") if path.is_symlink())
    return any(path.readlink().name == name for path in links)


def _prune(folder: Path, end: Path) -> None:
    """Remove empty folders from `folder` up to, and not including, `end`."""
    while folder != end:
        try:
            folder.rmdir()
        except OSError:  # it is not empty, or gone
            return
        folder = folder.parent


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
