"""Run llama.cpp's layers in another process: its rpc-server, and the address for a client.

Used by parallel.py. As a program it is the server, which calls the function of llama.cpp's own
`rpc-server` on a port of this machine; it ends when its standard input closes. Needs
llama-cpp-python built with RPC.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import llama_cpp

_WITHIN_S = 20.0
_CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU


def start_server(num_threads: int) -> subprocess.Popen[bytes]:
    """Start a server, and make the layers of models that are loaded from now on go there.

    The server ends with this process, which holds its standard input.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, str(port), str(num_threads)],
        stdin=subprocess.PIPE,
        stdout=2,
    )
    deadline = time.monotonic() + _WITHIN_S
    while socket.socket().connect_ex(("127.0.0.1", port)):
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("llama.cpp's RPC server does not start.")
        time.sleep(0.1)
    base, rpc = library("libggml-base"), library("libggml-rpc")
    rpc.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    registry = library("libggml") if "ggml_backend_register" not in dir(base) else base
    registry.ggml_backend_register.argtypes = [ctypes.c_void_p]
    registry.ggml_backend_register(rpc.ggml_backend_rpc_add_server(f"127.0.0.1:{port}".encode()))
    return server


def library(name: str) -> ctypes.CDLL:
    """Return the library that llama-cpp-python has loaded, not another copy of it.

    A wheel has each library under three names, and three names are three files. The threads of a
    copy's pool do not know the layout into which the loaded one has packed the weights.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    (path,) = {line.split(maxsplit=5)[5] for line in lines if f"/{name}.so" in line}
    return ctypes.CDLL(path)


def main() -> None:
    """Serve the processor until standard input closes."""
    port, num_threads = sys.argv[1:]
    threading.Thread(target=_end_with_input, daemon=True).start()
    llama_cpp.llama_backend_init()
    registry, rpc = library("libggml"), library("libggml-rpc")
    registry.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    device = registry.ggml_backend_dev_by_type(_CPU)
    devices = (ctypes.c_void_p * 1)(device)
    start = rpc.ggml_backend_rpc_start_server
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, *[ctypes.c_size_t] * 2, ctypes.c_void_p]
    start(f"127.0.0.1:{port}".encode(), None, int(num_threads), 1, devices)


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
