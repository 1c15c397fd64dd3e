"""A budget of reasoning: the masks after its last token allow only the closing text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.byte_tokenizer import CONTROL, END, byte_tokenizer
from twostroke.backends.sampling.reference import as_flags
from twostroke.core.constraint import Constraint, ReasoningSection
from twostroke.core.draft_tree import ROOT
from twostroke.engine.structured_output.grammar import Grammars
from twostroke.engine.structured_output.reasoning_budget import ReasoningBudget

if TYPE_CHECKING:
    from twostroke.core.constraint import Matcher
    from twostroke.model.tokenizer import Tokenizer

OPENED = ReasoningSection("", "</think>", "\n</think>\n\n")
UNOPENED = ReasoningSection("<think>", "</think>", "\n</think>\n\n")
SPECIAL = ReasoningSection("[THINK]", "[/THINK]")
LONG = 1000  # tokens


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(odd=(("[THINK]", CONTROL), ("[/THINK]", CONTROL)))


def matcher_of(
    tokenizer: Tokenizer,
    preface: ReasoningSection,
    num_tokens: int,
    constraint: Matcher | None = None,
    max_output: int = LONG,
) -> Matcher:
    budget = ReasoningBudget(
        preface,
        num_tokens,
        max_output=max_output,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size + 7,
    )
    return budget.matcher(constraint)


def allowed(matcher: Matcher, output: list[int]) -> set[int]:
    mask = np.zeros((1, matcher.num_words), np.uint32)
    matcher.masks(output, (), (), mask)
    return set(as_flags(mask[0], 32 * matcher.num_words).nonzero()[0].tolist())


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return [token for character in text for token in tokenizer.encode_exact(character)]


@pytest.mark.parametrize(("preface", "begin"), [(OPENED, ""), (UNOPENED, "\n <think>")])
def test_closing_text_follows_the_last_token_of_the_budget(
    tokenizer: Tokenizer, preface: ReasoningSection, begin: str
) -> None:
    matcher = matcher_of(tokenizer, preface, 5)
    output = tokens_of(tokenizer, begin)
    for token in tokens_of(tokenizer, "01234"):
        assert len(allowed(matcher, output)) > 256
        assert not matcher.forced(output)
        output.append(token)
    closing = tokenizer.encode_exact("\n</think>\n\n")
    assert matcher.forced(output) == closing
    assert matcher.count_allowed(output, [*closing, *closing]) == len(closing) + len(closing)
    assert matcher.count_allowed(output, [closing[0], closing[0]]) == 1
    for token in closing:
        assert allowed(matcher, output) == {token}
        output.append(token)
    assert not matcher.forced(output)


def test_an_answer_follows_forced_closing_text(tokenizer: Tokenizer) -> None:
    end = tokenizer.find(END)
    assert end is not None
    matcher = matcher_of(tokenizer, OPENED, 1)
    output = tokens_of(tokenizer, "0")
    output += matcher.forced(output)
    assert end not in allowed(matcher, output)
    output += tokens_of(tokenizer, " \n")
    assert end not in allowed(matcher, output)
    assert matcher.count_allowed(output, [end]) == 0
    output += tokens_of(tokenizer, "a")
    assert allowed(matcher, output) == set(range(tokenizer.vocab_size + 7))
    blanks = matcher_of(tokenizer, OPENED, 0)
    output = list(blanks.forced([]))
    output += tokens_of(tokenizer, " " * 20)
    assert end in allowed(blanks, output)  # not for ever


def test_reasoning_cannot_end_the_answer(tokenizer: Tokenizer) -> None:
    end = tokenizer.find(END)
    matcher = matcher_of(tokenizer, UNOPENED, 50)
    assert end in allowed(matcher, [])
    output = tokens_of(tokenizer, "<think>")
    assert allowed(matcher, output) == set(range(tokenizer.vocab_size + 7)) - tokenizer.eos_ids
    output += tokens_of(tokenizer, "ab</think>")
    assert end in allowed(matcher, output)
    output += tokens_of(tokenizer, "c" * 100)
    assert not matcher.forced(output)


def test_an_answer_without_reasoning_has_no_budget(tokenizer: Tokenizer) -> None:
    matcher = matcher_of(tokenizer, UNOPENED, 3)
    output = tokens_of(tokenizer, "hello <think> world")
    assert allowed(matcher, output) == set(range(tokenizer.vocab_size + 7))


def test_marks_that_are_tokens_are_written_as_these(tokenizer: Tokenizer) -> None:
    begin, end = tokenizer.find("[THINK]"), tokenizer.find("[/THINK]")
    assert begin is not None
    matcher = matcher_of(tokenizer, SPECIAL, 0)
    assert matcher.forced([]) == ()
    assert matcher.forced([begin]) == [end]


def test_each_draft_has_the_mask_of_its_path(tokenizer: Tokenizer) -> None:
    closing = tokenizer.encode_exact("\n</think>\n\n")
    [a, b] = tokens_of(tokenizer, "ab")
    matcher = matcher_of(tokenizer, OPENED, 2)
    drafts = [a, b, closing[0], b, a, closing[0], closing[1]]
    parents = [ROOT, 0, 1, 0, 3, 3, 5]
    masks = np.zeros((1 + len(drafts), matcher.num_words), np.uint32)
    matcher.masks([], drafts, parents, masks)
    counts = [int(as_flags(mask, 32 * len(mask)).sum()) for mask in masks]
    assert counts == [counts[0], counts[0], 1, 1, 1, 0, 1, 1]  # a draft past the budget is wrong
    for path in ([], [0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 5], [0, 3, 5, 6]):
        alone = matcher_of(tokenizer, OPENED, 2)
        output = [drafts[index] for index in path]
        row = masks[1 + path[-1]] if path else masks[0]
        assert allowed(alone, output) == set(as_flags(row, 32 * len(row)).nonzero()[0].tolist())


def test_a_character_is_completed_before_the_closing_text(tokenizer: Tokenizer) -> None:
    for text, num_tokens in (("\u20ac", 3), ("\U00010348", 4), ("\u00a2", 2)):
        output = [tokenizer.encode_exact(chr(byte))[-1] for byte in b"ab"]
        spelled = [
            next(
                i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte])
            )
            for byte in text.encode()
        ]
        assert len(spelled) == num_tokens
        matcher = matcher_of(tokenizer, OPENED, 3)
        output += spelled[:1]
        for token in spelled[1:]:
            assert not matcher.forced(output)
            output.append(token)
        assert matcher.forced(output) == tokenizer.encode_exact("\n</think>\n\n")
    broken = matcher_of(tokenizer, OPENED, 1)
    assert broken.forced([spelled[0]] * 3) == ()
    assert broken.forced([spelled[0]] * 4)  # three more tokens at most


@pytest.mark.parametrize("preface", [OPENED, UNOPENED])
def test_a_constraint_begins_after_the_budget(
    tokenizer: Tokenizer, preface: ReasoningSection
) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size + 7)
    constraint = Constraint.regex("[0-9]{3}").after(preface)
    matcher = matcher_of(tokenizer, preface, 4, grammars.matcher(constraint))
    output = tokens_of(tokenizer, ("<think>" if preface.begin else "") + "abcd")
    output += matcher.forced(output)
    for digit in "123":
        assert allowed(matcher, output) == set(tokens_of(tokenizer, "0123456789"))
        output += tokens_of(tokenizer, digit)
    assert allowed(matcher, output) == tokenizer.eos_ids


@pytest.mark.parametrize(
    ("num_tokens", "max_output", "result"), [(10, 1000, 10), (900, 100, 64), (50, 12, 0), (5, 1, 0)]
)
def test_a_quarter_of_the_tokens_is_left_for_the_answer(
    tokenizer: Tokenizer, num_tokens: int, max_output: int, result: int
) -> None:
    budget = ReasoningBudget(
        OPENED,
        num_tokens,
        max_output=max_output,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
    )
    assert len(budget.closing) == 11
    assert budget.num_tokens == result
