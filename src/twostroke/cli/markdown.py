"""Prints Markdown on the terminal while it is generated."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Self

from markdown_it import MarkdownIt
from rich.live import Live
from rich.markdown import CodeBlock, Heading, Markdown
from rich.segment import Segment, Segments
from rich.syntax import Syntax
from rich.text import Text

from twostroke.cli.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, ConsoleOptions, RenderResult

_MAX_COLUMNS = 100  # longer lines are hard to read
_MIN_REDRAW_INTERVAL_S = 0.05
_MAX_DRAWING_RATIO = 0.1  # of the time, so that drawing takes little from the engine


class MarkdownStream:
    """Prints Markdown while its text arrives.

    Complete blocks (paragraphs, lists, fenced code) are printed once, and scroll away. The last
    block is redrawn as it grows; the screen shows its last lines.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        """Print Markdown to `console`; `clock` returns the time in seconds, to limit redrawing."""
        self._console = console
        self._clock = clock
        self._parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
        self._parser.disable("reference")  # a link definition would be hidden
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._pending = ""
        self._is_first = True
        self._next_draw_s = 0.0

    def __enter__(self) -> Self:
        """Show a placeholder on the terminal until the first Markdown text arrives."""
        self._live.start()
        self._live.update(Text("…"), refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        """Print the last block of the Markdown text."""
        blocks, self._pending = self._blocks(self._pending), ""
        self._print(blocks)
        self._live.update(Text(), refresh=True)
        self._live.stop()

    def feed(self, text: str) -> None:
        """Add Markdown text, and redraw the block that is still growing."""
        self._pending += printable(text)
        started_s = self._clock()
        if started_s < self._next_draw_s:
            return
        complete_lines, _, rest = self._pending.rpartition(
            "\n"
        )  # an incomplete line may change the block
        *complete, growing = self._blocks(complete_lines) or [""]
        self._pending = f"{growing}\n{rest}" if growing else rest
        self._print(complete)
        tail = self._lines(self._pending)[-max(1, self._console.height - 2) :]
        self._live.update(_joined(tail), refresh=True)
        elapsed_s = self._clock() - started_s
        self._next_draw_s = started_s + max(_MIN_REDRAW_INTERVAL_S, elapsed_s / _MAX_DRAWING_RATIO)

    def _blocks(self, text: str) -> list[str]:
        """Split Markdown into the texts of its top-level blocks, such as paragraphs and lists."""
        lines = text.split("\n")
        tokens = self._parser.parse(text)
        starts = [token.map[0] for token in tokens if token.level == 0 and token.map is not None]
        return ["\n".join(lines[start:end]) for start, end in pairwise([*starts, len(lines)])]

    def _print(self, blocks: list[str]) -> None:
        """Print finished Markdown blocks, with an empty line between them."""
        for lines in filter(None, map(self._lines, blocks)):
            if not self._is_first:
                self._console.print()
            self._console.print(_joined(lines), end="")
            self._is_first = False

    def _lines(self, text: str) -> list[list[Segment]]:
        """Render Markdown as the lines of the screen, without empty lines at both ends."""
        options = self._console.options.update(
            width=min(self._console.width, _MAX_COLUMNS), height=None
        )
        markdown = _Markdown(self._parser, text)
        lines = self._console.render_lines(markdown, options, pad=False)
        filled = [index for index, line in enumerate(lines) if _text(line)]
        return lines[filled[0] : filled[-1] + 1] if filled else []


def _joined(lines: list[list[Segment]]) -> Segments:
    return Segments([segment for line in lines for segment in (*line, Segment.line())])


def _text(line: list[Segment]) -> str:
    return "".join(segment.text for segment in line).strip()


class _CodeBlock(CodeBlock):
    """Renders a Markdown code block without a frame, so that its text can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        code = str(self.text).rstrip()
        yield Syntax(
            code, self.lexer_name, theme="ansi_dark", background_color="default", word_wrap=True
        )


class _Heading(Heading):
    """Renders a Markdown heading aligned left, at every level."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        self.text.justify = "left"
        yield self.text


class _Markdown(Markdown):
    """Renders Markdown of chats: line breaks are kept, and HTML is shown as text."""

    elements: ClassVar = {
        **Markdown.elements,
        "heading_open": _Heading,
        "fence": _CodeBlock,
        "code_block": _CodeBlock,
    }

    def __init__(self, parser: MarkdownIt, text: str) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = parser.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"
