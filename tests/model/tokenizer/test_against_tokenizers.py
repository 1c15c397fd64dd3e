"""Ids are the same as in Hugging Face's `tokenizers`: all steps of a file, unusual vocabularies."""

from __future__ import annotations

import json
import random
import unicodedata
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from support.byte_tokenizer import byte_characters
from support.character_classes import CLASSES, VARIED, matches_here, matches_in_guidance
from support.character_map import CHARACTER_MAP
from twostroke.model.tokenizer import Tokenizer, from_tokenizer_json, merges
from twostroke.model.tokenizer.pretokenizers import PRE_TOKENIZERS
from twostroke.model.tokenizer.words import (
    BEFORE_THOUSANDS,
    DIGIT,
    NUMBER_THOUSANDS,
    THOUSANDS,
    cut_at,
    unicode_form,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from twostroke.model.tokenizer.words import Cut

LETTERS = "aabbccdABC' 'sS12 .,-<|>_\t\n\r\x00\x1c\x85\xa0\u2003\u3000\u2581\u200d"
LETTERS += "²٣Ⅷ½éñſßﬁαж日本ก👍e\u0301"
TEXTS = st.text(LETTERS, max_size=40)
SPLIT = {"type": "Split", "invert": False, "behavior": "Isolated"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
BEHAVIORS = ["Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"]
MERGES = ["a b", "b c", "ab c", "a a", "aa aa", "b b", "a bc", "d a", "da b", "\u2581 a", "1 2"]
MERGES += ["\u2581 \u2581", "\u2581\u2581 \u2581\u2581", "\u2581 ab"]


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _at(pattern: str, **members: object) -> dict[str, Any]:
    return {**SPLIT, "pattern": {"Regex": pattern}, **members}


def _description(model: dict[str, Any], **members: object) -> dict[str, Any]:
    shell = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None}
    return {**shell, **members, "model": {"type": "BPE", **model}}


def _byte_level(*steps: dict[str, Any], **members: object) -> dict[str, Any]:
    merged = [merge.replace("\u2581", "Ġ") for merge in MERGES]
    texts = dict.fromkeys([*byte_characters(), *(merge.replace(" ", "") for merge in merged)])
    vocabulary = {text: id_ for id_, text in enumerate(texts)}
    model = {"vocab": vocabulary, "merges": merged, "ignore_merges": bool(members.pop("whole", 0))}
    return _description(model, pre_tokenizer=_sequence(*steps), **members)


def _pieces(**members: object) -> dict[str, Any]:
    """Return a SentencePiece-style tokenizer.json with `bytes` byte tokens, of 256."""
    options = {name: members.pop(name) for name in ("byte_fallback", "fuse_unk") if name in members}
    byte_tokens = [f"<0x{value:02X}>" for value in range(int(str(members.pop("bytes", 256))))]
    letters = [*"abcd12\u2581.é", *(merge.replace(" ", "") for merge in MERGES)]
    texts = dict.fromkeys(["<unk>", *byte_tokens, *letters])
    vocabulary = {text: id_ for id_, text in enumerate(texts)}
    model = {"vocab": vocabulary, "merges": MERGES, "unk_token": "<unk>", **options}
    return _description(model, **members)


def _files() -> Iterator[tuple[str, dict[str, Any]]]:
    for spec, name in {spec: name for name, spec in reversed(PRE_TOKENIZERS.items())}.items():
        normalizer = {"type": "NFC"} if spec.nfc else None
        cuts = [_at(pattern) for pattern in spec.patterns]
        yield name, _byte_level(*cuts, BYTES, normalizer=normalizer, whole=spec.ignore_merges)
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        yield form, _byte_level(BYTES, normalizer={"type": form})
    for single in (True, False):
        digits = {"type": "Digits", "individual_digits": single}
        yield f"digits {single}", _byte_level(digits, {**BYTES, "use_regex": True})
        yield f"prefix {single}", _byte_level(digits, {**BYTES, "add_prefix_space": True})
    for behavior in BEHAVIORS:
        for invert in (True, False):
            how = {"behavior": behavior, "invert": invert}
            yield f"{behavior} {invert}", _byte_level(_at("[ab]|  |(\\s)c|^.$", **how), BYTES)
        literal = {**SPLIT, "pattern": {"String": "b."}, "behavior": behavior}
        yield f"{behavior} of a text", _byte_level(literal, BYTES)
    yield from _rarer_steps()
    yield "a space dropped", _byte_level(_at(" ", behavior="Removed"), _at(r"\p{L}+"), BYTES)
    for scheme in ("always", "first", "never"):
        for split in (True, False):
            mark = {**METASPACE, "prepend_scheme": scheme, "split": split}
            yield f"metaspace {scheme} {split}", _pieces(pre_tokenizer=mark, byte_fallback=True)
    prefix = {"type": "Prepend", "prepend": "\u2581"}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    runs = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\\1 "}
    both = {"type": "Sequence", "normalizers": [prefix, spaces]}
    yield "runs of spaces", _pieces(normalizer={"type": "Sequence", "normalizers": [runs, both]})
    for fuse in (True, False):
        for num_bytes in (0, 200, 256):
            options = {"byte_fallback": num_bytes > 0, "fuse_unk": fuse, "bytes": num_bytes}
            yield f"{num_bytes} bytes {fuse}", _pieces(normalizer=both, **options)


def _rarer_steps() -> Iterator[tuple[str, dict[str, Any]]]:
    """Return files with normalizers and pre-tokenizers that few language models have."""
    for kind, members in {
        "Lowercase": {},
        "StripAccents": {},
        "Nmt": {},
        "Strip": {"strip_left": True, "strip_right": True},
        "Precompiled": {"precompiled_charsmap": CHARACTER_MAP},
    }.items():
        yield kind, _byte_level(BYTES, normalizer={"type": kind, **members})
    for flags in product((True, False), (True, False), (True, False, None)):
        names = ("clean_text", "lowercase", "strip_accents")
        bert = {"type": "BertNormalizer", "handle_chinese_chars": flags[0] == flags[1]}
        bert |= dict(zip(names, flags, strict=True))
        yield f"BERT {flags}", _byte_level(BYTES, normalizer=bert)
    chain = [{"type": kind} for kind in ("NFKD", "StripAccents", "Lowercase")]
    yield "a chain", _byte_level(BYTES, normalizer={"type": "Sequence", "normalizers": chain})
    for kind in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer"):
        yield kind, _byte_level({"type": kind}, BYTES)
    for behavior in BEHAVIORS:
        marks = {"type": "Punctuation", "behavior": behavior}
        yield f"punctuation {behavior}", _byte_level(marks, BYTES)
    yield "delimiter", _byte_level({"type": "CharDelimiterSplit", "delimiter": "b"}, BYTES)
    yield "length", _byte_level({"type": "FixedLength", "length": 3}, BYTES)
    # Falcon's tokenizer.json has steps after the one that spells bytes.
    marks = {"type": "Punctuation", "behavior": "Contiguous"}
    words, digits = {**BYTES, "use_regex": True}, {"type": "Digits", "individual_digits": False}
    yield "steps after bytes", _byte_level(marks, words, digits, _at("[0-9]{3}"))
    yield "bytes before", _byte_level(_at("Ġ|\u0100"), normalizer={"type": "ByteLevel"})
    for scheme in ("always", "never"):
        mark = {**METASPACE, "prepend_scheme": scheme}
        steps = [{"type": "WhitespaceSplit"}, mark]
        yield f"words, metaspace {scheme}", _pieces(pre_tokenizer=_sequence(*steps))


FILES = dict(_files())


def _both(folder: Path, description: dict[str, Any]) -> tuple[Tokenizer, Any]:
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    theirs = tokenizers.Tokenizer.from_str(json.dumps(description))
    return from_tokenizer_json(folder), theirs


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    return {name: _both(tmp_path_factory.mktemp("file"), file) for name, file in FILES.items()}


@pytest.mark.parametrize("name", FILES)
@given(text=TEXTS)
def test_ids_are_equal(pairs: dict[str, tuple[Tokenizer, Any]], name: str, text: str) -> None:
    ours, theirs = pairs[name]
    assert ours.encode(text) == theirs.encode(text).ids


@pytest.mark.parametrize("name", FILES)
@given(text=TEXTS)
def test_exact_tokens_spell_the_text(
    pairs: dict[str, tuple[Tokenizer, Any]], name: str, text: str
) -> None:
    """Where tokens are characters, the result ends before the first character without a token."""
    tokenizer, _ = pairs[name]
    spelled = b"".join(map(tokenizer.token_bytes, tokenizer.encode_exact(text)))
    assert text.encode().startswith(spelled)
    has_bytes = tokenizer.find("Ġ") is not None
    assert spelled == text.encode() or not has_bytes


def test_special_tokens_around_a_text_are_the_same(tmp_path: Path) -> None:
    added = [{"id": id_, "content": text, "special": True} for id_, text in ((0, "!"), (1, "#"))]
    added = [{**token, "single_word": False, "lstrip": False} for token in added]
    flags = {"rstrip": False, "normalized": False}
    pair = {"sep": ["#", 1], "cls": ["!", 0]}
    around = [{"SpecialToken": {"id": "#", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"#": {"id": "#", "ids": [1], "tokens": ["#"]}}
    template = {"type": "TemplateProcessing", "single": [*around, *around[:1], *around[:1]]}
    template |= {"pair": [{"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": tokens}
    roberta = {"type": "RobertaProcessing", "trim_offsets": True, "add_prefix_space": False}
    steps = [template, {"type": "BertProcessing", **pair}, {**roberta, **pair}]
    for step in steps:
        sequence = {"type": "Sequence", "processors": [BYTES, step]}
        added_tokens = [{**token, **flags} for token in added]
        description = _byte_level(BYTES, post_processor=sequence, added_tokens=added_tokens)
        ours, theirs = _both(tmp_path, description)
        assert ours.encode("ab", add_special=True) == theirs.encode("ab").ids


@pytest.mark.parametrize("seed", range(40))
def test_ids_of_vocabularies_at_odds_with_their_merges_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Such as ids out of order, several merges to one token, unreachable tokens, missing bytes."""
    rng = random.Random(seed)
    texts, pairs_of = [*"abcd"], []
    while len(pairs_of) < 14:
        pair = (rng.choice(texts), rng.choice(texts))
        if len("".join(pair)) <= 6 and pair not in pairs_of:
            pairs_of.append(pair)
            texts = list(dict.fromkeys([*texts, "".join(pair)]))
    texts += [text for text in ("abd", "cab", "bdd") if text not in texts]
    ids = rng.sample(range(100), len(texts))
    model = {"vocab": dict(zip(texts, ids, strict=True)), "merges": pairs_of}
    ours, theirs = _both(tmp_path, _description(model, pre_tokenizer=BYTES))
    for length in (1, 2, 3, 10, 100, 127, 128, 129, 1000):
        text = "".join(rng.choices("abcde", weights=[5, 5, 5, 5, 1], k=length))
        expected = theirs.encode(text).ids
        assert ours.encode(text) == expected
        with monkeypatch.context() as patch:
            patch.setattr(merges, "_SHORT_WORD", 0 if length < 128 else 10**6)
            assert ours._merges._encode_word(text) == expected


def test_a_huge_word_is_merged_like_any_other(pairs: dict[str, tuple[Tokenizer, Any]]) -> None:
    """Merging in quadratic time would take minutes."""
    ours, theirs = pairs["gpt-2"]
    for text in ("a" * 100_000, "".join(random.Random(1).choices("abcd", k=100_000))):
        assert ours.encode(text) == theirs.encode(text).ids


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_holds_the_same_characters(name: str) -> None:
    assert matches_here(name) == matches_in_guidance(name)


def test_words_of_kimi_are_those_of_its_own_pattern() -> None:
    """Its pattern (tokenization_kimi.py) subtracts Han characters, which Python cannot do."""
    upper, lower = (
        rf"[\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for case in (r"Lu}\p{Lt", "Ll")
    )
    ends = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    pattern = (
        rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{ends}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ends}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    letters, rng = f"{LETTERS}漢字々〇⺀ひカ한", random.Random(2)
    texts = ("".join(rng.choices(letters, k=rng.randint(1, 14))) for _ in range(3000))
    check_words(cut_at(*PRE_TOKENIZERS["kimi-k2"].patterns), pattern, texts)


@pytest.mark.parametrize(
    "pattern",
    [
        r"[\p{L}&&[^\p{Han}]]+|\p{Han}+",
        r"[^a-z&&[^aeiou]]+",
        r"(?i:'s|'ss)|[\p{P}\p{S}&&[^_<]]+",
        r"[a[bc]]+",
        r"[^a[^\w]]+",
        r"[--/]+",
        r"[a||b]+|[a~~b]",
        r"[]a]+",
        r"[[:digit:][:space:]]+",
        r"[[:word:]]+",
        r"[\w\s]+",
        r"[\h_]+",
        r"\h+",
        r"\w+",
        r"\W+",
        r"\b\w",
        r"\B.",
        r"(?m).+",
        r"(?m:a.)",
        r"b(?i)a",
        r"\Z",
        r"\N",
        r"\O",
        r"[\x{4e00}-\x{9fff}]+|\x{41}",
    ],
)
def test_patterns_mean_what_they_do_in_oniguruma(pattern: str) -> None:
    letters, rng = f"{LETTERS}漢Ａ²_#/&|~[]\x1b\n", random.Random(4)
    texts = ("".join(rng.choices(letters, k=rng.randint(1, 12))) for _ in range(1500))
    check_words(cut_at(pattern), pattern, texts)


@pytest.mark.parametrize("pattern", [THOUSANDS, BEFORE_THOUSANDS, NUMBER_THOUSANDS])
def test_groups_of_digits_are_those_of_their_pattern(pattern: str) -> None:
    digits, rng = "0123456789" * 3 + "٣²Ⅷ a_b.\u0301é,\n½ⓐ‿\u200dα〇", random.Random(3)
    texts = ("".join(rng.choices(digits, k=rng.randint(1, 14))) for _ in range(3000))
    check_words(cut_at(pattern), pattern, texts)
    check_words(cut_at(pattern), pattern, (f"1{char}" for char in VARIED))


def check_words(cut: Cut, pattern: str, texts: Iterable[str]) -> None:
    """Compare a cut with the words that `tokenizers` makes by a pattern."""
    theirs = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    for text in texts:
        assert cut(text) == [word for word, _ in theirs.pre_tokenize_str(text)], ascii(text)


def test_a_huge_number_is_cut_into_groups() -> None:
    """Cutting in quadratic time would take minutes."""
    for pattern in (THOUSANDS, BEFORE_THOUSANDS, NUMBER_THOUSANDS):
        words = cut_at(pattern)("1" * 300_001 + ".")
        assert words[:2] == ["1", "111"]
        assert "".join(words) == "1" * 300_001 + "."


def test_single_digits_are_the_same_characters() -> None:
    ours = cut_at(DIGIT, "Removed", invert=True)
    theirs = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    numbers = [char for char in VARIED if char.isnumeric()]
    spread = "a".join(numbers)
    pieces = [piece for piece, _ in theirs.pre_tokenize_str(spread) if piece != "a"]
    assert set(ours(spread)) == {piece for piece in pieces if len(piece) == 1}


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_normal_forms_are_the_same(form: Any) -> None:
    """Only characters of Unicode 3.2 are compared: `tokenizers` uses Unicode 9."""
    theirs = getattr(tokenizers.normalizers, form)()
    ours = unicode_form(form)
    assigned_chars = [char for char in VARIED if unicodedata.ucd_3_2_0.category(char) != "Cn"]
    for start in range(0, len(assigned_chars), 4096):
        chunk = assigned_chars[start : start + 4096]
        for text in ("x".join(chunk), "x\u0334\u0345".join(chunk), "\u0345\u0334x".join(chunk)):
            assert ours(text) == theirs.normalize_str(text)
