"""Markdown on the terminal while it is being written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.live import Live
from rich.markdown import Markdown

if TYPE_CHECKING:
    from rich.console import Console

_FENCES = ("```", "~~~")


class MarkdownStream:
    """Prints Markdown as it comes.

    Blocks that are complete are printed once and scroll away; only the last, unfinished block is
    drawn again as it grows, so that an answer of any length neither flickers nor is cut off.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pending = ""
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="visible")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.update(Markdown(self._pending) if self._pending.strip() else "", refresh=True)
        self._live.stop()

    def feed(self, text: str) -> None:
        """Show more text."""
        self._pending += text
        end = _end_of_complete_blocks(self._pending)
        if end:
            done, self._pending = self._pending[:end], self._pending[end:]
            self._live.update("")
            self._console.print(Markdown(done))
            if self._pending.strip() or not done.isspace():
                self._console.print()
        self._live.update(Markdown(self._pending), refresh=True)


def _end_of_complete_blocks(text: str) -> int:
    """Return where the last blank line outside a fenced block ends; 0 if there is none."""
    end = position = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        position += len(line)
        stripped = line.strip()
        if fence:
            if stripped == fence:
                fence = ""
        elif stripped.startswith(_FENCES):
            fence = stripped[:3]
        elif not stripped and line.endswith("\n") and text[:position].strip():
            end = position
    return end
