"""Prints an answer on the terminal while it is generated: reasoning dimmed, text as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.text import Text

from twostroke.cli.markdown import MarkdownStream
from twostroke.cli.terminal import printable
from twostroke.engine.chat.call_reader import ReasoningPiece, TextPiece
from twostroke.engine.chat.reader import AnswerFormat, AnswerReader

if TYPE_CHECKING:
    from rich.console import Console

    from twostroke.core.constraint import ReasoningSection
    from twostroke.engine.chat.content_marks import ContentMarks
    from twostroke.engine.output import Output
    from twostroke.model.tokenizer import Tokenizer


class AnswerStream:
    """Prints an answer on the terminal while it is generated, and collects it as a chat message."""

    def __init__(
        self,
        console: Console,
        preface: ReasoningSection | None,
        tokenizer: Tokenizer,
        content_marks: ContentMarks | None = None,
    ) -> None:
        """Print an answer to `console`.

        Args:
            console: the terminal.
            preface: delimits the model's reasoning before the answer; None without reasoning.
            tokenizer: decodes the answer's tokens.
            content_marks: the special texts that some models write around the answer's text, and
                that are not printed.
        """
        self._console = console
        has_channels = preface is not None and preface.has_channels
        reading = AnswerFormat(
            preface=preface, content_marks=content_marks, has_channels=has_channels
        )
        self._reader = AnswerReader(reading, tokenizer)
        self._markdown: MarkdownStream | None = None
        self._begins_with_text = preface is None
        self._text = self._reasoning = ""

    @property
    def message(self) -> dict[str, str] | None:
        """The printed answer as a chat message; None if the answer is empty."""
        if not self._text and not self._reasoning:
            return None
        message = {"role": "assistant", "content": self._text}
        return message | {"reasoning_content": self._reasoning} if self._reasoning else message

    def __enter__(self) -> Self:
        """Show a placeholder on the terminal until the first text of the answer arrives."""
        if self._begins_with_text:
            self._markdown = MarkdownStream(self._console).__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Print the text of the answer that is not printed yet."""
        if self._markdown is not None:
            self._markdown.__exit__(*exception)
        elif self._reasoning:
            self._console.print()

    def feed(self, output: Output) -> None:
        """Print the text that an engine output adds to the answer."""
        for piece in self._reader.take(output):
            if isinstance(piece, ReasoningPiece):
                self._reasoning += piece.text
                text = Text(printable(piece.text), "dim")
                self._console.print(text, end="", soft_wrap=True)
            elif isinstance(piece, TextPiece):
                self._text += piece.text
                if self._markdown is None:  # below the reasoning
                    if self._reasoning:
                        self._console.print("\n")
                    self._markdown = MarkdownStream(self._console).__enter__()
                self._markdown.feed(piece.text)
