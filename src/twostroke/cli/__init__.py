"""The command line `twostroke`: `main` is its entry point.

Each command has a module, which `app.py` imports when the command is called.
"""

from __future__ import annotations

import gc
import sys

__all__ = ["main"]


# Imports create many objects and no garbage: collections took a tenth of the time of a start.
# It is not Final: even `typing` is imported where a Ctrl-C is caught.
_OBJECTS_PER_COLLECTION = 10_000


def main() -> None:
    """Run the command `twostroke` with this process's arguments, and exit."""
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    try:
        from twostroke.cli.app import main as run

        code = run()
    except KeyboardInterrupt:  # before the command started, or while an earlier Ctrl-C was handled
        code = 130
    import signal
    from collections import namedtuple

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # If Ctrl-C came while Python ran source text, as `namedtuple` does, `python -m` ends by the
    # signal and ignores the exit code. Running source text again clears that state.
    namedtuple("_", ())  # noqa: PYI024
    sys.exit(code)
