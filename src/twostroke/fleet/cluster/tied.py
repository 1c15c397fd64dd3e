"""The command line, stopped when its parent ends.

It is started as `python -m twostroke.fleet.cluster.tied ARGUMENTS...`.

Standard input is a pipe whose other end the parent holds. When it closes, however the parent ended,
the program gets SIGTERM, by which servers drain, and after `GRACE_S` it is ended.
"""

from __future__ import annotations

import os
import runpy
import signal
import threading
import time
from typing import Final

GRACE_S: Final = 60.0


def _watch() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_watch, daemon=True).start()
    runpy.run_module("twostroke", run_name="__main__")
