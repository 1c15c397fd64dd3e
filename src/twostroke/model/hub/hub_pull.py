"""Downloads a model of the Hugging Face hub: selects its files, and writes its record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.files import file_size
from twostroke.core.json_io import read_json
from twostroke.core.message_text import format_bytes
from twostroke.model.hub.disk import (
    DownloadProgress,
    ModelFolder,
    file_sha256,
    ignore_progress,
    locked,
)
from twostroke.model.hub.file_selection import (
    CONFIG,
    INDEX,
    SAFETENSORS,
    FileSelection,
    add_weights,
    choose_files,
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

# A GGUF file's header ends within some megabytes: try to read it at these sizes.
_INSPECTED_BYTES: Final = tuple(1 << power for power in (16, 20, 22, 23, 24, 25, 26))


def pull_from_hub(name: HubName, inspect: Inspect, watch: Watcher) -> ModelRecord:
    """Download the files of a hub model into the hub's cache; write and return its record.

    Raises:
        ModelNotFoundError: there is no such repository, revision or file.
        ModelFormatError: the model cannot run here; at most some megabytes were fetched.
        DownloadError: network, disk, rights or checksum failed; the received part is kept.
    """
    download = _HubDownload(Hub(name), inspect, watch)
    with download.cache_folder.report_failures(str(name), download.describe_kept):
        return download.run()


class _HubDownload:
    """The download of one model from the Hugging Face hub.

    `large_files` are the large files that must still be downloaded, and `total_bytes` is their size
    together.
    """

    def __init__(self, hub: Hub, inspect: Inspect, watch: Watcher) -> None:
        self.hub = hub
        self.name = hub.name
        self.inspect = inspect
        self.watch = watch
        self.cache_folder = ModelFolder(hub.cache, "HF_HOME")
        self.listing = Listing("", (), None)
        self.existing_files: set[RepoFile] = set()
        self.large_files: list[RepoFile] = []
        self.total_bytes = 0

    def run(self) -> ModelRecord:
        self.listing = self.hub.listing()
        selection = choose_files(self.name, self.listing.files)
        if selection.note:
            self.watch(DownloadProgress("choose", note=selection.note))
        self.existing_files = {file for file in self.listing.files if self.is_here(file)}
        if selection.entry is None:
            selection = self.fetch_small_files(selection)
        self.fetch(selection.files, selection.entry)
        if not self.listing.is_cached and not self.existing_files.issuperset(selection.files):
            self.hub.remember(self.listing.commit)
        return self.record(selection)

    def path(self, name: str | None) -> Path:
        """Return the path of one of the model's files in the hub's cache.

        For None, return the model's folder.
        """
        return self.hub.snapshot(self.listing.commit) / (name or "")

    def is_here(self, file: RepoFile) -> bool:
        return file_size(self.path(file.path)) == file.num_bytes

    def family(self, entry: str | None) -> str | None:
        """Return the family of the downloaded model, such as "llama".

        Raises ModelFormatError if the model cannot run here.
        """
        name = entry or CONFIG
        return self.inspect(self.path(name), name)

    def fetch_small_files(self, selection: FileSelection) -> FileSelection:
        """Fetch a safetensors model's configuration and tokenizer, then select its weight files.

        Raises ModelFormatError if the model is not supported, before its weights are fetched.
        """
        self.fetch([file for file in selection.files if file.path == CONFIG])
        self.family(None)
        self.fetch(selection.files)
        has_index = any(file.path == INDEX for file in selection.files)
        index = read_json(self.path(INDEX)) if has_index else None
        return add_weights(selection, index, self.listing.files)

    def fetch(self, files: Sequence[RepoFile], entry: str | None = None) -> None:
        """Fetch the model's missing files; the GGUF file `entry` is inspected while it arrives."""
        missing = [file for file in files if not self.is_here(file)]
        if not missing:  # the cache may be read-only
            return
        self.cache_folder.folder.mkdir(parents=True, exist_ok=True)
        self.large_files = [file for file in missing if file.sha256]
        self.total_bytes = sum(file.num_bytes for file in self.large_files)
        self.cache_folder.require_space(str(self.name), sum(map(self.hub.missing_bytes, missing)))
        for file in missing:
            if file.sha256:
                self.transfer(file, is_entry=file.path == entry)
            self.hub.link(self.listing.commit, file)

    def transfer(self, file: RepoFile, *, is_entry: bool) -> None:
        earlier_files = self.large_files[: self.large_files.index(file)]
        bytes_before = sum(earlier.num_bytes for earlier in earlier_files)
        inspect_sizes = [*_INSPECTED_BYTES, file.num_bytes] if is_entry else []

        def on_growth(partial: Path, size: int) -> None:
            done_bytes = min(bytes_before + size, self.total_bytes)
            self.watch(DownloadProgress("download", done_bytes, self.total_bytes))
            if inspect_sizes and size >= inspect_sizes[0]:
                is_known = self.inspect(partial, file.path) is not None
                inspect_sizes[:] = [] if is_known else [n for n in inspect_sizes if n > size]

        with locked(self.hub.lock_path(file), self.watch):
            self.hub.transfer(self.listing.commit, file, on_growth, self.watch)

    def describe_kept(self) -> str:
        """Return a sentence that tells the user how much of the model was received."""
        kept_bytes = self.total_bytes - sum(map(self.hub.missing_bytes, self.large_files))
        if not kept_bytes:
            return "Nothing was kept."
        return f"{format_bytes(kept_bytes)} are kept: pull again to continue."

    def record(self, selection: FileSelection) -> ModelRecord:
        """Write and return the record of the downloaded model."""
        snapshot = self.path(None)
        path = self.path(selection.entry)
        old_record = next((record for record in stored_records() if record.path == path), None)
        old_names = old_record.requested_names if old_record else ()
        number_format = selection.number_format
        if selection.entry is None:
            config = read_json(self.path(CONFIG))
            dtype = str(config.get("dtype") or config.get("torch_dtype"))
            format_by_dtype = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
            number_format = format_by_dtype.get(dtype, SAFETENSORS)
        selector = self.name.file
        if selection.note and selection.entry:  # the typed name matches other models, too
            selector = quantization(selection.entry) or selection.entry
        record = ModelRecord(
            name=str(replace(self.name, file=selector)),
            title=f"{self.name.repo.split('/')[1]} ({number_format})",
            path=path,
            files=tuple(self.stored(file, old_record) for file in selection.files),
            source=(f"{self.hub.web_url}/tree/{self.listing.commit}",),
            licence=self.listing.licence or (old_record.licence if old_record else None),
            family=self.family(selection.entry),
            number_format=number_format,
            requested_names=tuple(dict.fromkeys((*old_names, str(self.name)))),
            snapshot=snapshot,
        )
        record.write()
        return record

    def stored(self, file: RepoFile, old_record: ModelRecord | None) -> StoredFile:
        path = self.path(file.path)
        old_files = old_record.files if old_record else ()
        was_ours = {old_file.path: old_file.is_ours for old_file in old_files}
        is_ours = was_ours.get(path, file not in self.existing_files)
        return StoredFile(
            path, file.num_bytes, file.sha256 or file_sha256(path, ignore_progress), is_ours
        )
