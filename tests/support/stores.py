"""A Redis server for tests, on a free port."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = "0123456789abcdef" * 4


def missing() -> str:
    """Return what is not installed that a Redis server needs; "" if nothing."""
    if find_spec("redis") is None or find_spec("cryptography") is None:
        return "needs the extra: pip install '.[store]'"
    return (
        "" if shutil.which("redis-server") else "needs redis-server: apt-get install redis-server"
    )


class Store:
    """A running Redis server."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, scheme: str) -> None:
        self.process, self.port = process, port
        self.url = f"{scheme}://127.0.0.1:{port}"

    def client(self, **options: Any) -> Any:
        """Return a client that sees entries as they are stored."""
        from redis import Redis

        return Redis(port=self.port, **options)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the server during the block: it accepts connections and answers nothing."""
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)


@contextmanager
def store(folder: Path, *options: str, port: int = 0, tls: tuple[str, ...] = ()) -> Iterator[Store]:
    """Yield a Redis server that keeps nothing on disk; `tls` are its options for TLS."""
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    ports = ("--port", "0", "--tls-port", str(port), *tls) if tls else ("--port", str(port))
    process = subprocess.Popen(
        [
            "redis-server",
            "--save",
            "",
            "--dir",
            str(folder),
            "--bind",
            "127.0.0.1",
            *ports,
            *options,
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.02)
        yield Store(process, port, "rediss" if tls else "redis")
    finally:
        process.kill()
        process.wait()
