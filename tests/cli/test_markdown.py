"""Streamed Markdown: at the end, the screen shows the whole answer once."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from twostroke.cli.markdown import MarkdownStream

if TYPE_CHECKING:
    import pytest

ANSWER = """\
# A heading

Some *intro* with `code` and a [link](http://example.com/x).
A second line.

1. First item

   which goes on

2. Second
   - nested

```python
def f():

    return 1
```

| a | b |
|---|---|
| 1 | 2 |

> quoted

<b>html</b> stays, and [1]: http://x.y too

[ref]: http://nowhere.example

~~gone~~

---
The end."""


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal:
    """A screen of a few rows, and the output of a stream on it."""

    def __init__(self, *, width: int = 60, height: int = 10) -> None:
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, force_terminal=True, width=width, height=height, color_system=None
        )
        self.clock = Clock()
        self.stream = MarkdownStream(self.console, self.clock)

    def feed(self, text: str, after_s: float = 1.0) -> None:
        self.clock.now_s += after_s
        self.stream.feed(text)

    @property
    def shown_text(self) -> str:
        """The text on the screen, with all lines that have scrolled away."""
        return replayed(self.file.getvalue())


def shown_text(
    text: str, size: int, after_s: float = 1.0, *, width: int = 60, height: int = 10
) -> str:
    """Return the final screen for a text that arrived in pieces of `size` characters."""
    terminal = Terminal(width=width, height=height)
    with terminal.stream:
        for start in range(0, len(text), size):
            terminal.feed(text[start : start + size], after_s)
    return terminal.shown_text


def replayed(output: str) -> str:
    """Interpret the control sequences that Rich uses, as a terminal does."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[?\d]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", output):
        if part == "\x1b[1A":
            row -= 1
            assert row >= 0
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return "\n".join(line.rstrip() for line in lines[: row + 1])


def plain(text: str, width: int = 60) -> str:
    """Return the output for a terminal that cannot redraw text."""
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None)
    with MarkdownStream(console) as stream:
        stream.feed(text)
    assert "\x1b" not in file.getvalue()
    return "\n".join(line.rstrip() for line in file.getvalue().split("\n"))


def test_an_answer_is_laid_out() -> None:
    assert plain(ANSWER).split("\n") == [
        "A heading",
        "",
        "Some intro with code and a link (http://example.com/x).",
        "A second line.",
        "",
        " 1 First item",
        "   which goes on",
        " 2 Second",
        "    • nested",
        "",
        "def f():",
        "",
        "    return 1",
        "",
        " a  b",
        " ────",
        " 1  2",
        "",
        "▌ quoted",
        "",
        "<b>html</b> stays, and [1]: http://x.y too",
        "",
        "[ref]: http://nowhere.example",
        "",
        "gone",
        "",
        "-" * 60,
        "",
        "The end.",
        "",
    ]


def test_pieces_of_any_size_end_as_the_whole() -> None:
    for size in (1, 2, 7, 50):
        for after_s in (0.001, 1.0):
            assert shown_text(ANSWER, size, after_s) == plain(ANSWER)


def test_a_block_taller_than_the_screen_is_shown_whole_once() -> None:
    code = "\n".join(f"line {number}" for number in range(60))
    text = f"Before.\n\n```\n{code}\n```\n\nAfter."
    for height in (3, 5, 24):
        assert shown_text(text, 3, height=height) == plain(text)


def test_a_paragraph_taller_than_the_screen_may_follow_a_tall_block() -> None:
    items = "\n".join(f"- item {number}" for number in range(15))
    words = " ".join(f"word{number}" for number in range(120))
    text = f"{items}\n\n{words}\n\n{words}\n\nThe end."
    assert shown_text(text, 9) == plain(text)


def test_the_block_that_grows_is_seen_before_it_is_complete() -> None:
    terminal = Terminal()
    with terminal.stream:
        assert terminal.shown_text == "…"
        terminal.feed("A paragraph that is **bo")
        assert terminal.shown_text == "A paragraph that is **bo"
        terminal.feed("ld** now")
        assert terminal.shown_text == "A paragraph that is bold now"
    assert terminal.shown_text == "A paragraph that is bold now\n"


def test_drawing_leaves_the_processor_to_the_engine() -> None:
    terminal = Terminal()
    with terminal.stream:
        for _ in range(500):
            terminal.feed("word ", after_s=0.001)
    assert terminal.file.getvalue().count("\r") <= 16


def test_an_answer_of_nothing_leaves_nothing() -> None:
    assert shown_text("", 1) == ""
    assert shown_text(" \n\n", 1) == ""
    assert plain("") == ""


def test_a_dumb_terminal_sees_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("LINES", raising=False)  # it would make Rich keep to the width
    file = io.StringIO()
    with MarkdownStream(Console(file=file, force_terminal=True, width=60)) as stream:
        for letter in ANSWER:
            stream.feed(letter)
    assert "\x1b" not in file.getvalue()
    lines = [line.rstrip() for line in file.getvalue().split("\n")]
    assert lines == plain(ANSWER, 80).split("\n")  # the width that Rich gives a dumb terminal


def test_text_cannot_steer_the_terminal() -> None:
    assert plain("a\x1b[2J\x07b") == "a␛[2J␇b\n"


_PIECES = (
    *("> ", "- ", "1. ", "99999999. ", "```", "```py\n", "~~~", "\n", "\n\n", "    ", "# "),
    *("|a|b|\n|-|-|\n", "|", "**", "_", "`", "[x](", "](y)", "[x]: y", "![a](b)", "<b>", "&#0;"),
    *("\\", "word ", "長い漢字 ", "\t", "\r\n", "---\n", "===\n", "é", "\u2028", "[bold]", "[/]"),
)


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(_PIECES), max_size=40).map("".join),
    st.sampled_from([20, 60]),
    st.sampled_from([3, 5, 24]),
)
def test_any_text_can_be_drawn(text: str, width: int, height: int) -> None:
    shown_text(text, 5, width=width, height=height)
    plain(text, width)
