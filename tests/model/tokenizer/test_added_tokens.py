"""Added tokens of a tokenizer.json, in raw and normalized text, compared with `tokenizers`."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers

from support.vocabulary_kinds import FOLDER_KINDS, kind_json
from twostroke.model.tokenizer import Piece, Prompt, Tokenizer, from_tokenizer_json

if TYPE_CHECKING:
    from pathlib import Path

CHARACTERS = "abAB  <|>_é\u0301eｅ²ﬁf\u2581\n\t\u3000\x1c1-"
FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
NORMALIZERS: dict[str, Any] = {
    "none": None,
    "NFC": {"type": "NFC"},
    "NFKD": {"type": "NFKD"},
    "spaces": SPACES,
    "Llama 2": {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, SPACES],
    },
}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}
CUTS: dict[str, Any] = {"whole": None, "first space": {**METASPACE, "split": True}}


def _description(added: list[dict[str, Any]], **steps: Any) -> dict[str, Any]:
    vocabulary = {char: id_ for id_, char in enumerate(dict.fromkeys("?" + CHARACTERS))}
    for index, entry in enumerate(added):
        entry["id"] = vocabulary.get(entry["content"], 100 + index)
        for flag in FLAGS:
            entry.setdefault(flag, False)
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    shell = {"version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": None}
    return {**shell, **steps, "model": {**model, "unk_token": "?"}}


def _both(folder: Path, added: list[dict[str, Any]], **steps: Any) -> tuple[Tokenizer, Any]:
    description = _description(added, **steps)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(description))
    for entry in added:  # they give ids of their own to what is not in the vocabulary
        entry["id"] = theirs.token_to_id(entry["content"])
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    return from_tokenizer_json(folder), theirs


def _random_tokens(rng: random.Random) -> list[dict[str, Any]]:
    count = rng.randint(1, 8)
    texts = {"".join(rng.choices(CHARACTERS, k=rng.randint(1, 4))) for _ in range(count)}
    added = [
        {"content": text, **{flag: rng.random() < 0.35 for flag in FLAGS}} for text in sorted(texts)
    ]
    for entry in added:
        # Here no plain text becomes a special token, whatever the vocabulary says.
        entry["special"] &= len(entry["content"]) > 1
        # They panic where white space that one token has swallowed is in another with this flag.
        entry["lstrip"] &= entry["content"] == "".join(entry["content"].split())
    return added


def _random_text(rng: random.Random, texts: list[str]) -> str:
    parts = [rng.choice(texts if rng.random() < 0.5 else CHARACTERS) for _ in range(12)]
    return "".join(parts[: rng.randint(0, 12)])


@pytest.mark.parametrize(
    ("name", "cut"),
    [*((name, "whole") for name in NORMALIZERS), ("none", "first space"), ("NFC", "first space")],
)
def test_random_added_tokens_are_found_where_tokenizers_finds_them(
    tmp_path: Path, name: str, cut: str
) -> None:
    rng = random.Random(f"{name} {cut}")
    for _ in range(25):
        added = _random_tokens(rng)
        ours, theirs = _both(tmp_path, added, normalizer=NORMALIZERS[name], pre_tokenizer=CUTS[cut])
        for _ in range(40):
            text = _random_text(rng, [entry["content"] for entry in added])
            for parse_special in (True, False):
                theirs.encode_special_tokens = not parse_special
                expected = theirs.encode(text, add_special_tokens=False).ids
                assert ours.encode(text, parse_special=parse_special) == expected, (text, added)


@pytest.fixture
def composing(tmp_path: Path) -> Tokenizer:
    """A file that composes characters; `<é>` is normalized, `<e>` is found in the raw text."""
    raw = {"content": "<e>", "special": True}
    composed = {"content": "<e\u0301>", "special": True, "normalized": True, "rstrip": True}
    word = {"content": "ab", "single_word": True}
    return _both(tmp_path, [raw, composed, word], normalizer=NORMALIZERS["NFC"])[0]


def test_a_normalized_token_is_found_however_it_is_written(composing: Tokenizer) -> None:
    id_ = composing.find("<e\u0301>")
    a = composing.find("a")
    for text in ("a<é> a", "a<e\u0301>\u3000\na"):
        assert composing.encode(text, parse_special=True) == [a, id_, a]
        assert id_ not in composing.encode(text)


def test_a_raw_token_is_found_before_its_neighbours_are_normalized(composing: Tokenizer) -> None:
    id_, accent = composing.find("<e>"), composing.find("\u0301")
    assert composing.encode("<e>\u0301", parse_special=True) == [id_, accent]


def test_a_match_that_does_not_count_stays_text(composing: Tokenizer) -> None:
    a, b, both = (composing.find(text) for text in ("a", "b", "ab"))
    assert composing.encode("ab_ab") == [a, b, composing.find("_"), a, b]
    assert composing.encode("ab-ab") == [both, composing.find("-"), both]


def test_a_template_may_write_a_normalized_token(composing: Tokenizer) -> None:
    prompt = Prompt((Piece("a"), Piece("<e\u0301>", special=True), Piece(" \na<e\u0301>")))
    a, id_ = composing.find("a"), composing.find("<e\u0301>")
    assert composing.encode_prompt(prompt) == [a, id_, *composing.encode("a<é>")]


def _compare_texts(folder: Path, description: dict[str, Any], texts: tuple[str, ...]) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    ours = from_tokenizer_json(folder)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(description))
    for text in texts:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
        exact = ours.encode_exact(text)
        assert b"".join(map(ours.token_bytes, exact)).decode() == text


@pytest.mark.parametrize("kind", FOLDER_KINDS)
def test_added_tokens_of_spaces_are_written_as_spaces(tmp_path: Path, kind: str) -> None:
    """Gemma lists runs of spaces as added tokens, which are also results of merges."""
    description = kind_json(FOLDER_KINDS[kind])
    model, space = description["model"], "Ġ" if FOLDER_KINDS[kind].is_byte_level else "\u2581"
    runs = (space * 2, space * 3)
    model["vocab"] |= {text: len(model["vocab"]) + index for index, text in enumerate(runs)}
    model["merges"] = [f"{space} {space}", f"{runs[0]} {space}", *model["merges"]]
    flags = dict.fromkeys(FLAGS, False)
    added = {**{text: model["vocab"][text] for text in runs}, f"a{space}b": len(model["vocab"])}
    description["added_tokens"] += [
        {"id": id_, "content": text, **flags} for text, id_ in added.items()
    ]
    texts = ("yes   no", "a  b", "x = [\n   yes,\n  no]", f"a{space}b", f"yes{space}{space}no", "é")
    _compare_texts(tmp_path, description, texts)


REPLACE_MARK = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
BYTES_AND_FUSE = ({"type": "ByteFallback"}, {"type": "Fuse"})


@pytest.mark.parametrize(
    "steps",
    [
        [REPLACE_MARK, *BYTES_AND_FUSE],
        [REPLACE_MARK, *BYTES_AND_FUSE, {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
        [REPLACE_MARK, *BYTES_AND_FUSE, {"type": "Strip", "content": "y", "start": 0, "stop": 0}],
        [{"type": "ByteFallback"}, {**METASPACE, "split": True}],
        [{"type": "ByteFallback"}, {**METASPACE, "prepend_scheme": "never", "split": True}],
        [
            {**REPLACE_MARK, "pattern": {"Regex": "^is|e"}, "content": "\n"},
            REPLACE_MARK,
            *BYTES_AND_FUSE,
        ],
    ],
)
def test_decoders_write_the_same_text(tmp_path: Path, steps: list[dict[str, Any]]) -> None:
    description = kind_json(FOLDER_KINDS["prepend"])
    description["decoder"] = {"type": "Sequence", "decoders": steps}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    ours = from_tokenizer_json(tmp_path)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(description))
    for text in ("yes no", "  yes is", " Paris", "is is true\n\n", "the name", ""):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == theirs.decode(ids)
