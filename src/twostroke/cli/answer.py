"""An answer on the terminal while it is being written: reasoning dimmed, text as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from twostroke.chat.call_reader import ReasoningPiece, TextPiece
from twostroke.chat.reader import AnswerReader, Reading
from twostroke.cli.markdown import MarkdownStream
from twostroke.cli.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console

    from twostroke.core.preface import Preface
    from twostroke.engine.output import Output
    from twostroke.tokenize import Tokenizer


class AnswerStream:
    """Prints an answer as it comes, and keeps what was said."""

    def __init__(self, console: Console, preface: Preface | None, tokenizer: Tokenizer) -> None:
        """Write to `console`; `preface` is the reasoning that may come first."""
        self._console = console
        self._reader = AnswerReader(Reading(preface=preface), tokenizer)
        self._markdown: MarkdownStream | None = None
        self._begins_with_text = preface is None
        self._text = self._reasoning = ""

    @property
    def message(self) -> dict[str, str] | None:
        """What was said, as a message; None if nothing was."""
        if not self._text and not self._reasoning:
            return None
        said = {"role": "assistant", "content": self._text}
        return said | {"reasoning_content": self._reasoning} if self._reasoning else said

    def __enter__(self) -> Self:
        """Show that something is to come."""
        if self._begins_with_text:
            self._markdown = MarkdownStream(self._console).__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Print what is left."""
        if self._markdown is not None:
            self._markdown.__exit__(*exception)
        elif self._reasoning:
            self._console.print()

    def feed(self, output: Output) -> None:
        """Show more of the answer."""
        for piece in self._reader.take(output):
            if isinstance(piece, ReasoningPiece):
                self._reasoning += piece.text
                self._print_dim(printable(piece.text))
            elif isinstance(piece, TextPiece):
                self._text += piece.text
                self._as_text().feed(piece.text)

    def _print_dim(self, text: str) -> None:
        self._console.print(
            text, style="dim", end="", markup=False, highlight=False, soft_wrap=True
        )

    def _as_text(self) -> MarkdownStream:
        """Return where text goes, which begins below the reasoning."""
        if self._markdown is None:
            if self._reasoning:
                self._console.print("\n")
            self._markdown = MarkdownStream(self._console).__enter__()
        return self._markdown
