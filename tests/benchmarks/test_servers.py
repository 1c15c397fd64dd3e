"""Servers of benchmarks and campaigns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import SOURCE
from support.tiny import write_tiny_gguf
from support.waiting import wait_for

_SCRIPT = """
import contextlib, pathlib, sys, time
from benchmarks.common.servers import Server, our_command
command = (*our_command(sys.argv[1], 1), "--accept-quality")
with contextlib.ExitStack() as stack:
    print(Server("server", command, pathlib.Path(sys.argv[2]), stack).pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_what_has_started_it(tmp_path: Path, number: int) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    parts = (SOURCE, SOURCE.parent, SOURCE.parent / "tests")
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(model), str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ":".join(map(str, parts))},
    )
    with process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        assert _runs(server)
        process.send_signal(number)
    wait_for(lambda: not _runs(server))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
