"""SentencePiece-style tokenizers of GGUF metadata: scores, spaces, bytes, and round trips."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.gguf_writer import Typed
from support.piece_tokenizer import (
    END,
    LETTERS,
    MERGED,
    SPACE,
    START,
    TAG,
    piece_metadata,
    piece_tokenizer,
    slow_pieces,
    spelled,
)
from support.vocabulary_kinds import GGUF_KINDS, kind_metadata
from twostroke.core.errors import ModelFormatError
from twostroke.model.tokenizer import Piece, Prompt, StreamDecoder, from_gguf, merges

TOKENIZER = piece_tokenizer()
BARE = piece_tokenizer(add_space_prefix=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=SPACE))
FEW = st.text("helosab> é日本".replace(" ", "  "), max_size=60)
RUNS = [SPACE * 2, SPACE * 3, SPACE * 4]
SCORES = {text: -float(index) for index, text in enumerate([*RUNS, *MERGED, *LETTERS])}


@given(FEW)
def test_the_merges_are_those_of_the_plain_twin(text: str) -> None:
    """The plain twin merges the text as a whole, and searches all pairs for each merge."""
    assert spelled(BARE, BARE.encode(text)) == slow_pieces(text.replace(" ", SPACE), SCORES)


@given(FEW)
def test_long_and_short_words_are_merged_alike(text: str) -> None:
    marked = text.replace(" ", SPACE)
    symbols = [BARE.find(char) or 0 for char in marked]
    merger = BARE._merges
    assert merger._merge_short([*symbols]) == merger._merge_long([*symbols])


def test_a_long_text_without_spaces_is_merged_too() -> None:
    """Merging in quadratic time would take minutes."""
    ids = BARE.encode("a" * 100_000)
    assert spelled(BARE, ids) == ["aaaa"] * 25_000
    assert BARE.encode("hello" * 20_000) == BARE.encode("hello") * 20_000


@pytest.mark.parametrize("tokenizer", [TOKENIZER, BARE], ids=["prefix", "bare"])
@given(text=TEXTS)
def test_any_text_round_trips_and_streams_as_it_decodes(tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    decoder = StreamDecoder(tokenizer, drops_space=tokenizer.strip_space)
    assert tokenizer.decode(ids) == text
    assert "".join([decoder.feed(id_) for id_ in ids]) + decoder.finish() == text


def test_a_space_is_put_before_a_text_where_the_file_does_not_forbid_it() -> None:
    assert spelled(TOKENIZER, TOKENIZER.encode("hello")) == ["▁hello"]
    assert spelled(TOKENIZER, TOKENIZER.encode(" hello")) == ["▁▁", "hell", "o"]
    assert spelled(BARE, BARE.encode("hello")) == ["hell", "o"]
    assert TOKENIZER.encode("") == BARE.encode("") == []


def test_runs_of_spaces_are_tokens_that_come_before_all_others() -> None:
    assert spelled(BARE, BARE.encode("a   a")) == ["a", SPACE * 3, "a"]
    assert BARE.decode(BARE.encode("a   a")) == "a   a"
    assert [BARE.token_bytes(id_) for id_ in BARE.encode("    ")] == [b"    "]


def test_characters_that_are_not_tokens_become_their_bytes() -> None:
    ids = BARE.encode("a€")
    assert spelled(BARE, ids) == ["a", "<0xE2>", "<0x82>", "<0xAC>"]
    assert [BARE.token_bytes(id_) for id_ in ids[1:]] == [b"\xe2", b"\x82", b"\xac"]


def test_the_text_of_a_byte_token_does_not_become_that_byte() -> None:
    assert BARE.decode(BARE.encode("<0xE2>")) == "<0xE2>"
    assert BARE.find("<0xE2>") not in BARE.encode("<0xE2>")


def test_without_byte_tokens_a_run_of_unknown_characters_is_one_unknown() -> None:
    metadata = piece_metadata(add_space_prefix=False)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    tokenizer = piece_tokenizer(
        add_space_prefix=False,
        tokens=[text.replace("<0x", "<1x") for text in tokens],
        token_type=[1 if kind == 6 else kind for kind in types],
    )
    assert spelled(tokenizer, tokenizer.encode("a€€a")) == ["a", "<unk>", "a"]


def test_the_text_of_a_special_token_is_special_only_in_trusted_text() -> None:
    text = f"{START}hello{END}"
    assert not TOKENIZER.special_ids.intersection(TOKENIZER.encode(text))
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    assert spelled(TOKENIZER, TOKENIZER.encode(text, parse_special=True)) == [
        START,
        "▁hello",
        END,
    ]
    assert TAG in spelled(TOKENIZER, TOKENIZER.encode(f"a{TAG}a"))


def test_a_segment_after_a_token_of_a_turn_gets_no_space() -> None:
    metadata = piece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokenizer = piece_tokenizer(
        tokens=["[INST]" if text == START else text for text in tokens], bos_token_id=2
    )
    ids = tokenizer.encode("hello[INST] hello", parse_special=True)
    assert spelled(tokenizer, ids) == ["▁hello", "[INST]", "▁hello"]


def test_turn_tokens_of_phi3_take_the_white_space_after_them() -> None:
    turns = ["<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"]
    metadata = piece_metadata()
    extra_tables = {"tokens": turns, "token_type": [3] * 4, "scores": [0.0] * 4}
    for key, values in extra_tables.items():
        table = metadata[f"tokenizer.ggml.{key}"]
        assert isinstance(table, list)
        table += values
    phi3 = from_gguf(metadata)
    ids = phi3.encode("<|user|>\nhello<|end|>\n<|assistant|>\n", parse_special=True)
    assert spelled(phi3, ids) == ["<|user|>", "▁hello", "<|end|>", "<|assistant|>"]
    prompt = Prompt((Piece("<|user|>", special=True), Piece("\n hello")))
    assert spelled(phi3, phi3.encode_prompt(prompt)) == ["<|user|>", "▁hello"]
    ids = phi3.encode("<|endoftext|> a", parse_special=True)
    assert spelled(phi3, ids) == ["<|endoftext|>", SPACE * 2, "a"]


def test_begin_of_sequence_is_added_unless_the_file_forbids_it() -> None:
    assert spelled(TOKENIZER, TOKENIZER.encode("hello", add_special=True)) == [START, "▁hello"]
    silent = piece_tokenizer(add_bos_token=False, add_eos_token=True)
    assert spelled(silent, silent.encode("hello", add_special=True)) == ["▁hello", END]


@pytest.mark.parametrize(
    ("keys", "words"),
    [({"scores": None}, "scores is missing"), ({"scores": [0.0]}, "1 score")],
)
def test_scores_that_do_not_fit_are_refused(keys: dict[str, object], words: str) -> None:
    with pytest.raises(ModelFormatError, match=words):
        piece_tokenizer(**keys)


def test_words_met_before_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merges, "_MAX_CACHED_WORDS", 3)
    texts = ["hello hell", "he lo lo hell", "aa ab hello"]
    expected = [piece_tokenizer().encode(text) for text in texts]
    assert [TOKENIZER.encode(text) for text in texts * 2] == expected * 2


@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize("type_", [None, 0, 1])
def test_a_file_without_types_of_tokens_is_read(kind: str, type_: int | None) -> None:
    """Types are optional; without them, byte tokens are recognized by their texts."""
    metadata = {
        name: value.value if isinstance(value, Typed) else value
        for name, value in kind_metadata(GGUF_KINDS[kind]).items()
    }
    types = metadata.pop("tokenizer.ggml.token_type")
    if type_ is not None:
        metadata["tokenizer.ggml.token_type"] = [type_ for _ in types]
    tokenizer = from_gguf(metadata)
    text = "yes \t日 the"
    assert tokenizer.decode(tokenizer.encode(text)).strip() == text
    if type_ is None:
        assert {tokenizer.find("<s>"), tokenizer.find("<|im_end|>")} <= tokenizer.special_ids
