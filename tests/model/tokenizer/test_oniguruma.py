"""Random patterns cut texts as `tokenizers` does, which compiles them with Oniguruma."""

from __future__ import annotations

import random

import pytest
import tokenizers

from twostroke.core.errors import ModelFormatError
from twostroke.model.tokenizer.words import cut_at

ATOMS: tuple[str, ...] = (
    *("a", "b", "B", "1", " ", ".", "é", "-", "{", "}", r"\{", r"\d", r"\w", r"\s", r"\h", r"\R"),
    *(r"\p{N}", r"\p{L}", r"\p{Word}", r"\P{Word}", r"\p{^word}", r"\p{Lu}", r"\cA", r"\C-a"),
    *(
        r"\101",
        r"\x41",
        r"\u0041",
        r"\x{e9}",
        r"\o{61}",
        r"\m",
        r"\i",
        r"\W",
        r"\X",
        r"\N",
        "[a-b1]",
    ),
    *(
        "[^a&&b]",
        "[a-c&&[^b]]",
        "[a&&]",
        "[^a&&]",
        r"[\w&&[^\d]]",
        r"[\p{Word}]",
        "[a|~-]",
        r"[\b\cA]",
    ),
    *("[[:alpha:]]", "[[:^alpha:]1]", "[[:word:]]", "[]a]", r"[\h[é]]", r"[^\n]", "(?#note)c"),
)
REPEATS: tuple[str, ...] = (
    "",
    "",
    "",
    "",
    "+",
    "*",
    "?",
    "{2}",
    "{1,2}",
    "{2,}",
    "{,2}",
    "{2}?",
    "{1,3}+",
    "{2}+",
)
REPEATS += ("{1,2}?", "{3,1}", "++", "?+", "*+", "+?", "{1,2}*", "{2}{2}", "{}", "{a}", "{,}")
GROUPS: tuple[str, ...] = (
    "({})",
    "(?:{})",
    "(?i:{})",
    "(?i){}",
    "(?>{})",
    "(?m:{})",
    "(?x: {} )",
    "(?i-m:{})",
)
GROUPS += (
    "(?:(?={})a)",
    "(?:(?!{})b)",
    "({})\\k<1>",
    "(?<n>{})\\k<n>",
    "(?'n'{})\\k'n'",
    "(?<=a)1{}",
)
LETTERS = "aabbABccCd1123 {},-éñ_²&|A~:\x01\x08\nA"


def random_pattern(rng: random.Random, depth: int = 0) -> str:
    parts = []
    for _ in range(rng.randint(1, 3)):
        if depth < 2 and rng.random() < 0.3:
            inner = random_pattern(rng, depth + 1)
            group = rng.choice(GROUPS).replace("n", f"n{rng.randrange(1 << 20)}")
            part = group.replace("{}", inner, 1)
        else:
            part = rng.choice(ATOMS)
        parts.append(part + rng.choice(REPEATS))
    return rng.choice(("", "", "|")).join(parts)


def theirs(pattern: str) -> tokenizers.pre_tokenizers.Split | None:
    """Return the words that `tokenizers` cuts by a pattern; None if it refuses the pattern."""
    try:
        return tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    except Exception:  # noqa: BLE001  (the binding raises Exception itself)
        return None


@pytest.mark.parametrize("seed", range(8))
def test_random_patterns_cut_alike(seed: int) -> None:
    rng = random.Random(seed)
    num_compared = 0
    for _ in range(150):
        pattern = random_pattern(rng)
        split = theirs(pattern)
        if split is None:
            continue
        cut = cut_at(pattern)
        num_compared += 1
        for _ in range(20):
            text = "".join(rng.choices(LETTERS, k=rng.randint(1, 12)))
            words = [word for word, _ in split.pre_tokenize_str(text)]
            assert cut(text) == words, (pattern, text)
    assert num_compared > 50


@pytest.mark.parametrize(
    "pattern",
    [r"(?<n>a\g<n>?b)", r"(?~ab)", r"\y", r"\Y", r"a\Kb", r"\G", r"\M-a", "(?W)a", "(*FAIL)"],
)
def test_what_only_oniguruma_has_is_refused_with_its_place(pattern: str) -> None:
    assert theirs(pattern) is not None
    with pytest.raises(ModelFormatError, match=r"this version cannot read its .* at character"):
        cut_at(pattern)


@pytest.mark.parametrize("name", ["alnum", "blank", "cntrl", "digit", "punct", "space", "xdigit"])
@pytest.mark.parametrize("form", [r"\p{%s}", r"\P{%s}", "[[:%s:]]", "[[:^%s:]]", r"[a\P{%s}]"])
def test_named_classes_hold_the_same_characters(name: str, form: str) -> None:
    cut, split = cut_at(form % name), theirs(form % name)
    assert split is not None
    text = "".join(f"{chr(code)}\u0301a" for code in (*range(0x250), *range(0x660, 0x66A), 0x24B6))
    assert cut(text) == [word for word, _ in split.pre_tokenize_str(text)]
