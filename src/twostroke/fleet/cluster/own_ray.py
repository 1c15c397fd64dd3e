"""A Ray cluster on this machine: started for its first fleet, ended after its last fleet."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from twostroke.core import env
from twostroke.core.errors import BackendError, ModelFormatError
from twostroke.core.frozen import Frozen
from twostroke.core.json_io import read_checked_json, write_checked_json

_START_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 20.0
_OBJECT_STORE_BYTES: Final = 78_643_200  # Ray's minimum, since no objects are stored
_POLL_S: Final = 0.1
_FOLDER_PREFIX: Final = "twostroke-ray-"
_logger = logging.getLogger("twostroke.fleet")


class _ClusterRecord(Frozen):
    """The contents of the file by which processes find the Ray cluster on this machine.

    Attributes:
        address, token: by which processes connect.
        pid, begun: the cluster's process, and when that began, in clock ticks.
        folder: the folder of the cluster's files.
    """

    address: str
    token: str
    pid: int
    begun: str
    folder: str


class OwnRay:
    """The Ray cluster on this machine that the user's fleets share, unless they name another.

    Its token, address and process id are in a file of the cache folder that only the user can read.
    """

    def __init__(self) -> None:
        self._record_file = env.cache_dir() / "fleet" / "ray.json"

    def find(self) -> str | None:
        """Return the address of the running Ray cluster; None if it does not run.

        The cluster's token is set for this process.
        """
        record = self._read()
        if record is None or _start_ticks(record.pid) != record.begun:
            return None
        env.use_ray_token(record.token)
        return record.address

    def start(self) -> str:
        """Start the Ray cluster, and return its address.

        Raises:
            BackendError: Ray does not start.
        """
        self._record_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        token = secrets.token_hex(32)
        env.use_ray_token(token)
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))  # short, since it has sockets
        log = folder / "start.log"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        options = ["--port=0", "--include-dashboard=false", "--disable-usage-stats"]
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - Ray's own program
                [
                    *command,
                    *options,
                    f"--object-store-memory={_OBJECT_STORE_BYTES}",
                    f"--temp-dir={folder}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            address = self._wait(process, folder, log)
            record = {
                "address": address,
                "token": token,
                "pid": process.pid,
                "begun": _start_ticks(process.pid),
                "folder": str(folder),
            }
            write_checked_json(self._record_file, record)
            self._record_file.chmod(0o600)
        except BaseException:  # also after Ctrl-C, since no record of it exists
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return address

    def _wait(self, process: subprocess.Popen[bytes], folder: Path, log: Path) -> str:
        """Wait until the Ray cluster runs; return its address, or raise BackendError."""
        address = folder / "ray_current_cluster"
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not address.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                lines = log.read_text(errors="replace").strip().splitlines()
                reason = lines[-1] if lines else "it wrote nothing"
                raise BackendError(f"Ray does not start: {reason}.")
            time.sleep(_POLL_S)
        return address.read_text().strip()

    def stop(self) -> None:
        """End the Ray cluster, and remove its files."""
        record = self._read()
        if record is None:
            return
        if _start_ticks(record.pid) == record.begun:
            os.kill(record.pid, signal.SIGTERM)
            deadline_s = time.monotonic() + _STOP_TIMEOUT_S
            while _start_ticks(record.pid) == record.begun and time.monotonic() < deadline_s:
                with suppress(ChildProcessError):
                    os.waitpid(record.pid, os.WNOHANG)
                time.sleep(_POLL_S)
            with suppress(ProcessLookupError):
                os.killpg(record.pid, signal.SIGKILL)
        shutil.rmtree(record.folder, ignore_errors=True)
        self._record_file.unlink(missing_ok=True)

    def _read(self) -> _ClusterRecord | None:
        """Return the record of the Ray cluster; None if it is missing or damaged."""
        try:
            record = msgspec.convert(read_checked_json(self._record_file), _ClusterRecord)
        except (ModelFormatError, msgspec.ValidationError) as error:
            if self._record_file.exists():
                _logger.warning("%s is damaged and not used: %s", self._record_file, error)
            return None
        # `stop` ends this process and removes this folder: `start` must have made them.
        is_own = record.pid > 1 and Path(record.folder).name.startswith(_FOLDER_PREFIX)
        return record if is_own else None


def _start_ticks(pid: int) -> str | None:
    """Return when a process began, in clock ticks since the system's start; None after its end."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
