"""The reasoning section of an answer, for every split of its text into pieces."""

from __future__ import annotations

import random
import time

import pytest

from support.byte_tokenizer import byte_tokenizer
from twostroke.core.constraint import ReasoningSection
from twostroke.model.tokenizer.preface import ReasoningSplitter, ReasoningTokenCounter, SegmentKind

ANEW, INSIDE = ReasoningSection("<think>", "</think>"), ReasoningSection("", "</think>")


def cut(preface: ReasoningSection, text: str, cuts: list[int]) -> tuple[str, str, str]:
    """Split a text; return the delimiters, the reasoning, and the text after it.

    The segments, joined, must be the text.
    """
    cutter, segments = ReasoningSplitter(preface), list[tuple[SegmentKind, str]]()
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        segments += cutter.feed(text[start:end])
    segments += cutter.finish()
    assert "".join(part for _, part in segments) == text
    assert all(part for _, part in segments)
    marks, inside, after = (
        "".join(part for kind, part in segments if kind is segment_kind)
        for segment_kind in SegmentKind
    )
    return marks, inside, after


@pytest.mark.parametrize(
    ("preface", "text", "expected"),
    [
        (ANEW, "", ("", "", "")),
        (ANEW, "hello", ("", "", "hello")),
        (ANEW, "<think>a<b</think>c", ("<think></think>", "a<b", "c")),
        (ANEW, " \n<think>a", (" \n<think>", "a", "")),
        (ANEW, "<think></think>", ("<think></think>", "", "")),
        (ANEW, "<thi", ("", "", "<thi")),
        (ANEW, "<thinker>a</think>", ("", "", "<thinker>a</think>")),
        (ANEW, "x<think>a</think>", ("", "", "x<think>a</think>")),
        (ANEW, "   ", ("", "", "   ")),
        (ANEW, " " * 200 + "<think>", ("", "", " " * 200 + "<think>")),
        (INSIDE, "a</thi</think>b</think>", ("</think>", "a</thi", "b</think>")),
        (INSIDE, "a</think", ("", "a</think", "")),
        (INSIDE, "<think>a</think>", ("</think>", "<think>a", "")),
        (ReasoningSection("◁t▷", "◁/t▷"), "◁t▷é◁/◁/t▷ö", ("◁t▷◁/t▷", "é◁/", "ö")),
    ],
)
def test_segments_do_not_depend_on_how_the_text_arrives(
    preface: ReasoningSection, text: str, expected: tuple[str, str, str]
) -> None:
    assert cut(preface, text, []) == expected
    assert cut(preface, text, list(range(len(text)))) == expected
    rng = random.Random(0)
    for _ in range(50):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 8)))
        assert cut(preface, text, cuts) == expected


@pytest.mark.parametrize("preface", [ANEW, INSIDE])
@pytest.mark.parametrize("text", ["<" * 200_000, " " * 200_000, "</think" * 30_000, "x" * 200_000])
def test_hostile_text_takes_linear_time(preface: ReasoningSection, text: str) -> None:
    def seconds(part: str) -> float:
        start_s = time.process_time()
        cut(preface, part, list(range(0, len(part), 20)))
        return time.process_time() - start_s

    # The least of three, since the tests' garbage may be collected meanwhile.
    assert min(seconds(text) for _ in range(3)) < 10 * seconds(text[: len(text) // 4]) + 0.5


@pytest.mark.parametrize(
    ("preface", "text", "rest"),
    [
        (ANEW, "hello world", "hello world"),
        (ANEW, "<think>hello hé</think>", ""),
        (ANEW, "<think>hello</think>é world", "é world"),
        (ANEW, " <thinx", " <thinx"),
        (INSIDE, "hello</think>hello", "hello"),
        (INSIDE, "hello", ""),
        (ReasoningSection("◁t▷", "◁/t▷"), "◁t▷é◁/t▷é", "é"),
    ],
)
def test_tokens_of_the_reasoning_section_are_counted(
    preface: ReasoningSection, text: str, rest: str
) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    expected = len(ids) - len(tokenizer.encode(rest))
    for size in (1, 3, len(ids)):
        counter = ReasoningTokenCounter(preface, tokenizer)
        for start in range(0, len(ids), size):
            counter.feed(ids[start : start + size])
        assert counter.count == expected
