"""Limits a model's reasoning: after the last token of the budget, the closing text is forced."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.draft_tree import ROOT
from twostroke.model.tokenizer.preface import SegmentKind, byte_splitter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.core.constraint import Matcher, ReasoningSection
    from twostroke.model.tokenizer import Tokenizer
    from twostroke.model.tokenizer.preface import ReasoningSplitter

# The part of the answer's tokens that the reasoning leaves free.
_ANSWER_DIVISOR: Final = 4
# After forced closing text, a model that only writes blanks may end its answer after this many.
_MAX_BLANK_TOKENS: Final = 16
_MAX_COMPLETING_TOKENS: Final = 3  # of a character that the last token of a budget begins


class ReasoningBudget:
    """The maximum number of reasoning tokens in the answers to one prompt.

    Tokens are counted from the first token after the opening mark of the reasoning. Once the budget
    is used up, masks allow only the tokens of the closing text, one after the other. If the last
    token ends inside a multi-byte character, up to three more tokens may complete the character
    first. The model cannot end its answer while it reasons, nor between forced closing text and the
    next token that is not white space.
    """

    def __init__(
        self,
        preface: ReasoningSection,
        num_tokens: int,
        *,
        max_output: int,
        tokenizer: Tokenizer,
        vocab_size: int,
    ) -> None:
        """Allow `num_tokens` tokens of reasoning in an answer of at most `max_output` tokens.

        Fewer are allowed if less than the marks and a quarter of `max_output` would be left for the
        answer.
        """
        self.preface = preface
        self.tokenizer = tokenizer
        self.closing = _mark_tokens(preface.closing or preface.end, preface, tokenizer)
        num_marks = len(self.closing) + len(_mark_tokens(preface.begin, preface, tokenizer))
        num_reserved = num_marks + max(1, max_output // _ANSWER_DIVISOR)
        self.num_tokens = max(0, min(num_tokens, max_output - num_reserved))
        self.num_words = -(-vocab_size // 32)
        self.all_tokens = _mask_of(slice(vocab_size), self.num_words)
        self.without_ends = self.all_tokens & ~_mask_of([*tokenizer.eos_ids], self.num_words)
        self.closing_masks = [_mask_of([token], self.num_words) for token in self.closing]

    def matcher(self, constraint: Matcher | None) -> BudgetMatcher:
        """Return the matcher of a new request whose answer also follows `constraint`."""
        return BudgetMatcher(self, constraint)


class BudgetMatcher:
    """The matcher of one request: masks tokens by its reasoning budget and by its constraint.

    Attributes:
        num_words: 32-bit words of a mask.
    """

    def __init__(self, budget: ReasoningBudget, constraint: Matcher | None) -> None:
        """Begin before the first token; without `constraint` only the budget limits the tokens."""
        self.num_words = budget.num_words
        self._budget = budget
        self._constraint = constraint
        self._num_consumed = 0  # tokens of the output
        self._progress = _Progress(budget, byte_splitter(budget.preface))

    def masks(
        self,
        output: Sequence[int],
        drafts: Sequence[int],
        parents: Sequence[int],
        out: NDArray[np.uint32],
    ) -> None:
        """Write the mask of allowed tokens after `output`, and one after each draft token.

        See `core.constraint.Matcher`.
        """
        self._consume(output)
        if self._constraint is None:
            out[:] = self._budget.all_tokens
        else:
            self._constraint.masks(output, drafts, parents, out)
        self._progress.restrict(out[0])
        states = {ROOT: self._progress}
        for index, (draft, parent) in enumerate(zip(drafts, parents, strict=True)):
            state = states.get(parent)
            if state is None or not state.allows(draft):
                out[1 + index] = 0
                continue
            states[index] = state.after(draft)
            states[index].restrict(out[1 + index])

    def count_allowed(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of `tokens`, from the first one, may follow `output`."""
        self._consume(output)
        if self._constraint is not None:
            tokens = tokens[: self._constraint.count_allowed(output, tokens)]
        state = self._progress
        for index, token in enumerate(tokens):
            if not state.allows(token):
                return index
            state = state.after(token)
        return len(tokens)

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        """Return the rest of the closing text, or else the tokens that the constraint forces."""
        self._consume(output)
        if rest := self._progress.forced:
            return rest
        return () if self._constraint is None else self._constraint.forced(output)

    def _consume(self, output: Sequence[int]) -> None:
        """Read the tokens of `output` that were not read yet."""
        for token in output[self._num_consumed :]:
            self._progress.feed(token)
        self._num_consumed = len(output)


class _Progress:
    """How far an answer's output has got in its reasoning, and how the budget restricts it.

    It splits the tokens so far into reasoning and answer. Once the reasoning has `num_tokens`
    tokens, the closing text is forced.
    """

    __slots__ = (
        "_budget",
        "_last_bytes",
        "_num_blank",
        "_num_closing",
        "_num_inside",
        "_splitter",
    )

    def __init__(self, budget: ReasoningBudget, splitter: ReasoningSplitter) -> None:
        self._budget = budget
        self._splitter = splitter
        self._num_inside = 0  # tokens of the reasoning
        self._last_bytes = b""  # of these tokens: enough to tell whether a character is complete
        self._num_closing = 0  # tokens of the closing text that followed the last of them
        self._num_blank: int | None = None  # tokens since forced closing text, while all are blank

    def feed(self, token: int) -> None:
        """Read the output's next token."""
        rest = self.forced
        if rest and token == rest[0]:
            self._num_closing += 1
            if len(rest) == 1:
                self._splitter.segment = SegmentKind.AFTER
                self._num_blank = 0
            return
        if self._num_blank is not None:
            is_blank = not self._budget.tokenizer.token_bytes(token).strip()
            is_guarded = is_blank and self._num_blank < _MAX_BLANK_TOKENS
            self._num_blank = self._num_blank + 1 if is_guarded else None
            return
        segment = self._splitter.segment
        if segment is SegmentKind.AFTER:
            return
        data = self._budget.tokenizer.token_bytes(token)
        self._num_inside += segment is SegmentKind.INSIDE
        self._last_bytes = (self._last_bytes + data)[-3:]
        self._splitter.feed(data.decode("latin-1"))

    def after(self, token: int) -> _Progress:
        """Return the progress after one more token, which may be a draft."""
        other = _Progress(self._budget, copy(self._splitter))
        other._num_inside = self._num_inside
        other._last_bytes = self._last_bytes
        other._num_closing = self._num_closing
        other._num_blank = self._num_blank
        other.feed(token)
        return other

    @property
    def forced(self) -> Sequence[int]:
        """The tokens of the closing text that must come next; empty if none must."""
        num_more = self._budget.num_tokens - self._num_inside
        is_inside = self._splitter.segment is SegmentKind.INSIDE
        if not is_inside or num_more > 0:
            return ()
        if num_more > -_MAX_COMPLETING_TOKENS and _ends_in_character(self._last_bytes):
            return ()
        return self._budget.closing[self._num_closing :]

    def allows(self, token: int) -> bool:
        """Whether the budget allows this token next."""
        if rest := self.forced:
            return token == rest[0]
        return not self._bars_ends or token not in self._budget.tokenizer.eos_ids

    def restrict(self, mask: NDArray[np.uint32]) -> None:
        """Remove the tokens that the budget forbids from a mask of allowed tokens.

        If no allowed token would be left, the mask is not changed: the constraint takes precedence.
        """
        if self.forced:
            allowed = self._budget.closing_masks[self._num_closing]
        elif self._bars_ends:
            allowed = self._budget.without_ends
        else:
            return
        restricted = mask & allowed
        if restricted.any():
            mask[:] = restricted

    @property
    def _bars_ends(self) -> bool:
        """Whether the answer must not end here: in the reasoning, or after forced closing text."""
        return self._splitter.segment is SegmentKind.INSIDE or self._num_blank is not None


def _mark_tokens(text: str, preface: ReasoningSection, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a text that contains a mark of the reasoning.

    If the mark is a token of the vocabulary, the text before and after it is encoded separately.
    """
    for mark in filter(None, (preface.begin, preface.end)):
        token = tokenizer.find(mark)
        before, has_mark, after = text.partition(mark)
        if has_mark and token is not None:
            return [*tokenizer.encode_exact(before), token, *tokenizer.encode_exact(after)]
    if preface.has_channels:
        return tokenizer.encode(text, add_special=False, parse_special=True)
    return tokenizer.encode_exact(text)


def _ends_in_character(data: bytes) -> bool:
    """Whether bytes end inside a UTF-8 character of several bytes; reads the last three bytes."""
    for count, byte in enumerate(reversed(data[-3:]), 1):
        if byte >= 0xC0:
            return count < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False


def _mask_of(tokens: list[int] | slice, num_words: int) -> NDArray[np.uint32]:
    """Return the mask, `num_words` 32-bit words, that allows only these tokens."""
    flags = np.zeros(num_words * 32, np.uint8)
    flags[tokens] = 1
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)
