"""A request as a draft model knows it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from twostroke.core.tree import num_accepted
from twostroke.spec.proposal import Proposal

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.schedule.ticket import Ticket
    from twostroke.spec.hope import Hope
    from twostroke.spec.odds import RequestOdds
    from twostroke.tokenize import Translation

HOPE: Final = 0.75  # that the first guess behind a text is right, before anything is known
_NUM_SURE = 10  # guesses are of a kind with those of which the draft was about as sure
_UNFINISHED = 0.7  # of the odds: the end of a text that may be the beginning of a longer token
_SURE_PRIOR = tuple((kind + 0.5) / _NUM_SURE for kind in range(_NUM_SURE))
PRIOR: Final = (*_SURE_PRIOR, *[_UNFINISHED * prior for prior in _SURE_PRIOR])
_UNSETTLED = 2  # tokens at the end of a text that more of it may change
_STRIDE = 2048  # a long prompt must not hold up everybody's step
_STRANGER = 0  # stands for a token that the draft has no row for


@dataclass(frozen=True, slots=True)
class Words:
    """How to say in the draft's tokens what the target says, and the other way round."""

    to_draft: Translation
    to_target: Translation

    def before(self, request: Request) -> list[int]:
        """Return what the draft wants before a text, unless the request begins with it."""
        prefix = self.to_draft.target.prefix_ids
        said = self.to_draft.say(request.tokens[: len(prefix)]).tokens
        return [] if said == prefix else prefix


@dataclass(slots=True, eq=False)
class Follower:
    """The same text as a request's, in the draft's tokens, and guesses behind it.

    `mirror.num_computed` rows have keys and values in the draft's pages. The first `num_same` of
    the mirror's tokens say what the first `num_seen` of the request's do and will stay; those
    before `guesses` say what the others do as well as can be known by now. It `is_behind` while
    there is more of the request than was said so far, some `stride` tokens at once, and it
    `is_new` until all of the prompt was said.
    """

    mirror: Request
    ticket: Ticket
    odds: RequestOdds
    words: Words | None
    hope: Hope
    vocab_size: int  # the draft's rows; without words the request may have tokens beyond
    num_seen: int = 0
    num_same: int = 0
    guesses: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)  # the draft of each
    chance: float = 1.0  # that all are right
    expected: float = 0.0  # how many are
    is_done: bool = False
    stride: int = _STRIDE
    is_new: bool = True
    is_behind: bool = True
    _waits: bool = False  # for the rest of a character, of which the draft has heard nothing
    _span: int = 0  # how much more than `stride` has to be said at once

    def go_on(self, request: Request) -> None:
        """Take over what the request has become; what was guessed rightly is computed already."""
        mirror = self.mirror
        if self.words is not None and not mirror.tokens:
            mirror.tokens += self.words.before(request)
            self.num_same = len(mirror.tokens)
        first = self.num_same
        if self.words is None:
            new = request.tokens[self.num_seen :]
            said = [token if token < self.vocab_size else _STRANGER for token in new]
            self.num_seen, self.num_same = len(request.tokens), len(request.tokens)
            self.is_behind = False
        else:
            said = self._go_on_saying(request, self.words.to_draft)
        agreed = first + num_accepted(mirror.tokens[first:], said)
        mirror.tokens[first:] = said
        # One is always left over, to be computed for its logits.
        mirror.num_computed = max(0, min(mirror.num_computed, agreed, len(mirror.tokens) - 1))
        self.guesses, self.sure, self.chance, self.expected = [], [], 1.0, 0.0
        self.is_new &= self.is_behind
        self.is_done = self.is_behind or self._waits or not mirror.tokens

    def _go_on_saying(self, request: Request, translation: Translation) -> list[int]:
        """Return the draft's tokens for some more of the request's, behind those that will stay."""
        end = self.num_seen + self.stride + self._span
        new, num_same = request.tokens[self.num_seen : end], self.num_same
        self.is_behind = end < len(request.tokens)
        said = self._said(new, translation)
        if self.is_new:
            self.mirror.num_prompt = self.num_same
        if not self.is_behind:
            return said
        # What follows a cut may change what is before it; where that is all, take a longer piece.
        self._span = self.stride + 2 * self._span if self.num_same == num_same else 0
        return said[: self.num_same - num_same]

    def _said(self, new: list[int], translation: Translation) -> list[int]:
        """Return the draft's tokens for the request's, and settle all but the last of them."""
        said = translation.say(new)
        breaks, ends = translation.breaks(new), said.ends
        for count in range(len(said.tokens) - _UNSETTLED, 0, -1):
            if ends[count - 1] in breaks and ends[count - 1] < ends[count]:
                self.num_seen += breaks[ends[count - 1]]
                self.num_same += count
                break
        self._waits = not said.is_whole
        return said.tokens

    def add(self, guess: int, sureness: float) -> None:
        """Guess another token, of which the draft was so sure."""
        self.mirror.tokens.append(guess)
        self.guesses.append(guess)
        self.sure.append(sureness)
        self.chance *= self.odds.of(_kind(sureness))
        self.expected += self.chance

    def proposal(self, most: int) -> Proposal | None:
        """Return up to `most` guesses, in the target's tokens."""
        if not self.guesses:
            return None
        if self.words is None:
            tokens, kinds = self.guesses, [_kind(sureness) for sureness in self.sure]
        else:
            tokens, kinds = self._translated(self.words.to_target)
        odds = tuple([self.odds.of(kind) for kind in kinds[:most]])
        if not odds:
            return None
        return Proposal("draft", tuple(tokens[:most]), odds, tuple(kinds[:most]))

    def _translated(self, translation: Translation) -> tuple[list[int], list[int]]:
        """Return the target's tokens for the guesses, and their kinds.

        A token is as sure as all guesses together that reach into it and not into one before it.
        """
        said, ends = translation.say(self.guesses), translation.ends(self.guesses)
        kinds, at = [], 0
        for end in said.ends:
            first = at
            while at < len(ends) and (ends[at - 1] if at else 0) < end:
                at += 1
            kinds.append(_kind(math.prod(self.sure[first:at])))
        if kinds:
            kinds[-1] += _NUM_SURE
        return said.tokens, kinds


def _kind(sureness: float) -> int:
    return min(int(sureness * _NUM_SURE), _NUM_SURE - 1)
