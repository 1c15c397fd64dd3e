"""Answers on the terminal: dimmed reasoning, Markdown, and the resulting chat message."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from support.byte_tokenizer import byte_tokenizer
from twostroke.cli.answer import AnswerStream
from twostroke.core.constraint import ReasoningSection
from twostroke.core.request import FinishReason
from twostroke.engine.output import Output

ANEW, INSIDE = ReasoningSection("<think>", "</think>"), ReasoningSection("", "</think>")


def show(
    preface: ReasoningSection | None, text: str, size: int
) -> tuple[str, dict[str, str] | None]:
    """Return the terminal's text for an answer in pieces, and the answer's chat message."""
    file = io.StringIO()
    console = Console(file=file, width=60, force_terminal=True, color_system="standard")
    with AnswerStream(console, preface, byte_tokenizer()) as stream:
        for start in range(0, len(text), size):
            stream.feed(Output(0, text[start : start + size], ()))
        stream.feed(Output(0, "", (), finish_reason=FinishReason.STOP))
    return file.getvalue(), stream.message


@pytest.mark.parametrize("size", [1, 7, 100])
@pytest.mark.parametrize(("preface", "begin"), [(ANEW, "<think>\n"), (INSIDE, "")])
def test_reasoning_is_dimmed_and_the_text_is_markdown(
    preface: ReasoningSection, begin: str, size: int
) -> None:
    output, message = show(preface, f"{begin}Well [x]\n</think>\n\n**Yes**\n", size)
    assert message == {
        "role": "assistant",
        "content": "**Yes**\n",
        "reasoning_content": "Well [x]",
    }
    assert "\x1b[2m" in output
    assert "think>" not in output
    assert output.index("\x1b[2mW") < output.index("\x1b[1mYes")


def test_answers_without_reasoning_are_markdown_alone() -> None:
    for preface in (None, ANEW):
        output, message = show(preface, "*Hm*", 1)
        assert message == {"role": "assistant", "content": "*Hm*"}
        assert "\x1b[2m" not in output
        assert "Hm" in output


def test_reasoning_without_an_answer_is_remembered() -> None:
    output, message = show(INSIDE, "Hm", 1)
    assert message == {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    assert output.endswith("\n")
    assert show(ANEW, "", 1)[1] is None
