"""The command line: `twostroke`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit."""
    try:
        from twostroke.cli.app import main as run
    except KeyboardInterrupt:  # so early that nothing needs to be said
        sys.exit(130)
    run()
