"""Tokenizers of Hugging Face folders: byte-level and SentencePiece, and the other files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.byte_tokenizer import CHATML, DOC, END, START, TOOL, byte_metadata, byte_tokenizer
from twostroke.core.errors import ModelFormatError, ModelNotFoundError
from twostroke.model.tokenizer import Tokenizer, from_gguf, from_tokenizer_json

if TYPE_CHECKING:
    from pathlib import Path

BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
FROM_GGUF = byte_tokenizer()
PIECES = ["\u2581", "h", "e", "l", "o", "\u2581h", "\u2581he", "ll", "\u2581hell", "\u2581hello"]


def _byte_level(**members: object) -> dict[str, Any]:
    """The small byte tokenizer as a tokenizer.json."""
    metadata: dict[str, Any] = byte_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    added = [
        {"id": id_, "content": text, "special": text != TOOL}
        for id_, text in enumerate((START, END, DOC, TOOL))
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "post_processor": None,
        "decoder": {"type": "ByteLevel"},
        "model": {
            "type": "BPE",
            "vocab": {text: id_ for id_, text in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
        **members,
    }


def _sentencepiece(**members: object) -> dict[str, Any]:
    """A Llama 2 style tokenizer.json: byte fallback, spaces as U+2581, a space at the start."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *PIECES]
    merges = ["\u2581 h", "\u2581h e", "l l", "\u2581he ll", "\u2581hell o"]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": id_, "content": text, "special": True} for id_, text in enumerate(texts[:3])
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": {text: id_ for id_, text in enumerate(texts)},
            "merges": merges,
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": "<unk>",
        },
        **members,
    }


def _without_a_space() -> dict[str, Any]:
    """Return the SentencePiece tokenizer.json in Gemma's style: no space is added before a text."""
    normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    plain = _sentencepiece(normalizer=normalizer)
    del plain["decoder"]["decoders"][-1]
    return plain


def _gemma(description: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer.json that corresponds to a GGUF file of Gemma 4."""
    vocab: dict[str, int] = description["model"]["vocab"]
    kinds = dict.fromkeys(("<s>", "</s>"), 3) | {"<unk>": 2}
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": list(vocab),
        "tokenizer.ggml.token_type": [
            6 if text.startswith("<0x") else kinds.get(text, 1) for text in vocab
        ],
        "tokenizer.ggml.merges": description["model"]["merges"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _load(folder: Path, description: object, **files: object) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return from_tokenizer_json(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        "byte-level": _load(tmp_path_factory.mktemp("bytes"), _byte_level()),
        "sentencepiece": _load(tmp_path_factory.mktemp("pieces"), _sentencepiece()),
        "without a space": _load(tmp_path_factory.mktemp("gemma"), _without_a_space()),
    }


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_any_text_round_trips(folders: dict[str, Tokenizer], name: str, text: str) -> None:
    assert folders[name].decode(folders[name].encode(text)) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_both_files_of_one_tokenizer_give_the_same_ids(
    folders: dict[str, Tokenizer], text: str
) -> None:
    assert folders["byte-level"].encode(text) == FROM_GGUF.encode(text)


@given(text=st.text(st.sampled_from("hello \n\u2581aé🎉<s>")))
def test_gemma_4_has_the_ids_of_its_folder(folders: dict[str, Tokenizer], text: str) -> None:
    folder, file = folders["without a space"], from_gguf(_gemma(_without_a_space()))
    ids = folder.encode(text, add_special=True)
    assert file.encode(text, add_special=True) == ids
    assert file.decode(ids) == folder.decode(ids)
    assert file.encode("<s>hello hello", parse_special=True) == [1, *file.encode("hello hello")]


def test_special_tokens_are_kept_apart(folders: dict[str, Tokenizer]) -> None:
    tokenizer = folders["byte-level"]
    assert tokenizer.encode(f"{START}hello{END}", parse_special=True)[::2] == [0, 1]
    assert not tokenizer.special_ids.intersection(tokenizer.encode(f"{START}hello{END}"))
    assert tokenizer.special_ids == {0, 1, 2}
    assert 3 in tokenizer.encode(f"a{TOOL}b")


def test_sentencepiece_spells_spaces_and_bytes(folders: dict[str, Tokenizer]) -> None:
    tokenizer = folders["sentencepiece"]
    hello = tokenizer.find("\u2581hello")
    assert hello is not None
    assert tokenizer.encode("hello hello") == [hello, hello]
    assert tokenizer.encode("hello", add_special=True) == [1, hello]
    assert tokenizer.token_bytes(hello) == b" hello"
    assert tokenizer.token_bytes(3 + 0xE9) == b"\xe9"
    assert tokenizer.decode([hello, hello]) == "hello hello"
    assert tokenizer.decode(tokenizer.encode("é")) == "é"


def test_only_the_first_segment_gets_a_space_where_the_file_says_so(tmp_path: Path) -> None:
    metaspace = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": "first",
        "split": False,
    }
    tokenizer = _load(tmp_path, _sentencepiece(normalizer=None, pre_tokenizer=metaspace))
    first = tokenizer.encode("hello</s>hello", parse_special=True)
    texts = [tokenizer.token_text(id_) for id_ in first]
    assert texts == ["\u2581hello", "</s>", "h", "e", "ll", "o"]


def test_a_metaspace_decoder_takes_the_first_space_away(tmp_path: Path) -> None:
    decoder = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}
    tokenizer = _load(tmp_path, _sentencepiece(decoder=decoder))
    assert tokenizer.decode(tokenizer.encode("hello hello")) == "hello hello"


def test_other_files_name_ends_and_templates(tmp_path: Path) -> None:
    tokenizer = _load(
        tmp_path,
        _byte_level(),
        tokenizer_config={
            "bos_token": START,
            "eos_token": {"content": END},
            "chat_template": [
                {"name": "default", "template": "old"},
                {"name": "tool_use", "template": "tools"},
            ],
        },
        generation_config={"eos_token_id": [1, 3]},
        config={"eos_token_id": 1},
    )
    assert tokenizer.bos_id == 0
    assert tokenizer.eos_ids == {1, 2, 3}
    assert tokenizer.named_texts == {"bos_token": START, "eos_token": END}
    assert tokenizer.chat_templates == {"default": "old", "tool_use": "tools"}
    (tmp_path / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    reread = from_tokenizer_json(tmp_path / "tokenizer.json")
    assert reread.chat_templates["default"] == CHATML


def test_end_tokens_outside_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    tokenizer = _load(
        tmp_path,
        _byte_level(),
        tokenizer_config={"eos_token": END},
        generation_config={"eos_token_id": [3, -1, 1 << 32, 1 << 70]},
        config={"eos_token_id": FROM_GGUF.vocab_size},
    )
    assert 3 in tokenizer.eos_ids
    assert all(0 <= id_ < tokenizer.vocab_size for id_ in tokenizer.eos_ids)


def test_pairs_of_merges_are_read_in_both_spellings(tmp_path: Path) -> None:
    description = _byte_level()
    description["model"]["merges"] = [m.split(" ") for m in description["model"]["merges"]]
    assert _load(tmp_path, description).encode("hello") == FROM_GGUF.encode("hello")


@pytest.mark.parametrize(
    ("members", "options", "words"),
    [
        ({}, {"end_of_word_suffix": "</w>"}, "option end_of_word_suffix"),
        ({}, {"dropout": 0.1}, "option dropout"),
        ({}, {"unk_token": "<none>"}, "unknown token '<none>'"),
        ({}, {"vocab": {"a": -1}, "merges": []}, "token ids"),
        ({"normalizer": {"type": "Sanskrit"}}, {}, "normalizer 'Sanskrit' is not known"),
        ({"normalizer": {"type": "Precompiled"}}, {}, "damaged"),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA/w=="}},
            {},
            "precompiled_charsmap is damaged",
        ),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, {}, "words of 0 characters"),
        ({"pre_tokenizer": {"type": "Sequence"}}, {}, "damaged"),
        ({"decoder": {"type": "WordPiece"}}, {}, "decoder 'WordPiece' is not known"),
        ({"post_processor": {"type": "BertProcessing"}}, {}, "damaged"),
        ({"post_processor": {"type": "Sorting"}}, {}, "post-processor 'Sorting' is not known"),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}},
            {},
            r"pattern '\(' is not valid",
        ),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"String": "a"}, "behavior": "X"}},
            {},
            "damaged",
        ),
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Digits"},
                        {"type": "Metaspace", "prepend_scheme": "first"},
                    ],
                }
            },
            {},
            "Metaspace is not the first",
        ),
    ],
)
def test_options_that_would_change_the_ids_are_refused(
    tmp_path: Path, members: dict[str, object], options: dict[str, object], words: str
) -> None:
    description = _byte_level(**members)
    description["model"].update(options)
    with pytest.raises(ModelFormatError, match=words):
        _load(tmp_path, description)


def test_no_text_merges_into_a_special_token(tmp_path: Path) -> None:
    description = _sentencepiece()
    description["model"]["merges"] += ["< s", "<s >"]
    for text in ("<", "s", ">", "<s"):
        description["model"]["vocab"][text] = len(description["model"]["vocab"])
    tokenizer = _load(tmp_path, description)
    assert 1 not in tokenizer.encode("<s>")
    assert 1 in tokenizer.encode("<s>", parse_special=True)


def test_a_character_without_merge_and_byte_is_unknown(tmp_path: Path) -> None:
    description = _sentencepiece()
    description["model"]["byte_fallback"] = False
    tokenizer = _load(tmp_path, description)
    assert tokenizer.find("<unk>") in tokenizer.encode("h!")
    assert tokenizer.find("<unk>") not in tokenizer.encode("hello")


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json"):
        from_tokenizer_json(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "JSON object"),
        (b"{}", "type None"),
        (b'{"model": {"type": "Unigram"}}', "type Unigram, which this version"),
        (b'{"model": {"type": "BPE"}}', "damaged"),
        (b'{"model": {"vocab": {"a": 0, "b": 1}, "merges": ["a b"]}}', "'a' and 'b' does not fit"),
        (b'{"model": {"vocab": {"a": 0, "ab": 1}, "merges": [["a", "b"]]}}', "does not fit"),
        (b'{"model": {"vocab": {"a": 0, "ab": 1}, "merges": ["ab"]}}', "damaged"),
        (b'{"model": {"vocab": {"a": 0, "ab": 1}, "merges": [["a"]]}}', "damaged"),
        (b'{"model": {"vocab": {"a": 0, "ab": 1}, "merges": [["a", "b", "c"]]}}', "damaged"),
        (b'{"model": {"vocab": {"a": "x"}, "merges": []}}', "damaged|cannot"),
        (b'{"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": [{}]}', "damaged"),
        (
            b'{"model": {"vocab": {}, "merges": []}, "added_tokens": [{"id": -1, "content": "x"}]}',
            "the id -1",
        ),
        (
            b'{"model": {"vocab": {}, "merges": []}, "pre_tokenizer": {"type": "X"}}',
            "cannot be used",
        ),
    ],
)
def test_damaged_files_are_format_errors(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelFormatError, match=words):
        from_tokenizer_json(tmp_path)
