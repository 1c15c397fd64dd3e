"""A wrong field of any step of a tokenizer.json is refused with a ModelFormatError."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest

from support.byte_tokenizer import byte_metadata
from twostroke.core.errors import ModelFormatError
from twostroke.model.tokenizer import from_gguf, from_tokenizer_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEXT = "Hello  wörld, it's 1234 日本\n a"
PATTERN = {"Regex": r"\d{1,3}"}
METASPACE = {
    "type": "Metaspace",
    "replacement": "\u2581",
    "prepend_scheme": "always",
    "split": True,
    "add_prefix_space": True,
}
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "use_regex": True,
    "trim_offsets": True,
}
REPLACE = {"type": "Replace", "pattern": PATTERN, "content": " "}
STEPS: dict[str, list[dict[str, Any]]] = {
    "normalizer": [
        {"type": "NFC"},
        {"type": "Prepend", "prepend": "\u2581"},
        REPLACE,
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="},
        {"type": "ByteLevel"},
        {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]},
    ],
    "pre_tokenizer": [
        BYTE_LEVEL,
        {"type": "Split", "pattern": PATTERN, "behavior": "Isolated", "invert": False},
        {"type": "Digits", "individual_digits": True},
        METASPACE,
        {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "CharDelimiterSplit", "delimiter": "l"},
        {"type": "FixedLength", "length": 5},
        {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}]},
    ],
    "decoder": [
        BYTE_LEVEL,
        REPLACE,
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        METASPACE,
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    ],
    "post_processor": [
        BYTE_LEVEL,
        {"type": "BertProcessing", "sep": ["<s>", 0], "cls": ["<s>", 0]},
        {"type": "RobertaProcessing", "sep": ["<s>", 0], "cls": ["<s>", 0]},
        {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        },
        {"type": "Sequence", "processors": [BYTE_LEVEL]},
    ],
}
WRONG: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    1 << 70,
    "",
    "x",
    "\ud800",
    [],
    {},
    [[]],
    ["x", -1],
    {"x": "x"},
)
WRONG_PATTERNS = (
    *(
        "(",
        ")",
        "[",
        "[]",
        "\\",
        "*",
        "(?R)",
        "\\g<0>",
        "(?&x)",
        "(?P<x>a)",
        "\\p{Nothing}",
    ),
    *("a{10000000}", "(?:a{1000}){1000}", "(?:" * 16 + "a" + "){2}" * 16, r"\b{90000}"),
    *("[" * 3000, "(" * 3000, "a" + "{1}" * 3000, "[[" * 40 + "a" + "]]" * 40, "a" * 100_000),
    *("\\x{110000}", "\\x{d800}", "(?~a)", "\\K", "\\y", "[a", "a{" + "9" * 5000 + "}"),
)


def description(**members: object) -> dict[str, Any]:
    vocab: dict[str, Any] = {
        text: id_ for id_, text in enumerate(["<s>", "<unk>", *"Helowrdits1234a\u2581 ,"])
    }
    token: dict[str, Any] = {
        "id": 0,
        "content": "<s>",
        "special": True,
        "normalized": False,
        "lstrip": False,
    }
    token |= {"rstrip": False, "single_word": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "vocab": vocab,
        "merges": ["l l", ["l", "o"]],
        "unk_token": "<unk>",
    }
    model["vocab"] |= {"ll": 40, "lo": 41}
    model |= {"fuse_unk": True, "byte_fallback": False, "ignore_merges": False, "dropout": None}
    return {"added_tokens": [token], "model": model, **members}


def used(folder: Path, content: dict[str, Any]) -> None:
    """Read a tokenizer.json, and encode and decode a text with the tokenizer."""
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = from_tokenizer_json(folder)
    tokenizer.decode(tokenizer.encode(TEXT, add_special=True))
    tokenizer.encode_exact(TEXT)
    tokenizer.encode(f"{TEXT}<s>{TEXT}", parse_special=True)


def changed(value: Any) -> Iterator[Any]:
    """Yield copies of a JSON value with one member left out or of another type, at every depth."""
    members = value.items() if isinstance(value, dict) else enumerate(value)
    for name, member in list(members):
        for wrong in WRONG:
            other = copy.copy(value)
            other[name] = wrong
            yield other
        other = copy.copy(value)
        del other[name]
        yield other
        if isinstance(member, (dict, list)):
            for inner in changed(member):
                other = copy.copy(value)
                other[name] = inner
                yield other


def refusals(folder: Path, contents: Iterator[dict[str, Any]]) -> list[str]:
    """Read and use each file; return the messages of the refused files."""
    sentences = []
    for content in contents:
        try:
            used(folder, content)
        except ModelFormatError as error:
            sentences.append(str(error))
    return sentences


@pytest.mark.parametrize("member", STEPS)
def test_a_step_with_any_wrong_field_is_read_or_refused(tmp_path: Path, member: str) -> None:
    for step in STEPS[member]:
        used(tmp_path, description(**{member: step}))
    wrong = (other for step in STEPS[member] for other in changed(step))
    sentences = refusals(tmp_path, (description(**{member: step}) for step in wrong))
    assert len(sentences) > 50
    assert all("tokenizer.json" in sentence for sentence in sentences)


@pytest.mark.parametrize("member", ["added_tokens", "model"])
def test_tokens_and_merges_with_any_wrong_field_are_read_or_refused(
    tmp_path: Path, member: str
) -> None:
    valid = description()
    if member == "model":  # three tokens say as much as all
        vocab = {"<unk>": 0, "l": 1, "ll": 2}
        valid["model"] |= {"vocab": vocab, "merges": ["l l"]}
        valid["added_tokens"] = []
    wrong = ({**valid, member: other} for other in changed(valid[member]))
    assert len(refusals(tmp_path, wrong)) > 50


@pytest.mark.parametrize(
    ("member", "step", "words"),
    [
        ("normalizer", {"type": "Prepend"}, "normalizer Prepend .* field prepend is missing"),
        ("normalizer", {"type": "Prepend", "prepend": "\ud800"}, r"normalizer\.prepend"),
        ("pre_tokenizer", {**METASPACE, "replacement": "\ud800"}, r"pre_tokenizer\.replacement"),
        ("pre_tokenizer", {**METASPACE, "replacement": 1}, "Metaspace .* replacement is not one"),
        ("decoder", {"type": "Replace", "content": ""}, "decoder Replace .* pattern is missing"),
        ("post_processor", {"type": "BertProcessing"}, "post-processor BertProcessing .* sep"),
    ],
)
def test_the_step_and_the_field_are_named(
    tmp_path: Path, member: str, step: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelFormatError, match=rf"tokenizer\.json .*{words}"):
        used(tmp_path, description(**{member: step}))


@pytest.mark.parametrize("pattern", WRONG_PATTERNS, ids=lambda pattern: ascii(pattern)[1:20])
def test_a_pattern_that_is_wrong_or_too_large_is_refused(tmp_path: Path, pattern: str) -> None:
    """Without the limits on its size, some of these patterns take tens of gigabytes."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json .*pre-tokenizer Split .*pattern"):
        used(tmp_path, description(pre_tokenizer=split))


def test_texts_of_a_gguf_file_need_not_be_unicode() -> None:
    metadata = byte_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    metadata["tokenizer.ggml.tokens"] = [*tokens[:-1], "\udcff"]
    try:
        tokenizer = from_gguf(metadata)
        tokenizer.decode([len(tokens) - 1])
        tokenizer.encode(TEXT)
    except ModelFormatError:
        pass
