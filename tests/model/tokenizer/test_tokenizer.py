"""Tokenizers of GGUF metadata: round trips, special tokens, and invalid files."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.byte_tokenizer import (
    BYTE,
    CONTROL,
    DOC,
    END,
    START,
    TOOL,
    UNUSED,
    byte_characters,
    byte_metadata,
    byte_tokenizer,
)
from twostroke.core.errors import ModelFormatError, RequestError
from twostroke.model.tokenizer import from_gguf
from twostroke.model.tokenizer.pretokenizers import PRE_TOKENIZERS

TOKENIZER = byte_tokenizer()
QWEN = byte_tokenizer(pre="qwen2")
NAMES = {spec: name for name, spec in PRE_TOKENIZERS.items() if not spec.nfc}.values()
BY_NAME = {name: byte_tokenizer(pre=name) for name in NAMES}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
MARKED = st.lists(st.one_of(TEXTS, st.sampled_from([START, END, DOC, "<|", "im_end|>"]))).map(
    "".join
)


@given(TEXTS)
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("name", BY_NAME)
@given(text=TEXTS)
def test_text_round_trips_with_each_pre_tokenizer(name: str, text: str) -> None:
    tokenizer = BY_NAME[name]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_file_of_kimi_needs_no_list_of_merges() -> None:
    """Its tokens are ranked by their ids, in the order of these merges."""
    listed, ranked = byte_tokenizer(pre="kimi-k2"), byte_tokenizer(pre="kimi-k2", merges=None)
    for text in ("hello hell he", "wé  \U0001f44d", "llhellohe"):
        assert ranked.encode(text) == listed.encode(text)
    with pytest.raises(ModelFormatError, match="merges is missing"):
        byte_tokenizer(pre="gpt-2", merges=None)


@given(TEXTS)
def test_composed_text_round_trips_where_the_model_composes_it(text: str) -> None:
    composed = unicodedata.normalize("NFC", text)
    assert QWEN.decode(QWEN.encode(text)) == composed


@given(MARKED)
def test_text_never_becomes_a_special_token(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert not TOKENIZER.special_ids.intersection(ids)
    assert TOKENIZER.decode(ids) == text


@given(MARKED)
def test_trusted_text_round_trips_through_special_tokens(text: str) -> None:
    ids = TOKENIZER.encode(text, parse_special=True)
    assert TOKENIZER.decode(ids, skip_special=False) == text
    special = [id_ for id_ in ids if id_ in TOKENIZER.special_ids]
    assert len(special) == sum(map(text.count, (START, END, DOC)))


def test_special_tokens_are_parsed_only_when_asked() -> None:
    text = f"{START}hello{END}"
    start, hello, end = TOKENIZER.encode(text, parse_special=True)
    assert (start, TOKENIZER.token_text(hello), end) == (0, "hello", 1)
    assert len(TOKENIZER.encode(text)) > 3


def test_user_defined_tokens_are_found_everywhere_and_shown() -> None:
    ids = TOKENIZER.encode(f"hello{TOOL}hello")
    assert [TOKENIZER.token_text(id_) for id_ in ids] == ["hello", TOOL, "hello"]
    assert TOKENIZER.decode(ids) == f"hello{TOOL}hello"


def test_control_tokens_are_left_out_of_text_unless_asked_for() -> None:
    ids = TOKENIZER.encode(f"{START}hello{END}", parse_special=True)
    assert TOKENIZER.decode(ids) == "hello"
    assert TOKENIZER.decode(ids, skip_special=False) == f"{START}hello{END}"


def test_half_a_surrogate_pair_is_read_as_a_replacement() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud83db")) == "a\ufffdb"
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud83c\udf89b")) == "a🎉b"


def test_token_bytes_are_exact() -> None:
    for value, character in enumerate(byte_characters()):
        char = TOKENIZER.find(character)
        assert char is not None
        assert TOKENIZER.token_bytes(char) == bytes([value])
    hello = TOKENIZER.find("hello")
    assert hello is not None
    assert TOKENIZER.token_bytes(hello) == b"hello"
    assert TOKENIZER.token_bytes(0) == START.encode()


def test_ids_that_the_vocabulary_lacks_are_empty_and_negative_ones_refused() -> None:
    assert TOKENIZER.token_bytes(TOKENIZER.vocab_size + 7) == b""
    assert TOKENIZER.token_text(TOKENIZER.vocab_size) is None
    assert TOKENIZER.find("no such token") is None
    with pytest.raises(RequestError, match="-1"):
        TOKENIZER.token_bytes(-1)


def test_byte_typed_tokens_stand_for_their_byte() -> None:
    tokenizer = byte_tokenizer(odd=(("<0xE9>", BYTE), ("[unused]", UNUSED)))
    id_ = tokenizer.find("<0xE9>")
    assert id_ is not None
    assert tokenizer.token_bytes(id_) == b"\xe9"


def test_begin_of_sequence_is_added_where_the_model_wants_it() -> None:
    hello = TOKENIZER.encode("hello")
    assert TOKENIZER.encode("hello", add_special=True) == hello
    both = byte_tokenizer(add_bos_token=True, add_eos_token=True)
    assert both.encode("hello", add_special=True) == [0, *hello, 1]
    assert both.encode("", add_special=True) == [0, 1]
    assert byte_tokenizer(pre="llama-bpe").encode("", add_special=True) == [0]


def test_space_prefix_is_added_to_text_without_one() -> None:
    tokenizer = byte_tokenizer(add_space_prefix=True)
    assert tokenizer.decode(tokenizer.encode("w")) == " w"
    assert tokenizer.decode(tokenizer.encode("\nw")) == "\nw"
    assert tokenizer.encode("") == []


def test_well_known_ends_end_a_generation_too() -> None:
    assert TOKENIZER.eos_ids == {1, 2}
    assert byte_tokenizer(eot_token_id=0).eos_ids == {0, 1, 2}
    for end in ("<|return|>", "<|calls|>"):  # harmony, Solar
        tokenizer = byte_tokenizer(odd=((end, CONTROL), ("<|end|>", CONTROL)))
        assert tokenizer.find(end) in tokenizer.eos_ids
        assert tokenizer.find("<|end|>") not in tokenizer.eos_ids


def test_an_end_text_that_is_ordinary_text_does_not_end_a_generation() -> None:
    tokenizer = byte_tokenizer(odd=(("<EOT>", UNUSED),))
    assert tokenizer.find("<EOT>") not in tokenizer.eos_ids


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_no_text_merges_into_a_control_token(pre: str) -> None:
    tokenizer = byte_tokenizer(pre=pre, more_merges=("hell a",), odd=(("hella", CONTROL),))
    control = tokenizer.find("hella")
    assert control in tokenizer.special_ids
    assert control not in tokenizer.encode("hella hella")
    assert control in tokenizer.encode("hella", parse_special=True)


def test_a_merge_that_leads_to_no_token_does_not_count() -> None:
    metadata = byte_metadata()
    merges = metadata["tokenizer.ggml.merges"]
    assert isinstance(merges, list)
    merges[:0] = ["h e l", "q zebra", "nospace", "a q"]
    assert from_gguf(metadata).encode("hello aq") == TOKENIZER.encode("hello aq")


def test_tokens_with_one_text_keep_their_own_ids() -> None:
    metadata = byte_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    tokens.append("hello")
    types.append(1)
    tokenizer = from_gguf(metadata)
    first = tokens.index("hello")
    assert tokenizer.token_bytes(first) == tokenizer.token_bytes(len(tokens) - 1) == b"hello"


def test_an_unknown_pre_tokenizer_is_named() -> None:
    with pytest.raises(ModelFormatError, match=r"'smolm'.*Did you mean 'smollm'"):
        byte_tokenizer(pre="smolm")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model": None}, "no tokenizer"),
        ({"model": "gpt3"}, "'gpt3'.*Did you mean 'gpt2'"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": "abc"}, "tokens is missing"),
        ({"merges": None}, "merges is missing"),
        ({"token_type": [1, 1]}, "2 token types"),
        ({"add_bos_token": 1}, "not bool"),
    ],
)
def test_metadata_whose_parts_do_not_fit_is_refused(keys: dict[str, object], words: str) -> None:
    with pytest.raises(ModelFormatError, match=words):
        byte_tokenizer(**keys)


def test_damaged_characters_stand_for_themselves() -> None:
    tokenizer = byte_tokenizer(odd=(("日本", 1),))
    id_ = tokenizer.find("日本")
    assert id_ is not None
    assert tokenizer.token_bytes(id_) == "日本".encode()
