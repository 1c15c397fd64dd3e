"""Fill in the middle: the tokens that a vocabulary has for it, and the prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.byte_tokenizer import CONTROL, USER_DEFINED, byte_tokenizer
from support.piece_tokenizer import piece_metadata, piece_tokenizer, spelled
from support.tiny import tokenizer_json
from twostroke.model.tokenizer import encode_infill, from_gguf, from_tokenizer_json

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.model.tokenizer import Tokenizer

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


def _odd(*texts: str, kind: int = CONTROL) -> tuple[tuple[str, int], ...]:
    return tuple((text, kind) for text in texts)


def _prompt(tokenizer: Tokenizer, prefix: str | list[int], suffix: str) -> list[int]:
    assert tokenizer.infill is not None
    return encode_infill(tokenizer, tokenizer.infill, prefix, suffix)


@pytest.mark.parametrize("form", [QWEN, DEEPSEEK, STARCODER])
def test_well_known_tokens_go_around_prefix_and_suffix(form: tuple[str, ...]) -> None:
    tokenizer = byte_tokenizer(odd=_odd(*reversed(form)))
    ids = _prompt(tokenizer, "hello", " w")
    assert spelled(tokenizer, ids) == [form[0], "hello", form[1], "Ġw", form[2]]


def test_no_space_is_put_into_the_text_around_the_gap() -> None:
    """A suffix continues the text before it, even if the tokenizer adds a space to a text."""
    tokenizer = byte_tokenizer(odd=_odd(*QWEN), add_space_prefix=True)
    ids = _prompt(tokenizer, "hello", "world")
    after = ids[ids.index(tokenizer.find(QWEN[1]) or 0) + 1 : -1]
    assert b"".join(map(tokenizer.token_bytes, after)) == b"world"


def test_a_prefix_may_be_ids() -> None:
    tokenizer = byte_tokenizer(odd=_odd(*QWEN))
    ids = tokenizer.encode("hello")
    assert _prompt(tokenizer, ids, " w") == _prompt(tokenizer, "hello", " w")


def test_a_begin_of_sequence_stays_the_first() -> None:
    tokenizer = byte_tokenizer(odd=_odd(*QWEN), add_bos_token=True)
    assert _prompt(tokenizer, "hello", "x")[:2] == [0, tokenizer.find(QWEN[0])]


@pytest.mark.parametrize(
    "keys",
    [
        ("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
        ("prefix_token_id", "suffix_token_id", "middle_token_id"),
    ],
)
def test_what_the_file_names_counts_more_than_what_is_known(keys: tuple[str, ...]) -> None:
    named_tokenizer = byte_tokenizer(odd=_odd(*QWEN, *STARCODER))
    named = {key: named_tokenizer.find(text) for key, text in zip(keys, STARCODER, strict=True)}
    tokenizer = byte_tokenizer(odd=_odd(*QWEN, *STARCODER), **named)
    assert spelled(tokenizer, _prompt(tokenizer, "", "x")) == [*STARCODER[:2], "x", STARCODER[2]]


@pytest.mark.parametrize("texts", [(), QWEN[:2], (QWEN[0], STARCODER[1], QWEN[2])])
def test_a_vocabulary_without_all_three_fills_no_gaps(texts: tuple[str, ...]) -> None:
    assert byte_tokenizer(odd=_odd(*texts)).infill is None


def test_heads_of_other_files_and_the_marks_themselves_end_a_middle() -> None:
    other_ends = ("<|file_sep|>", "<|repo_name|>", "<|fim_pad|>", "<|end_of_page|>")
    first = byte_tokenizer(odd=_odd(*QWEN, *other_ends))
    tokenizer = byte_tokenizer(
        odd=_odd(*QWEN, *other_ends), fim_sep_token_id=first.find(other_ends[3])
    )
    assert tokenizer.infill is not None
    assert {tokenizer.token_text(id_) for id_ in tokenizer.infill.end_ids} == {*QWEN, *other_ends}
    assert not tokenizer.infill.end_ids & tokenizer.eos_ids
    assert tokenizer.infill.repository == tokenizer.find(other_ends[1])
    assert tokenizer.infill.file == tokenizer.find(other_ends[3])
    assert first.infill is not None
    assert first.infill.file == first.find(other_ends[0])


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_text_that_looks_like_a_mark_stays_text(kind: int) -> None:
    tokenizer = byte_tokenizer(odd=_odd(*QWEN, "<|file_sep|>", kind=kind))
    assert tokenizer.infill is not None
    text = "".join((*QWEN, "<|file_sep|>", "<", "|fim_prefix|>"))
    ids = _prompt(tokenizer, text, text)
    suffix_at = ids.index(tokenizer.infill.suffix)
    assert tokenizer.decode(ids[1:suffix_at], skip_special=False) == text
    assert tokenizer.decode(ids[suffix_at + 1 : -1], skip_special=False) == text
    assert [id_ for id_ in ids if id_ in tokenizer.infill.end_ids] == [
        tokenizer.infill.prefix,
        tokenizer.infill.suffix,
        tokenizer.infill.middle,
    ]


def test_a_suffix_gets_no_space_before_it() -> None:
    marks = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    metadata = piece_metadata()
    for name, values in (("tokens", marks), ("token_type", [3] * 4), ("scores", [0.0] * 4)):
        metadata[f"tokenizer.ggml.{name}"] += [*values]  # type: ignore[operator]
    tokenizer = from_gguf(metadata)
    ids = _prompt(tokenizer, "hello", "hello he")
    texts = ["<s>", "▁<PRE>", "▁hello", "▁<SUF>", "hell", "o", "▁he", "▁<MID>"]
    assert spelled(tokenizer, ids) == texts
    assert tokenizer.infill is not None
    assert tokenizer.find("▁<EOT>") in tokenizer.infill.end_ids
    assert piece_tokenizer().infill is None


def test_a_suffix_keeps_its_line_break_where_a_token_has_two() -> None:
    types_by_text = {"▁<PRE>": 3, "▁<SUF>": 3, "▁<MID>": 3, "\n": 1, "\n\n": 1}
    metadata = piece_metadata()
    for name, values in (
        ("tokens", types_by_text),
        ("token_type", types_by_text.values()),
        ("scores", [0.0] * 5),
    ):
        metadata[f"tokenizer.ggml.{name}"] += [*values]  # type: ignore[operator]
    tokenizer = from_gguf(metadata)
    texts = spelled(tokenizer, _prompt(tokenizer, "", "\nab"))
    assert texts == ["<s>", "▁<PRE>", "▁<SUF>", "▁", "\n", "ab", "▁<MID>"]


def test_a_folder_s_tokens_are_known_by_their_texts(tmp_path: Path) -> None:
    import json

    description = tokenizer_json()
    count = len(description["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    description["added_tokens"] += [
        {"id": count + index, "content": text, "special": False, **flags}
        for index, text in enumerate(QWEN)
    ]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(description))
    tokenizer = from_tokenizer_json(path)
    ids = _prompt(tokenizer, "hello", QWEN[2])
    assert ids[:3] == [count, tokenizer.find("hello"), count + 1]
    assert ids.count(count + 2) == 1


def test_a_model_with_an_id_outside_the_vocabulary_cannot_fill_in() -> None:
    assert byte_tokenizer(fim_pre_token_id=10**6).infill is None
