"""The translation of a text's tokens between two vocabularies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.byte_tokenizer import DOC, END, START, byte_metadata, byte_tokenizer
from twostroke.model.tokenizer import Translation, from_gguf

FINE = byte_tokenizer()
COARSE = byte_tokenizer(more_merges=("Ġw o", "Ġwo r", "Ġwor l", "Ġworl d", "a b", "ab c"))
COARSE_TO_FINE, FINE_TO_COARSE = Translation(COARSE, FINE), Translation(FINE, COARSE)
WORDS = ["hello", " world", "abc", "é", "🙂", " ", "\n", "x"]
TEXTS = st.lists(st.sampled_from(WORDS)).map("".join)


@given(TEXTS)
def test_a_text_is_tokenized_as_the_other_tokenizer_does_it(text: str) -> None:
    ids = COARSE.encode(text)
    translated = COARSE_TO_FINE.translate(ids)
    assert translated.tokens == FINE.encode(text)
    assert translated.ends[-1:] == COARSE_TO_FINE.end_offsets(ids)[-1:]


@given(st.lists(st.tuples(TEXTS, st.sampled_from([START, END, DOC, ""]))))
def test_control_tokens_become_their_namesakes(pieces: list[tuple[str, str]]) -> None:
    text = "".join(plain + special for plain, special in pieces)
    ids = COARSE.encode(text, parse_special=True)
    translated = COARSE_TO_FINE.translate(ids)
    assert FINE.decode(translated.tokens, skip_special=False) == text
    assert FINE_TO_COARSE.translate(translated.tokens).tokens == ids


@given(TEXTS)
def test_ends_tell_which_tokens_are_translated(text: str) -> None:
    ids = COARSE.encode(text)
    translated, ends = COARSE_TO_FINE.translate(ids), COARSE_TO_FINE.end_offsets(ids)
    data = text.encode()
    assert [b"".join(map(COARSE.token_bytes, ids[:n])) for n in range(1, len(ids) + 1)] == [
        data[:end] for end in ends
    ]
    for count, end in enumerate(translated.ends, 1):
        assert b"".join(map(FINE.token_bytes, translated.tokens[:count])) == data[:end]


def test_half_a_character_waits_for_its_rest() -> None:
    ids = [FINE.encode("é")[0], *(FINE.find(char) or 0 for char in "ðŁ")]
    translated = FINE_TO_COARSE.translate(ids)
    assert COARSE.decode(translated.tokens) == "é"
    assert translated.ends[-1] == 2
    assert FINE_TO_COARSE.end_offsets(ids)[-1] > 2


def test_an_end_token_without_a_namesake_becomes_the_targets_end_token() -> None:
    other = byte_tokenizer(odd=(("<stop>", 3),), eos_token_id=None)
    stop = other.find("<stop>")
    assert stop is not None
    assert Translation(other, FINE).translate([stop]).tokens == []  # it ends nothing there
    ending = byte_tokenizer(odd=(("<stop>", 3),), eos_token_id=stop)
    assert Translation(ending, FINE).translate([stop]).tokens == [min(FINE.eos_ids)]


def test_a_vocabulary_without_letters_does_not_preserve_text() -> None:
    assert COARSE_TO_FINE.preserves_text()
    assert FINE_TO_COARSE.preserves_text()
    metadata = byte_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    metadata["tokenizer.ggml.tokens"] = [
        f"q{number}x" if token in "abc" else token for number, token in enumerate(tokens)
    ]
    assert not Translation(FINE, from_gguf(metadata)).preserves_text()


@given(TEXTS)
def test_breaks_are_between_characters(text: str) -> None:
    ids = FINE.encode(text)
    for end, count in FINE_TO_COARSE.character_starts(ids).items():
        data = b"".join(map(FINE.token_bytes, ids[:count]))
        assert len(data) == end
        assert text.startswith(data.decode())
