"""Fetches a model of the hub: chosen, refused early if it cannot run, and recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.files import file_size, megabytes
from twostroke.core.json_io import read_json
from twostroke.model.hub.disk import DownloadProgress, ModelFolder, file_sha256, ignore, locked
from twostroke.model.hub.file_selection import (
    CONFIG,
    INDEX,
    SAFETENSORS,
    FileSelection,
    add_weights,
    choose,
    quantization,
)
from twostroke.model.hub.hub import Hub, Listing
from twostroke.model.hub.records import ModelRecord, StoredFile, stored_records

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from twostroke.model.hub.disk import Inspect, Watcher
    from twostroke.model.hub.file_selection import RepoFile
    from twostroke.model.hub.names import HubName

# A GGUF file's table of contents ends within some megabytes: it is looked for at these sizes.
_INSPECTED_BYTES: Final = tuple(1 << power for power in (16, 20, 22, 23, 24, 25, 26))


def pull_from_hub(name: HubName, inspect: Inspect, watch: Watcher) -> ModelRecord:
    """Fetch the files that `name` asks for into the hub's cache; write and return their record.

    Raises:
        ModelNotFoundError: there is no such repository, revision or file.
        ModelFormatError: the model cannot run here; at most some megabytes were fetched.
        DownloadError: network, disk, rights or checksum failed; what has arrived is kept.
    """
    pull = _HubDownload(Hub(name), inspect, watch)
    with pull.place.filling(str(name), pull.kept):
        return pull.run()


class _HubDownload:
    """One download: `wanted` are its large files, of `total_bytes` that are not here yet."""

    def __init__(self, hub: Hub, inspect: Inspect, watch: Watcher) -> None:
        self.hub = hub
        self.name = hub.name
        self.inspect = inspect
        self.watch = watch
        self.place = ModelFolder(hub.cache, "HF_HOME")
        self.listing = Listing("", (), None)
        self.were_here: set[RepoFile] = set()
        self.wanted: list[RepoFile] = []
        self.total_bytes = 0

    def run(self) -> ModelRecord:
        self.listing = self.hub.listing()
        choice = choose(self.name, self.listing.files)
        if choice.note:
            self.watch(DownloadProgress("choose", note=choice.note))
        self.were_here = {file for file in self.listing.files if self.is_here(file)}
        if choice.entry is None:
            choice = self.fetch_small_files(choice)
        self.fetch(choice.files, choice.entry)
        if not self.listing.is_cached and not self.were_here.issuperset(choice.files):
            self.hub.remember(self.listing.commit)
        return self.record(choice)

    def path(self, name: str | None) -> Path:
        """Return the place of a file in the cache, or of the model's folder."""
        return self.hub.snapshot(self.listing.commit) / (name or "")

    def is_here(self, file: RepoFile) -> bool:
        return file_size(self.path(file.path)) == file.num_bytes

    def family(self, entry: str | None) -> str | None:
        """Return the model's family; ModelFormatError if it cannot run."""
        name = entry or CONFIG
        return self.inspect(self.path(name), name)

    def fetch_small_files(self, choice: FileSelection) -> FileSelection:
        """Fetch the configuration first, to refuse what cannot run; then find the weights."""
        self.fetch([file for file in choice.files if file.path == CONFIG])
        self.family(None)
        self.fetch(choice.files)
        has_index = any(file.path == INDEX for file in choice.files)
        index = read_json(self.path(INDEX)) if has_index else None
        return add_weights(choice, index, self.listing.files)

    def fetch(self, files: Sequence[RepoFile], entry: str | None = None) -> None:
        """Fetch the files that are missing; the GGUF file `entry` is inspected as it arrives."""
        missing = [file for file in files if not self.is_here(file)]
        if not missing:  # the cache may be read-only
            return
        self.place.folder.mkdir(parents=True, exist_ok=True)
        self.wanted = [file for file in missing if file.sha256]
        self.total_bytes = sum(file.num_bytes for file in self.wanted)
        self.place.need(str(self.name), sum(map(self.hub.missing_bytes, missing)))
        for file in missing:
            if file.sha256:
                self.transfer(file, is_entry=file.path == entry)
            self.hub.link(self.listing.commit, file)

    def transfer(self, file: RepoFile, *, is_entry: bool) -> None:
        before = sum(one.num_bytes for one in self.wanted[: self.wanted.index(file)])
        sizes = [*_INSPECTED_BYTES, file.num_bytes] if is_entry else []

        def grew(partial: Path, size: int) -> None:
            self.watch(
                DownloadProgress("download", min(before + size, self.total_bytes), self.total_bytes)
            )
            if sizes and size >= sizes[0]:
                is_known = self.inspect(partial, file.path) is not None
                sizes[:] = [] if is_known else [one for one in sizes if one > size]

        with locked(self.hub.lock(file), self.watch):
            self.hub.transfer(self.listing.commit, file, grew, self.watch)

    def kept(self) -> str:
        """Say how much of the wanted files has arrived."""
        kept = self.total_bytes - sum(map(self.hub.missing_bytes, self.wanted))
        if not kept:
            return "Nothing was kept."
        return f"{megabytes(kept)} are kept: pull again to continue."

    def record(self, choice: FileSelection) -> ModelRecord:
        """Write down what was fetched."""
        snapshot, path = self.path(None), self.path(choice.entry)
        old = next((one for one in stored_records() if one.path == path), None)
        number_format = choice.number_format
        if choice.entry is None:
            config = read_json(self.path(CONFIG))
            dtype = str(config.get("dtype") or config.get("torch_dtype"))
            short = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
            number_format = short.get(dtype, SAFETENSORS)
        selector = self.name.file
        if choice.note and choice.entry:  # the typed name fits others as well
            selector = quantization(choice.entry) or choice.entry
        record = ModelRecord(
            name=str(replace(self.name, file=selector)),
            title=f"{self.name.repo.split('/')[1]} ({number_format})",
            path=path,
            files=tuple(self.stored(file, old) for file in choice.files),
            source=(f"{self.hub.page}/tree/{self.listing.commit}",),
            licence=self.listing.licence or (old.licence if old else None),
            family=self.family(choice.entry),
            number_format=number_format,
            asked=tuple(dict.fromkeys((*(old.asked if old else ()), str(self.name)))),
            snapshot=snapshot,
        )
        record.write()
        return record

    def stored(self, file: RepoFile, old: ModelRecord | None) -> StoredFile:
        path = self.path(file.path)
        before = {one.path: one.ours for one in old.files} if old else {}
        ours = before.get(path, file not in self.were_here)
        return StoredFile(path, file.num_bytes, file.sha256 or file_sha256(path, ignore), ours)
