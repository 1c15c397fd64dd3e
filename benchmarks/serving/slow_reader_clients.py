"""Clients that hold connections and hardly read, in their own process (see pipe.py).

Used by slow_readers.py. Idle clients have received one answer and keep their connection; slow
clients read a few bytes of a stream per second. Only the standard library is imported.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

from benchmarks.common.pipe import claim_output, serve

_ANSWER_WITHIN_S = 30.0
_RECEIVE_BUFFER_BYTES = 4096  # the least that Linux gives: the rest waits in the server
_SIP_BYTES = 64
_SIP_EACH_S = 1.0


class Crowd:
    """Open connections, and a thread that sips from those of slow readers."""

    def __init__(self) -> None:
        """Begin with none."""
        self._sockets: list[socket.socket] = []
        self._idle: list[socket.socket] = []
        self._slow: list[socket.socket] = []
        self._closed = 0
        self._stop = threading.Event()
        self._sipper: threading.Thread | None = None

    def idle(self, port: int, count: int) -> dict[str, Any]:
        """Open connections that have had an answer."""
        call = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        for _ in range(count):
            client = self._connect(port)
            client.sendall(call)
            _read_head(client)
            self._idle.append(client)
        return {"open": len(self._sockets)}

    def slow(self, port: int, count: int, model: str, num_tokens: int) -> dict[str, Any]:
        """Open streams, and read next to nothing of them."""
        body = json.dumps(
            {
                "model": model, "prompt": "Once upon a time", "max_tokens": num_tokens,
                "temperature": 0, "ignore_eos": True, "stream": True, "logprobs": 5,
            }
        ).encode()  # fmt: skip
        call = (
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        for _ in range(count):
            client = self._connect(port)
            client.sendall(call)
            self._slow.append(client)
        self._sipper = threading.Thread(target=self._sip, daemon=True)
        self._sipper.start()
        return {"open": len(self._sockets)}

    def leave(self) -> dict[str, Any]:
        """Close every connection, and say how many the server had closed before."""
        self._stop.set()
        if self._sipper is not None:
            self._sipper.join()
        self._stop.clear()
        closed = self._closed + sum(_is_closed(connection) for connection in self._idle)
        for client in self._sockets:
            client.close()
        self._sockets, self._idle, self._slow = [], [], []
        self._closed, self._sipper = 0, None
        return {"closed_by_server": closed}

    def _connect(self, port: int) -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        client.settimeout(_ANSWER_WITHIN_S)
        client.connect(("127.0.0.1", port))
        self._sockets.append(client)
        return client

    def _sip(self) -> None:
        while not self._stop.is_set():
            start_s = time.monotonic()
            for connection in list(self._slow):
                connection.settimeout(0)
                try:
                    if not connection.recv(_SIP_BYTES):
                        self._remove(connection)
                except BlockingIOError:
                    pass
                except OSError:
                    self._remove(connection)
            self._stop.wait(max(0.0, _SIP_EACH_S - (time.monotonic() - start_s)))

    def _remove(self, client: socket.socket) -> None:
        self._slow.remove(client)
        self._closed += 1


def _is_closed(client: socket.socket) -> bool:
    client.settimeout(0)
    try:
        while client.recv(4096):  # the body that was not read
            pass
    except BlockingIOError:
        return False
    return True


def _read_head(client: socket.socket) -> None:
    seen = b""
    while b"\r\n\r\n" not in seen:
        data = client.recv(4096)
        if not data:
            raise RuntimeError("the server closed a connection")
        seen += data
    if b" 200 " not in seen.partition(b"\r\n")[0]:
        raise RuntimeError(f"the server refused: {seen[:100]!r}")


def main() -> None:
    """Answer questions of the parent."""
    crowd = Crowd()
    serve({"idle": crowd.idle, "slow": crowd.slow, "leave": crowd.leave}, claim_output())


if __name__ == "__main__":
    main()
