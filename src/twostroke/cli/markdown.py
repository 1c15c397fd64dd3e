"""Markdown on the terminal while it is being written."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Self

from markdown_it import MarkdownIt
from rich.markdown import CodeBlock, Heading, HorizontalRule, Markdown
from rich.rule import Rule
from rich.segment import Segment, Segments
from rich.syntax import Syntax

from twostroke.cli.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from markdown_it.token import Token
    from rich.console import Console, ConsoleOptions, RenderResult

    Line = list[Segment]

_MAX_WIDTH = 100  # longer lines are hard to read
_MIN_WIDTH = 20
_REDRAW_S = 0.05
_MAX_SHARE = 0.1  # of the time may go into drawing: the engine wants the processor


class MarkdownStream:
    """Prints Markdown as it comes.

    Blocks that are complete (paragraphs, lists, fenced code) are printed once and scroll away.
    The last one is drawn again as it grows; what of it no longer fits on the screen is printed for
    good, so that an answer of any length is whole in the end. Where the cursor cannot move,
    nothing is drawn twice.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        """Write to `console`."""
        self._console = console
        self._clock = clock
        self._parser = _parser()
        self._can_redraw = console.is_terminal and not console.is_dumb_terminal
        self._pending = ""  # the text of the block that still grows
        self._width = 0  # at which that block is drawn
        self._num_kept = 0  # of its lines were printed for good
        self._window: list[Line] = []  # those that will be drawn again
        self._is_first = True
        self._next_draw_s = 0.0

    def __enter__(self) -> Self:
        """Show that something is to come."""
        if self._can_redraw:
            self._show([], [[Segment("…")]])
        return self

    def __exit__(self, *exception: object) -> None:
        """Print what is left."""
        self._draw(is_last=True)

    def feed(self, text: str) -> None:
        """Show more text."""
        self._pending += printable(text)
        began_s = self._clock()
        if self._can_redraw and began_s < self._next_draw_s:
            return
        self._draw()
        took_s = self._clock() - began_s
        self._next_draw_s = began_s + max(_REDRAW_S, took_s / _MAX_SHARE)

    def _draw(self, *, is_last: bool = False) -> None:
        kept: list[Line] = []
        for block in self._complete_blocks(is_last=is_last):
            lines = self._lines(block, is_first=self._is_first)
            self._is_first = self._is_first and not lines
            kept += lines[self._num_kept :]
            self._num_kept = max(0, self._num_kept - len(lines))
        window: list[Line] = []
        if self._can_redraw:
            window = self._growing_lines()[self._num_kept :]
            excess = self._num_rows(window) - max(1, self._console.height - 2)
            while excess > 0:
                excess -= self._num_rows(window[:1])
                kept.append(window.pop(0))
                self._num_kept += 1
        self._show(kept, window)

    def _complete_blocks(self, *, is_last: bool) -> list[str]:
        """Cut the blocks that more text cannot change off the pending text.

        These are all but the last one of its whole lines; half a line may yet become anything.
        """
        lines = self._pending.split("\n")  # what the parser counts as lines
        blocks = self._blocks(lines if is_last else lines[:-1])
        if is_last:
            self._pending = ""
        elif blocks:
            self._pending = "\n".join([blocks.pop(), *lines[-1:]])
        return blocks

    def _blocks(self, lines: list[str]) -> list[str]:
        """Return the texts of the top-level blocks: a paragraph, a whole list, a fence."""
        tokens = self._parser.parse("\n".join(lines))
        starts = [token.map[0] for token in tokens if token.level == 0 and token.map is not None]
        ends = pairwise([*starts, len(lines)])
        return ["\n".join(lines[start:end]) for start, end in ends]

    def _growing_lines(self) -> list[Line]:
        """Return the lines of what is pending: a block, and perhaps the first words of the next."""
        found: list[Line] = []
        for block in self._blocks(self._pending.split("\n")):
            found += self._lines(block, is_first=self._is_first and not found)
        return found

    def _lines(self, block: str, *, is_first: bool) -> list[Line]:
        """Return a block's lines, with an empty one before all but an answer's first block."""
        # Once lines of a block were printed, the others must be broken at the same width.
        if not self._num_kept:
            self._width = max(_MIN_WIDTH, min(self._console.width, _MAX_WIDTH))
        options = self._console.options.update(width=self._width, height=None)
        lines = self._console.render_lines(_Block(self._parser, block), options, pad=False)
        stripped = _between_blanks([_stripped(line) for line in lines])
        return stripped if is_first or not stripped else [[], *stripped]

    def _show(self, kept: list[Line], window: list[Line]) -> None:
        """Replace the old window by lines that stay and the new window, in one write."""
        with self._console.capture() as capture:
            for line in (*kept, *window):
                self._console.print(Segments([*line, Segment.line()]), end="")
        num_rows = self._num_rows(self._window)
        erase = f"\x1b[{num_rows}A\r\x1b[J" if num_rows else ""
        self._console.file.write(erase + capture.get())
        self._console.file.flush()
        self._window = window

    def _num_rows(self, lines: list[Line]) -> int:
        """Return how many rows lines take on the screen, which may have become narrower."""
        width = max(1, self._console.width)
        return sum(max(1, -(-Segment.get_line_length(line) // width)) for line in lines)


class _Block(Markdown):
    """A block of Markdown as a chat wants it: line breaks are kept, HTML is text."""

    elements: ClassVar = Markdown.elements

    def __init__(self, parser: MarkdownIt, text: str) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = parser.parse(text)
        for token in self.parsed:
            _keep_breaks(token)


class _Code(CodeBlock):
    """Code without a frame, so that it can be copied, on the terminal's own background."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        code = str(self.text).rstrip()
        yield Syntax(
            code, self.lexer_name, theme="ansi_dark", background_color="default", word_wrap=True
        )


class _Title(Heading):
    """A heading at the left, whatever its level."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        self.text.justify = "left"
        yield self.text


class _Rule(HorizontalRule):
    """A thin line."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        yield Rule(style="dim")


_Block.elements = {
    **Markdown.elements,
    "heading_open": _Title,
    "hr": _Rule,
    "fence": _Code,
    "code_block": _Code,
}


def _between_blanks(lines: list[Line]) -> list[Line]:
    """Return lines without the empty ones at both ends."""
    filled = [place for place, line in enumerate(lines) if line]
    return lines[filled[0] : filled[-1] + 1] if filled else []


def _stripped(line: Line) -> Line:
    """Return a line without the blanks that fill it up, which nobody wants to copy."""
    kept = list(line)
    while kept and not (kept[-1].style and kept[-1].style.bgcolor):
        text, style, control = kept.pop()
        if text.rstrip(" "):
            return [*kept, Segment(text.rstrip(" "), style, control)]
    return kept


def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    return parser.disable("reference")  # which shows nothing for what was written


def _keep_breaks(token: Token) -> None:
    for child in token.children or ():
        if child.type == "softbreak":
            child.type = "hardbreak"
