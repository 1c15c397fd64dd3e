"""Starts `twostroke` as a child process, checks its health, restarts it and ends it."""

from __future__ import annotations

import http.client
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from msgspec.structs import replace

from twostroke.core import env
from twostroke.core.files import write_text
from twostroke.core.frozen import Frozen
from twostroke.fleet.cluster.spec import PREFILL_PEERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ENTRY: Final = "twostroke.fleet.cluster.process"
_CHECK_INTERVAL_S: Final = 0.25
_CHECK_TIMEOUT_S: Final = 5.0
_MAX_FAILED_CHECKS: Final = 4  # after which a process counts as frozen
_FIRST_PAUSE_S: Final = 1.0  # before a restart
_MAX_PAUSE_S: Final = 60.0
_MIN_HEALTHY_S: Final = 60.0  # a process that ran longer is restarted after the first pause
_PORT_IN_USE_CODE: Final = 7  # the exit code of `twostroke`
_KILL_TIMEOUT_S: Final = 5.0
_DRAIN_S: Final = 60.0  # from SIGTERM to SIGKILL, for a child whose parent has ended
_NUM_LAST_LINES: Final = 5
_ERROR_PREFIX: Final = "twostroke: "  # of the error with which the program ends
_logger = logging.getLogger("twostroke.fleet")


class ServerState(Frozen):
    """The state of a server's process.

    Attributes:
        url: the server's URL; empty while it waits for a machine.
        pid: the id of the process.
        is_ready: whether the server answers requests.
        is_ending: whether the server drains, or has ended after that.
        was_told_to_end: whether `close` was called; a server can also drain by itself.
        num_starts: how often the process was started.
        num_failed_starts: how often, lately, the process ended before it was ready.
        trouble: why the process last ended by itself; empty once it is ready again.
        prefill_addresses: the prefill engines that the server was told to use.
        machine: the id of its machine in the cluster; empty if it is not known.
    """

    url: str = ""
    pid: int = 0
    is_ready: bool = False
    is_ending: bool = False
    was_told_to_end: bool = False
    num_starts: int = 0
    num_failed_starts: int = 0
    trouble: str = ""
    prefill_addresses: tuple[str, ...] = ()
    machine: str = ""


class ServerProcess:
    """Runs `twostroke ARGUMENTS --host HOST --port PORT` as a child process until `close`.

    A process that ends is restarted after a pause, which doubles with each restart. A process that
    does not answer `/health/live` for some 20 s is killed, and then restarted. The server itself
    restarts its engine.

    A server that drains although `close` was not called, or that ends with exit code 0, is not
    restarted: the notice of a spot machine, or SIGTERM, has told the server that its machine will
    end.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        host: str,
        port: int | None = None,
        variables: dict[str, str] | None = None,
        log: Callable[[str], None] = _logger.info,
    ) -> None:
        """Start the server's process and return at once.

        Args:
            arguments: the command line after `twostroke`, without the address.
            host: the address on which the server listens.
            port: the port; None for a free port.
            variables: environment variables of the process.
            log: called with a sentence when the process ends or is killed.
        """
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._peer_listing: Path | None = None
        if PREFILL_PEERS in arguments:
            self._folder = tempfile.TemporaryDirectory(prefix="twostroke-peers-")
            self._peer_listing = Path(self._folder.name, "prefill-peers")
            write_text(self._peer_listing, "")
        self._arguments = tuple(
            str(self._peer_listing) if argument == PREFILL_PEERS else argument
            for argument in arguments
        )
        self._host = host
        self._fixed_port = port
        self._environment = env.child_environment(variables or {})
        self._log = log
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._state = ServerState()
        self._process: subprocess.Popen[bytes] | None = None
        self._was_ready = False  # this run of the process
        self._drains_by_itself = False
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()

    @property
    def state(self) -> ServerState:
        """The present state of the server's process."""
        with self._lock:
            return self._state

    def set_prefill_addresses(self, addresses: Sequence[str]) -> None:
        """Tell a decode engine which prefill engines (HOST:PORT) it may use now.

        Does nothing for other engines.
        """
        if self._peer_listing is not None:
            write_text(self._peer_listing, "".join(f"{address}\n" for address in addresses))
            self._update(prefill_addresses=tuple(addresses))

    def close(self, within_s: float) -> bool:
        """Let the server finish its requests; return False if it was killed after `within_s`."""
        is_first = not self._stop.is_set()
        self._stop.set()
        self._update(is_ready=False, is_ending=True, was_told_to_end=True)
        process = self._process
        if process is None:
            return True
        if is_first and not self._drains_by_itself:  # a second signal would cut off answers
            process.terminate()
        try:
            process.wait(within_s)
            return True
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return False
        finally:
            self._thread.join(_KILL_TIMEOUT_S)
            if self._folder is not None:
                self._folder.cleanup()

    def _run(self) -> None:
        pause_s, num_starts = _FIRST_PAUSE_S, 0
        while not self._stop.is_set():
            began_s, num_starts = time.monotonic(), num_starts + 1
            self._was_ready = False
            try:
                code, trouble = self._run_once(num_starts)
            except OSError as error:
                code, trouble = 1, f"it cannot be started: {error.strerror or error}"
            if code == 0 and self._was_ready:  # it drained before a check saw that
                self._drains_by_itself = True
            if self._is_ending:
                self._update(is_ready=False, is_ending=True)
                break
            if (
                code == _PORT_IN_USE_CODE
                and self._fixed_port is None
                and not _is_free(self.state.url)
            ):
                continue  # another program took the port meanwhile
            if time.monotonic() - began_s > _MIN_HEALTHY_S:
                pause_s = _FIRST_PAUSE_S
            num_failed_starts = self.state.num_failed_starts + (not self._was_ready)
            self._update(is_ready=False, trouble=trouble, num_failed_starts=num_failed_starts)
            self._log(f"The server ended: {trouble}")
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _run_once(self, num_starts: int) -> tuple[int, str]:
        """Start the server's process and monitor it until it ends.

        Returns its exit code and the last error in its output.
        """
        port = _free_port(self._host) if self._fixed_port is None else self._fixed_port
        host = f"[{self._host}]" if ":" in self._host else self._host
        url = f"http://{host}:{port}"
        command = [sys.executable, "-P", "-m", _ENTRY, *self._arguments]
        process = self._process = subprocess.Popen(  # noqa: S603 - this package's own program
            [*command, "--host", self._host, "--port", str(port)],
            stdin=subprocess.PIPE,  # never written: it closes when this process ends
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )
        if self._stop.is_set():  # `close` was called before there was a process
            process.terminate()
        assert process.stdin is not None
        assert process.stderr is not None
        last_lines = deque[str]([], _NUM_LAST_LINES)
        reader = threading.Thread(
            target=_copy_lines, args=(process.stderr, last_lines), daemon=True
        )
        reader.start()
        self._update(url=url, pid=process.pid, is_ready=False, num_starts=num_starts)
        self._monitor(process, port)
        code = process.wait()
        process.stdin.close()
        reader.join(_CHECK_TIMEOUT_S)
        if code < 0:
            return code, f"it was ended by signal {-code}"
        errors = [line for line in last_lines if line.startswith(_ERROR_PREFIX)]
        last_error = errors[-1] if errors else f"exit code {code}"
        return code, last_error.removeprefix(_ERROR_PREFIX)

    def _monitor(self, process: subprocess.Popen[bytes], port: int) -> None:
        """Check until the server ends whether it is ready; kill the server if it is frozen."""
        num_failed_checks = 0
        has_answered = False
        while process.poll() is None and not self._stop.is_set():
            if has_answered and self._check(port, "/health/live") is None:
                num_failed_checks += 1
            else:
                num_failed_checks = 0
                health = self._check(port, "/health/ready")
                is_ready = health is not None and health[0] == http.client.OK
                has_answered = self._was_ready = has_answered or is_ready
                if is_ready:
                    self._update(is_ready=True, trouble="", num_failed_starts=0)
                else:
                    self._drains_by_itself = health is not None and health[1] == "draining"
                    self._update(is_ready=False, is_ending=self._is_ending)
            if num_failed_checks == _MAX_FAILED_CHECKS:
                self._log("The server does not answer: it is ended and started again.")
                process.kill()
            self._stop.wait(_CHECK_INTERVAL_S)

    @property
    def _is_ending(self) -> bool:
        return self._stop.is_set() or self._drains_by_itself

    def _check(self, port: int, path: str) -> tuple[int, str] | None:
        """Ask the server for its health by a GET request to `path`.

        Returns the HTTP status and the status in the body; None if no answer comes in time.
        """
        connection = http.client.HTTPConnection(self._host, port, timeout=_CHECK_TIMEOUT_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = json.loads(response.read())
            return response.status, str(body.get("status", "")) if isinstance(body, dict) else ""
        except (OSError, http.client.HTTPException):
            return None
        except ValueError:  # not JSON
            return response.status, ""
        finally:
            connection.close()

    def _update(self, **changes: Any) -> None:
        with self._lock:
            self._state = replace(self._state, **changes)


def _copy_lines(source: IO[bytes], last_lines: deque[str]) -> None:
    """Copy a child process's output to this process's standard error; keep the last lines."""
    with source:
        for line in source:
            last_lines.append(line.decode(errors="replace").rstrip())
            with suppress(OSError, ValueError):
                sys.stderr.write(last_lines[-1] + "\n")


def _free_port(host: str, port: int = 0) -> int:
    """Return the number of a free port; raise OSError if the port is in use.

    `port` 0 lets the system choose; otherwise only this port is tried.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as probe:
        free_port: int = probe.getsockname()[1]
        return free_port


def _is_free(url: str) -> bool:
    """Return whether no program listens at the address of a URL."""
    parts = urlsplit(url)
    try:
        _free_port(parts.hostname or "", parts.port or 0)
    except OSError:
        return False
    return True


def _end_with_parent() -> None:
    """End this server when its parent process ends, even if the parent was killed.

    Standard input is a pipe whose other end the parent holds, so it closes when the parent has
    ended. This process then gets SIGTERM, and SIGKILL after `_DRAIN_S`.
    """
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_DRAIN_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":  # the child: `python -m twostroke.fleet.cluster.process ARGUMENTS...`
    threading.Thread(target=_end_with_parent, daemon=True).start()
    runpy.run_module("twostroke", run_name="__main__")
