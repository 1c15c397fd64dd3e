"""Fetches what a model of the hub says before its weights: some megabytes of any model.

Files get their whole size, with holes where the weights would be. Readers of whole files read
their headers; what they would read of the weights is zeros.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, TypeAlias

from twostroke.core.errors import ModelFormatError
from twostroke.core.json_io import read_json
from twostroke.model.hub.file_selection import CONFIG, INDEX, TOKENIZER, add_weights, choose
from twostroke.model.hub.hub import Hub

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from twostroke.model.hub.file_selection import FileSelection, RepoFile
    from twostroke.model.hub.names import HubName

    # Returns the ranges (start, size) that are needed besides the header; None if it is cut off.
    Inspect: TypeAlias = Callable[[Path, str], list[tuple[int, int]] | None]

_SIZES: Final = tuple(1 << power for power in (16, 20, 22, 24, 26))  # at which a header is sought
_LENGTH_BYTES: Final = 8  # before a safetensors header
_MAX_HEADER_BYTES: Final = 1 << 24


def fetch_headers(name: HubName, folder: Path, inspect: Inspect) -> Path:
    """Fetch configuration and headers into an empty `folder`; return the path of the model.

    `inspect` reads the beginning of a GGUF file.

    Raises:
        ModelNotFoundError: there is no such repository, revision or file.
        ModelFormatError: a header is damaged.
        DownloadError: the hub cannot be reached, or the model may not be read.
    """
    heads = _Heads(Hub(name), folder)
    return heads.fetch(name, inspect)


class _Heads:
    def __init__(self, hub: Hub, folder: Path) -> None:
        self._hub, self._folder = hub, folder
        self._listing = hub.listing()

    def fetch(self, name: HubName, inspect: Inspect) -> Path:
        choice = choose(name, self._listing.files)
        if choice.entry is None:
            self._fetch_folder(choice)
            return self._folder
        for file in choice.files:
            self._fetch_gguf(file, inspect)
        return self._path(choice.entry)

    def _fetch_folder(self, choice: FileSelection) -> None:
        for file in choice.files:
            if file.path in {CONFIG, INDEX}:
                self._read(file, 0, file.num_bytes)
        has_index = self._path(INDEX).exists()
        index = read_json(self._path(INDEX)) if has_index else None
        for file in add_weights(choice, index, self._listing.files).files:
            if file.path.endswith(".safetensors"):
                length = int.from_bytes(self._read(file, 0, _LENGTH_BYTES), "little")
                if length > min(_MAX_HEADER_BYTES, file.num_bytes):
                    raise ModelFormatError(f"{file.path!r} has a header of {length} bytes.")
                self._read(file, _LENGTH_BYTES, length)
        self._path(TOKENIZER).touch()

    def _fetch_gguf(self, file: RepoFile, inspect: Inspect) -> None:
        """Fetch more and more of a file until its header is whole."""
        size = 0
        for upto in (*_SIZES, file.num_bytes):
            end = min(upto, file.num_bytes)
            self._read(file, size, end - size, whole=False)
            size, ranges = end, inspect(self._path(file.path), file.path)
            if ranges is not None or size == file.num_bytes:
                break
        os.truncate(self._path(file.path), file.num_bytes)
        for start, num_bytes in ranges or ():
            self._read(file, start, num_bytes)

    def _read(self, file: RepoFile, start: int, num_bytes: int, *, whole: bool = True) -> bytes:
        """Fetch a range into its place in the file, which gets its whole size if `whole`."""
        path = self._path(file.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = self._hub.read_range(self._listing.commit, file, start, num_bytes)
        with path.open("r+b" if path.exists() else "wb") as out:
            out.seek(start)
            out.write(content)
            if whole:
                out.truncate(file.num_bytes)
        return content

    def _path(self, name: str) -> Path:
        return self._folder / name
