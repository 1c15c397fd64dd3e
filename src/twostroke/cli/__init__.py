"""The command line: `twostroke`."""

from twostroke.cli.app import main

__all__ = ["main"]
