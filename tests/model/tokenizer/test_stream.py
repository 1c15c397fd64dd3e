"""Streamed text: exact, without partial characters, cut at the first stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.byte_tokenizer import END, byte_tokenizer
from twostroke.core.constraint import ReasoningSection
from twostroke.model.tokenizer import StreamDecoder

TOKENIZER = byte_tokenizer()
IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=60)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
STOPS = st.lists(st.text("abé🎉 ", max_size=5), max_size=4)


def _byte_ids(data: bytes) -> list[int]:
    """Return one token for each byte: the text is cut at every possible offset."""
    by_byte = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size)}
    return [by_byte[bytes([value])] for value in data]


def _stream(
    ids: list[int], *stops: str, include_stop: bool = False
) -> tuple[list[str], str | None]:
    decoder = StreamDecoder(TOKENIZER, stops, include_stop=include_stop)
    texts = [decoder.feed(id_) for id_ in ids]
    return [*texts, decoder.finish()], decoder.stop


def _first_to_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The slow twin of `StopMatcher`: add characters until the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@given(IDS)
def test_pieces_join_to_the_decoded_whole(ids: list[int]) -> None:
    texts, stop = _stream(ids)
    assert "".join(texts) == TOKENIZER.decode(ids)
    assert stop is None


@given(TEXTS, st.data())
def test_any_split_of_a_text_streams_to_the_same_text(text: str, data: st.DataObject) -> None:
    stops = data.draw(STOPS)
    streamed = _stream(TOKENIZER.encode(text), *stops)
    bytewise = _stream(_byte_ids(text.encode()), *stops)
    assert "".join(streamed[0]) == "".join(bytewise[0])
    assert streamed[1] == bytewise[1]


@given(TEXTS)
def test_no_piece_ends_inside_a_character(text: str) -> None:
    texts, _ = _stream(_byte_ids(text.encode()))
    assert "\ufffd" not in "".join(texts) or "\ufffd" in text
    lengths = [len(text_part.encode()) for text_part in texts]
    assert sum(lengths) == len(text.encode())


@given(st.text("abé🎉 ", max_size=40), STOPS, st.booleans())
def test_the_first_stop_string_to_end_cuts_the_text(
    text: str, stops: list[str], include: bool
) -> None:
    texts, stop = _stream(_byte_ids(text.encode()), *stops, include_stop=include)
    expected = _first_to_end(text, stops)
    if expected is None:
        assert ("".join(texts), stop) == (text, None)
    else:
        end, expected_stop = expected
        assert stop == expected_stop
        assert "".join(texts) == text[: end if include else end - len(expected_stop)]


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1))
def test_what_is_held_back_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    decoder = StreamDecoder(TOKENIZER, stops)
    released, fed = "", ""
    for char in text:
        released += decoder.feed(_byte_ids(char.encode())[0])
        fed += char
        if decoder.stop is not None:
            break
        held_back = fed[len(released) :]
        assert fed == released + held_back
        assert held_back == "" or any(stop.startswith(held_back) for stop in stops)
        longer = range(len(held_back) + 1, len(fed) + 1)
        assert not any(stop.startswith(fed[-n:]) for n in longer for stop in stops)


@pytest.mark.parametrize("stop", ["STOP", "é🎉é", "\n\nUser:", "🎉"])
def test_a_stop_string_is_found_at_every_byte_offset(stop: str) -> None:
    text = f"some té🎉xt {stop} and more"
    data = text.encode()
    for cut in range(len(data) + 1):
        for token_bytes in (data[:cut], data[cut:]):
            assert token_bytes in data
        ids = [*_byte_ids(data[:cut]), *TOKENIZER.encode(data[cut:].decode("utf-8", "ignore"))]
        if data[cut:].decode("utf-8", "ignore").encode() != data[cut:]:
            ids = _byte_ids(data)
        texts, found_stop = _stream(ids, stop)
        expected = text[: text.index(stop)]
        assert "".join(texts) == expected
        assert found_stop == stop


def test_a_stop_string_inside_one_token_is_found() -> None:
    texts, found_stop = _stream(TOKENIZER.encode("say hello now"), "ell")
    assert "".join(texts) == "say h"
    assert found_stop == "ell"


def test_nothing_follows_a_stop_string() -> None:
    decoder = StreamDecoder(TOKENIZER, ["b"])
    assert [decoder.feed(id_) for id_ in _byte_ids(b"abab")] == ["a", "", "", ""]
    assert decoder.finish() == ""


def test_an_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    texts, _ = _stream(_byte_ids("a🎉".encode()[:-1]))
    assert texts == ["a", "", "", "", "\ufffd"]


def test_bytes_that_are_not_text_become_replacements() -> None:
    data = b"a\xff\xc3(\xf0\x9f\x8eb"
    texts, _ = _stream(_byte_ids(data))
    assert "".join(texts) == data.decode("utf-8", "replace")


def test_held_text_comes_out_at_the_end() -> None:
    texts, stop = _stream(_byte_ids(b"abc\n\nUse"), "\n\nUser:")
    assert texts[-1] == "\n\nUse"
    assert "".join(texts) == "abc\n\nUse"
    assert stop is None


def test_finishing_twice_gives_nothing_more() -> None:
    decoder = StreamDecoder(TOKENIZER, ["zz"])
    decoder.feed(_byte_ids(b"z")[0])
    assert (decoder.finish(), decoder.finish()) == ("z", "")


def test_special_tokens_are_not_shown_and_do_not_cut_characters() -> None:
    first, second = _byte_ids("é".encode())
    end = TOKENIZER.find(END)
    assert end is not None
    texts, _ = _stream([first, end, second])
    assert texts == ["", "", "é", ""]
    decoder = StreamDecoder(TOKENIZER, shown_ids=TOKENIZER.special_ids)
    assert decoder.feed(end) == END


def test_time_does_not_grow_with_the_text_held_back() -> None:
    decoder = StreamDecoder(TOKENIZER, ["a" * 5000 + "b"])
    token = _byte_ids(b"a")[0]
    num_released = sum(len(decoder.feed(token)) for _ in range(20_000))
    assert num_released == 15_000
    assert len(decoder.finish()) == 5_000


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize(
    ("preface", "text", "stop", "expected"),
    [
        (ReasoningSection("", "</t>"), "a.b</t>c.d", ".", "a.b</t>c"),
        (ReasoningSection("<t>", "</t>"), "<t>a.b</t>c.d", ".", "<t>a.b</t>c"),
        (ReasoningSection("<t>", "</t>"), "a.b<t>c</t>", ".", "a"),
        (ReasoningSection("<t>", "</t>"), "<.b", "<.", ""),
        (ReasoningSection("", "</t>"), "a.b", ".", "a.b"),
        (ReasoningSection("", "</t>"), "a</t", "/t", "a</t"),
        (ReasoningSection("", "</t>"), "a</t>", "/t>", "a</t>"),
    ],
)
def test_stop_strings_are_not_searched_in_the_reasoning_section(
    preface: ReasoningSection, text: str, stop: str, expected: str, *, include_stop: bool
) -> None:
    decoder = StreamDecoder(TOKENIZER, [stop], preface=preface, include_stop=include_stop)
    released = "".join(map(decoder.feed, TOKENIZER.encode(text))) + decoder.finish()
    has_stopped = expected != text
    assert decoder.stop == (stop if has_stopped else None)
    assert released == expected + (stop if has_stopped and include_stop else "")
