"""Fetches only the configuration and headers of a model on the hub: a few megabytes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, TypeAlias

from twostroke.core.errors import ModelFormatError
from twostroke.core.json_io import read_json
from twostroke.core.message_text import counted_noun
from twostroke.model.hub.file_selection import (
    CONFIG,
    INDEX,
    TOKENIZER,
    add_weights,
    choose_files,
    gguf_selections,
)
from twostroke.model.hub.hub import Hub

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from twostroke.model.hub.file_selection import FileSelection, RepoFile
    from twostroke.model.hub.names import HubName

    # Returns needed ranges (start, size) after the header; None if the header is incomplete.
    Inspect: TypeAlias = Callable[[Path, str], list[tuple[int, int]] | None]

_TRIED_BYTES: Final = tuple(
    1 << power for power in (16, 20, 22, 24, 26)
)  # try to read a header after these
_LENGTH_BYTES: Final = 8  # of the length before a safetensors header
_MAX_HEADER_BYTES: Final = 1 << 24


def fetch_headers(name: HubName, folder: Path, inspect: Inspect) -> Path:
    """Fetch only a hub model's configuration and headers into an empty folder.

    `twostroke plan` uses this to describe a model without downloading its weights. Returns the path
    of the model. `inspect` reads the beginning of a GGUF file.

    Raises:
        ModelNotFoundError: there is no such repository, revision or file.
        ModelFormatError: a header is damaged.
        DownloadError: the hub cannot be reached, or the user may not read the model.
    """
    download = _HeaderDownload(Hub(name), folder)
    return download.fetch(name, inspect)


def list_gguf_models(name: HubName) -> list[FileSelection]:
    """Return the GGUF models of a hub repository from its listing.

    If `name` has a file, only this model is returned.

    Raises the errors of `fetch_headers`.
    """
    return gguf_selections(name, Hub(name).listing().files)


class _HeaderDownload:
    def __init__(self, hub: Hub, folder: Path) -> None:
        self._hub = hub
        self._folder = folder
        self._listing = hub.listing()

    def fetch(self, name: HubName, inspect: Inspect) -> Path:
        selection = choose_files(name, self._listing.files)
        if selection.entry is None:
            self._fetch_folder(selection)
            return self._folder
        for file in selection.files:
            self._fetch_gguf(file, inspect)
        return self._path(selection.entry)

    def _fetch_folder(self, selection: FileSelection) -> None:
        for file in selection.files:
            if file.path in {CONFIG, INDEX}:
                self._fetch_range(file, 0, file.num_bytes)
        has_index = self._path(INDEX).exists()
        index = read_json(self._path(INDEX)) if has_index else None
        for file in add_weights(selection, index, self._listing.files).files:
            if file.path.endswith(".safetensors"):
                length = int.from_bytes(self._fetch_range(file, 0, _LENGTH_BYTES), "little")
                if length > min(_MAX_HEADER_BYTES, file.num_bytes):
                    raise ModelFormatError(
                        f"{file.path!r} has a header of {counted_noun(length, 'byte')}."
                    )
                self._fetch_range(file, _LENGTH_BYTES, length)
        self._path(TOKENIZER).touch()

    def _fetch_gguf(self, file: RepoFile, inspect: Inspect) -> None:
        """Fetch larger and larger beginnings of a GGUF file until its header is complete."""
        size = 0
        for limit in (*_TRIED_BYTES, file.num_bytes):
            end = min(limit, file.num_bytes)
            self._fetch_range(file, size, end - size, set_size=False)
            size = end
            ranges = inspect(self._path(file.path), file.path)
            if ranges is not None or size == file.num_bytes:
                break
        os.truncate(self._path(file.path), file.num_bytes)
        for start, num_bytes in ranges or ():
            self._fetch_range(file, start, num_bytes)

    def _fetch_range(
        self, file: RepoFile, start: int, num_bytes: int, *, set_size: bool = True
    ) -> bytes:
        """Fetch a byte range of a hub file into the local copy of the file; return the bytes.

        With `set_size` the local copy gets the size of the whole file; bytes that were not fetched
        are 0.
        """
        path = self._path(file.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = self._hub.read_range(self._listing.commit, file, start, num_bytes)
        with path.open("r+b" if path.exists() else "wb") as out:
            out.seek(start)
            out.write(content)
            if set_size:
                out.truncate(file.num_bytes)
        return content

    def _path(self, name: str) -> Path:
        return self._folder / name
