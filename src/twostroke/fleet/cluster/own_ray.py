"""A Ray cluster of one machine for its fleets: started for the first, ended after the last."""

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

_START_S: Final = 60.0
_END_S: Final = 20.0
_STORE_BYTES: Final = 78_643_200  # the least that Ray takes: no objects are stored
_LOOK_S: Final = 0.1
_FOLDER_PREFIX: Final = "twostroke-ray-"
_logger = logging.getLogger("twostroke.fleet")


class _Facts(Frozen):
    """The cluster's address and token, and its process, which began at a time in clock ticks."""

    address: str
    token: str
    pid: int
    begun: str
    folder: str


class OwnRay:
    """The cluster that this user's fleets share, if no other is named.

    Its token, address and process stand in a file of the cache folder that only the user can read.
    """

    def __init__(self) -> None:
        self._record = env.cache_dir() / "fleet" / "ray.json"

    def find(self) -> str | None:
        """Return its address, and let this process know its token; None if it does not run."""
        facts = self._read()
        if facts is None or _begun(facts.pid) != facts.begun:
            return None
        env.use_ray_token(facts.token)
        return facts.address

    def start(self) -> str:
        """Start it, and return its address.

        Raises:
            BackendError: it does not start.
        """
        self._record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        token = secrets.token_hex(32)
        env.use_ray_token(token)
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))  # a short path: it holds sockets
        log = folder / "start.log"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        options = ["--port=0", "--include-dashboard=false", "--disable-usage-stats"]
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - Ray's own program
                [
                    *command,
                    *options,
                    f"--object-store-memory={_STORE_BYTES}",
                    f"--temp-dir={folder}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            address = self._wait(process, folder, log)
            begun = _begun(process.pid)
            facts = {"address": address, "token": token, "pid": process.pid, "begun": begun}
            write_checked_json(self._record, facts | {"folder": str(folder)})
            self._record.chmod(0o600)
        except BaseException:  # also Ctrl-C: nothing else would know of it
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return address

    def _wait(self, process: subprocess.Popen[bytes], folder: Path, log: Path) -> str:
        """Return the cluster's address once it has one; raises BackendError."""
        address, until_s = folder / "ray_current_cluster", time.monotonic() + _START_S
        while not address.exists():
            if process.poll() is not None or time.monotonic() > until_s:
                last = log.read_text(errors="replace").strip().splitlines()[-1:]
                raise BackendError(f"Ray does not start: {''.join(last) or 'it wrote nothing'}.")
            time.sleep(_LOOK_S)
        return address.read_text().strip()

    def stop(self) -> None:
        """End it and remove its files."""
        facts = self._read()
        if facts is None:
            return
        if _begun(facts.pid) == facts.begun:
            os.kill(facts.pid, signal.SIGTERM)
            until_s = time.monotonic() + _END_S
            while _begun(facts.pid) == facts.begun and time.monotonic() < until_s:
                with suppress(ChildProcessError):
                    os.waitpid(facts.pid, os.WNOHANG)
                time.sleep(_LOOK_S)
            with suppress(ProcessLookupError):
                os.killpg(facts.pid, signal.SIGKILL)
        shutil.rmtree(facts.folder, ignore_errors=True)
        self._record.unlink(missing_ok=True)

    def _read(self) -> _Facts | None:
        """Return the cluster's facts; None without a record, or with a damaged one."""
        try:
            facts = msgspec.convert(read_checked_json(self._record), _Facts)
        except (ModelFormatError, msgspec.ValidationError) as error:
            if self._record.exists():
                _logger.warning("%s is damaged and not used: %s", self._record, error)
            return None
        # `stop` ends this process and removes this folder: `start` must have made them.
        is_ours = facts.pid > 1 and Path(facts.folder).name.startswith(_FOLDER_PREFIX)
        return facts if is_ours else None


def _begun(pid: int) -> str | None:
    """Return when a process began, in the system's ticks; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
