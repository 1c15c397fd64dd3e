"""Starts `twostroke` as a child process, checks its health, restarts it and ends it."""

from __future__ import annotations

import http.client
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from msgspec.structs import replace

from twostroke.core import env
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ENTRY: Final = "twostroke.fleet.cluster.process"
_LOOK_S: Final = 0.25
_ASK_S: Final = 5.0  # for an answer about health
_MOST_SILENT: Final = 4  # such answers that may fail before the process counts as frozen
_FIRST_PAUSE_S, _MOST_PAUSE_S = 1.0, 60.0
_SOUND_S: Final = 60.0  # a process that lived longer starts again after the first pause
_PORT_TAKEN: Final = 7  # exit code
_KILL_S: Final = 5.0
_DRAIN_S: Final = 60.0  # from SIGTERM to SIGKILL, for a child whose parent has ended
_LAST_LINES: Final = 5
_SAID: Final = "twostroke: "  # before a program's last sentence
_logger = logging.getLogger("twostroke.fleet")


class ServerState(Frozen):
    """What is known of a server's process.

    `trouble` says how it last ended by itself, and is empty once it is ready again. Without a place
    on a machine yet, it has no `url`.
    """

    url: str = ""
    pid: int = 0
    is_ready: bool = False
    is_ending: bool = False
    num_starts: int = 0
    trouble: str = ""


class ServerProcess:
    """Runs `twostroke ARGUMENTS --host HOST --port PORT` until `close`.

    A process that ends is started again after a pause that doubles; one that does not answer
    `/health/live` for some 20 s is ended first. An engine that dies inside is the server's concern.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        host: str,
        port: int | None = None,
        variables: dict[str, str] | None = None,
        say: Callable[[str], None] = _logger.info,
    ) -> None:
        """Start it and return at once; without a port, it takes a free one."""
        self._arguments, self._host, self._fixed_port = tuple(arguments), host, port
        self._environment = env.child_environment(variables or {})
        self._say = say
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._state = ServerState()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()

    @property
    def state(self) -> ServerState:
        """What is known of it now."""
        with self._lock:
            return self._state

    def close(self, within_s: float) -> bool:
        """Let it answer what it has begun, within some seconds; False if it had to be killed."""
        is_first = not self._stop.is_set()
        self._stop.set()
        self._note(is_ready=False, is_ending=True)
        process = self._process
        if process is None:
            return True
        if is_first:  # a second signal would cut the answers off
            process.terminate()
        try:
            process.wait(within_s)
            return True
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return False
        finally:
            self._thread.join(_KILL_S)

    def _run(self) -> None:
        pause_s, num_starts = _FIRST_PAUSE_S, 0
        while not self._stop.is_set():
            began_s, num_starts = time.monotonic(), num_starts + 1
            try:
                code, trouble = self._live(num_starts)
            except OSError as error:
                code, trouble = 0, f"it cannot be started: {error.strerror or error}"
            if self._stop.is_set():
                break
            if code == _PORT_TAKEN and self._fixed_port is None and not _is_free(self.state.url):
                continue  # somebody took the port that was free
            if time.monotonic() - began_s > _SOUND_S:
                pause_s = _FIRST_PAUSE_S
            self._note(is_ready=False, trouble=trouble)
            self._say(f"The server ended: {trouble}")
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _live(self, num_starts: int) -> tuple[int, str]:
        """Start it and look after it until it ends; return its exit code and its last words."""
        port = _free_port(self._host) if self._fixed_port is None else self._fixed_port
        host = f"[{self._host}]" if ":" in self._host else self._host
        url = f"http://{host}:{port}"
        command = [sys.executable, "-P", "-m", _ENTRY, *self._arguments]
        process = self._process = subprocess.Popen(  # noqa: S603 - this package's own program
            [*command, "--host", self._host, "--port", str(port)],
            stdin=subprocess.PIPE,  # never written: its end tells that we have ended
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )
        if self._stop.is_set():  # `close` came before there was a process to end
            process.terminate()
        assert process.stdin is not None
        assert process.stderr is not None
        last = deque[str]([], _LAST_LINES)
        reader = threading.Thread(target=_pass_on, args=(process.stderr, last), daemon=True)
        reader.start()
        self._note(url=url, pid=process.pid, is_ready=False, num_starts=num_starts)
        self._look_after(process, port)
        code = process.wait()
        process.stdin.close()
        reader.join(_ASK_S)
        if code < 0:
            return code, f"it was ended by signal {-code}"
        said = [line for line in last if line.startswith(_SAID)] or [f"exit code {code}"]
        return code, said[-1].removeprefix(_SAID)

    def _look_after(self, process: subprocess.Popen[bytes], port: int) -> None:
        """Note whether it is ready, until it ends; kill it if it is frozen."""
        num_silent = 0
        has_answered = False
        while process.poll() is None and not self._stop.is_set():
            if has_answered and self._ask(port, "/health/live") is None:
                num_silent += 1
            else:
                num_silent = 0
                is_ready = self._ask(port, "/health/ready") == http.client.OK
                has_answered = has_answered or is_ready
                self._note(is_ready=is_ready, **({"trouble": ""} if is_ready else {}))
            if num_silent == _MOST_SILENT:
                self._say("The server does not answer: it is ended and started again.")
                process.kill()
            self._stop.wait(_LOOK_S)

    def _ask(self, port: int, path: str) -> int | None:
        """Return the status of an answer, or None if there is none in time."""
        connection = http.client.HTTPConnection(self._host, port, timeout=_ASK_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _note(self, **facts: Any) -> None:
        with self._lock:
            self._state = replace(self._state, **facts)


def _pass_on(source: IO[bytes], last: deque[str]) -> None:
    """Copy what a process writes to our own standard error; keep the last lines."""
    with source:
        for line in source:
            last.append(line.decode(errors="replace").rstrip())
            with suppress(OSError, ValueError):
                sys.stderr.write(last[-1] + "\n")


def _free_port(host: str, port: int = 0) -> int:
    """Return a port that is free now; OSError if it shall be `port`, which is not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as probe:
        found: int = probe.getsockname()[1]
        return found


def _is_free(url: str) -> bool:
    """Whether nobody listens at the address of a URL."""
    parts = urlsplit(url)
    try:
        _free_port(parts.hostname or "", parts.port or 0)
    except OSError:
        return False
    return True


def _end_with_parent() -> None:
    """Send this process SIGTERM when its parent ends, and SIGKILL after `_DRAIN_S`.

    Standard input is a pipe whose other end the parent holds: it closes however the parent ended.
    """
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_DRAIN_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":  # the child: `python -m twostroke.fleet.cluster.process ARGUMENTS...`
    threading.Thread(target=_end_with_parent, daemon=True).start()
    runpy.run_module("twostroke", run_name="__main__")
