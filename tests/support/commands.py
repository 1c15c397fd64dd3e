"""The command line as a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_REPORT = 8000  # characters of each stream that a failed test reports
SOURCE = Path(__file__).resolve().parents[2] / "src"

# SIGINT first: what a shell starts in the background ignores it.
MAIN = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from twostroke.cli import main; main()"
)


@contextmanager
def started(*arguments: str, script: str = MAIN, **popen: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run `twostroke ARGUMENTS` by `script` as a process; end it after the block."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        bufsize=0,  # what was not read yet is there for `communicate`
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        **{**streams, **popen},
    )
    is_passed = False
    try:
        yield process
        is_passed = True
    finally:
        process.kill()
        rest = process.communicate(timeout=60)
        if not is_passed:  # the report of the failed test shows what the process had to say
            for output in rest:
                print((output or b"").decode(errors="replace")[-_MAX_REPORT:], file=sys.stderr)
