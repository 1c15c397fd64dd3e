"""Answers avoid the excluded texts, and never reach a state without an allowed token."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.byte_tokenizer import byte_tokenizer
from twostroke.core.constraint import Constraint, ExcludedPrefix
from twostroke.core.draft_tree import ROOT
from twostroke.core.errors import RequestError
from twostroke.engine.structured_output import exclusion
from twostroke.engine.structured_output.grammar import Grammars
from twostroke.engine.structured_output.schema.size import MAX_FORCED_BYTES

if TYPE_CHECKING:
    from twostroke.model.tokenizer import Tokenizer

NAMES = {"type": "array", "items": {"enum": ["one", "two", "onetwo"]}, "minItems": 2, "maxItems": 2}
CASES: list[tuple[dict[str, Any], list[ExcludedPrefix], list[str]]] = [
    (
        {"enum": ["hello", "hell", "help"]},
        [ExcludedPrefix('"hello"', 0)],
        ['"hell"', '"help"'],
    ),
    ({"enum": [1, 12, 123]}, [ExcludedPrefix("12", 0, is_whole=True)], ["1", "123"]),
    ({"enum": [1, 12, 123]}, [ExcludedPrefix("12", 0)], ["1"]),
    (
        NAMES,
        [ExcludedPrefix('["one", "one"', 8), ExcludedPrefix('["two', 1)],
        ['["one", "two"]', '["one", "onetwo"]']
        + [f'["onetwo", "{name}"]' for name in ("one", "two", "onetwo")],
    ),
    ({"enum": ["wé", "wè"]}, [ExcludedPrefix('"wé"', 0)], ['"wè"']),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize(("schema", "excluded", "others"), CASES, ids=str)
def test_all_other_texts_and_no_others_can_be_drawn(
    grammars: Grammars,
    tokenizer: Tokenizer,
    schema: dict[str, Any],
    excluded: list[ExcludedPrefix],
    others: list[str],
) -> None:
    """Walks through all answers that the masks allow, with and without drafts."""
    constraint = Constraint("json_schema", json.dumps(schema), excluded=tuple(excluded))
    texts: set[str] = set()
    waiting: list[list[int]] = [[]]
    while waiting:
        output = waiting.pop()
        matcher = grammars.matcher(constraint)
        mask = np.zeros((1, matcher.num_words), np.uint32)
        matcher.masks(output, (), (), mask)
        if output:
            drafted = np.zeros((1 + len(output), matcher.num_words), np.uint32)
            parents = [ROOT, *range(len(output) - 1)]
            grammars.matcher(constraint).masks([], output, parents, drafted)
            assert (drafted[-1] == mask[0]).all()
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert allowed
        for token in allowed:
            if token in tokenizer.eos_ids:
                texts.add(tokenizer.decode(output))
            else:
                waiting.append([*output, token])
    assert texts == set(others)


def test_texts_with_many_spellings_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of 64 letters can be split into tokens in more ways than a search could visit."""
    tokenizer = byte_tokenizer(more_merges=("a a", "a aa", "aa aa"))
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    run, forced = "a" * 64, "b" * 2 * MAX_FORCED_BYTES  # so much that grammars force no token
    rules = f'start: "{run}" | "{run}b" | "{forced}"'
    excluded = (
        ExcludedPrefix(run + "b", 0),
        ExcludedPrefix(run, 0, is_whole=True),
        ExcludedPrefix("bb", 0),
    )
    constraint = Constraint("lark", rules, excluded=excluded)
    num_copies = 0
    copy_after = exclusion._copy_after

    def count_copies(matcher: Any, token: int) -> Any:
        nonlocal num_copies
        num_copies += 1
        return copy_after(matcher, token)

    monkeypatch.setattr(exclusion, "_copy_after", count_copies)
    matcher = grammars.matcher(constraint)
    mask = np.zeros((1, matcher.num_words), np.uint32)
    with pytest.raises(RequestError, match="allows no text other than the excluded ones"):
        matcher.masks([], (), (), mask)
    assert 1 < num_copies < 2 * len(run)


def test_a_grammar_with_excluded_texts_alone_is_an_error(grammars: Grammars) -> None:
    excluded = (ExcludedPrefix('"hel', 0),)
    constraint = Constraint("json_schema", json.dumps({"enum": ["hell", "help"]}), "form")
    matcher = grammars.matcher(replace(constraint, excluded=excluded))
    mask = np.zeros((1, matcher.num_words), np.uint32)
    with pytest.raises(RequestError, match="form allows no text other than the excluded ones"):
        matcher.masks([], (), (), mask)
