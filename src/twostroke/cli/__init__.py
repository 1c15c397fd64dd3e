"""The command line: `twostroke`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit."""
    try:
        from twostroke.cli.app import main as run

        code = run()
    except KeyboardInterrupt:  # before anything was begun, or while another one was answered
        code = 130
    import signal
    from collections import namedtuple

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # `python -m` ends by the signal, whatever the code, if a Ctrl-C came while source text was run,
    # as it is where such types are made. Python forgets that when it runs some again.
    namedtuple("_", ())  # noqa: PYI024
    sys.exit(code)
