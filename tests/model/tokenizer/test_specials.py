"""Splitting text at added tokens: leftmost, longest, and with their flags."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twostroke.model.tokenizer.specials import AddedToken, AddedTokenSplitter


def _splitter(*texts: str, **flags: bool) -> AddedTokenSplitter:
    return AddedTokenSplitter(
        AddedToken(i, text, special=True, **flags) for i, text in enumerate(texts)
    )


def _parts(splitter: AddedTokenSplitter, text: str) -> list[str | int]:
    return [
        part if isinstance(part, str) else part.id
        for part in splitter.split(text, parse_special=True)
    ]


def test_the_longest_of_several_wins() -> None:
    assert _parts(_splitter("<a", "<a>", "<a>>"), "x<a>>y<a>z<a") == ["x", 2, "y", 1, "z", 0]


def test_single_characters_are_tokens_too() -> None:
    assert _parts(_splitter("\n", "ab"), "\na\nab") == [0, "a", 0, 1]


def test_flags_swallow_white_space_on_their_side() -> None:
    assert _parts(_splitter("<a>", rstrip=True), "x  <a>  y") == ["x  ", 0, "y"]
    assert _parts(_splitter("<a>", lstrip=True), "x  <a>  y") == ["x", 0, "  y"]
    both = _splitter("<a>", lstrip=True, rstrip=True)
    assert _parts(both, " <a> <a> ") == [0, 0]


def test_a_long_text_full_of_tokens_that_strip_takes_linear_time() -> None:
    count = 200_000  # quadratic time would be minutes
    assert _parts(_splitter("</s>", rstrip=True), "</s> " * count) == [0] * count
    assert _parts(_splitter("</s>", lstrip=True), " </s>" * count) == [0] * count


def test_a_single_word_stands_alone() -> None:
    assert _parts(_splitter("me", single_word=True), "me, some men me") == [0, ", some men ", 0]


@given(
    st.lists(st.text("ab<>", min_size=1, max_size=4), max_size=5, unique=True),
    st.text("ab<>", max_size=40),
)
def test_splitting_equals_trying_every_token_at_every_position(texts: list[str], text: str) -> None:
    expected: list[str | int] = []
    plain = ""
    offset = 0
    while offset < len(text):
        fits = [t for t in texts if text.startswith(t, offset)]
        if not fits:
            plain += text[offset]
            offset += 1
            continue
        best = max(fits, key=len)
        expected += ([plain] if plain else []) + [texts.index(best)]
        plain = ""
        offset += len(best)
    expected += [plain] if plain else []
    assert _parts(_splitter(*texts), text) == expected
