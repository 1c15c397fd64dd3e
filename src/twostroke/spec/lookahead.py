"""Guesses that the model makes for itself: lookahead decoding (Fu et al. 2024).

Jacobi iteration guesses several next tokens and lets the model draw a token behind each; what it
draws becomes the next guess, and after some rounds much of it is what the model says, though often
at another place. Lookahead decoding keeps the short runs that come about on the way.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twostroke.core.step import NO_TOKEN
from twostroke.core.tree import ROOT
from twostroke.spec.acceptance import AcceptanceRate
from twostroke.spec.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.request import Request
    from twostroke.spec.proposal import Outcome, Price

# Verified guesses are of a kind with those of the same rank (the run met last is first) that stand
# at the beginning of a run, or further on; and how often they are right before anything is known.
_MOST_RANK = 3
_PRIOR = tuple(odd for rank in range(_MOST_RANK + 1) for odd in (0.3 / (1 + rank), 0.4))
_NUM_KINDS = len(_PRIOR)
_GAIN = 0.5  # accepted tokens a step, before anything is known
_GAIN_STEP = 0.03
_TRIAL = 48  # steps of which nothing is expected but to learn
_TRIAL_PRICE = 0.3  # unless a row must be worth more than this
_WARM_UP = 12  # steps of a window before runs are what the model says
_GAIN_FADE = 0.002  # of the way back to the beginning, each time that the window was not computed


class Lookahead:
    """Looks ahead with a window of `num_columns`, collects runs of `length` tokens, and tries them.

    The window's column j holds what may stand from place j behind the newest token on: the end of
    what was drawn for it in the last `length` - 1 steps. Its first cells, the trunk, follow each
    other, and behind each of them stand the column's other cells: a tree like a comb. The token
    that is drawn behind a column's last cell completes a run, which goes into the request's pool,
    and moves the column on by one.

    Of the runs that begin with the newest token, the `most_tried` that were met last are guesses of
    what follows. What the window's rows are worth is what these guesses have brought lately, less
    what they cost, so that a request for which runs are seldom right soon gets no window. An
    engine's first steps with a window are a trial, or nobody would ever know.
    """

    name = "lookahead"

    def __init__(self, num_columns: int = 3, length: int = 3, most_tried: int = 2) -> None:
        """Know nothing yet."""
        assert num_columns >= 1
        assert length >= 3, "runs of two tokens need no window behind the trunk"
        self.num_columns, self.length, self.most_tried = num_columns, length, most_tried
        self._rate = AcceptanceRate(_PRIOR)
        self._gain = _GAIN
        self._trial = _TRIAL
        self._requests: dict[Request, _Search] = {}

    def propose(self, requests: Sequence[Request], price: Price) -> list[Proposal | None]:
        """Return guesses for each request, which has one token to compute, or None."""
        return [self._propose(request, price) for request in requests]

    def learn(self, request: Request, proposal: Proposal, outcome: Outcome) -> None:
        """Collect what was drawn behind the window, and hear which guesses were right."""
        search = self._requests.get(request)
        if search is None:
            return
        kinds, num_right = proposal.kinds, len(outcome.right)
        for guess, is_right in outcome.trials(proposal):
            if kinds[guess] < _NUM_KINDS:
                search.rate.add(kinds[guess], right=is_right)
        num_tried = sum(kinds[guess] < _NUM_KINDS for guess in outcome.tried)
        if not num_tried and kinds[0] < _NUM_KINDS:
            search.rate.fade(kinds[0])
        if outcome.tried:
            self._trial = max(0, self._trial - 1)
            search.num_steps += 1
            if search.num_steps > _WARM_UP:
                search.gain += _GAIN_STEP * (num_right - search.gain)
                search.num_tried += _GAIN_STEP * (num_tried - search.num_tried)
        search.collect(proposal, outcome, self.most_tried)
        search.advance(num_right + 1, request.tokens)

    def finish(self, request: Request) -> None:
        """Drop what is kept for a request that has ended; the next ones begin with its gain."""
        search = self._requests.pop(request, None)
        if search is not None:
            self._gain += 0.1 * (search.gain - self._gain)

    def close(self) -> None:
        """Hold nothing that must be given back."""

    def _propose(self, request: Request, price: Price) -> Proposal | None:
        search = self._requests.get(request)
        if search is None:
            rate, rng = self._rate.for_request(), random.Random(request.seed)
            search = self._requests[request] = _Search(self.length, rate, rng, self._gain)
            search.window = [search.column(request.tokens) for _ in range(self.num_columns)]
        search.newest = request.tokens[-1]
        comb = _Comb()
        search.add_runs(comb)
        num_rows = self.num_columns * (self.length - 1) - 1
        worth = (search.gain - search.num_tried * price.row_chance) / num_rows
        if self._trial and price.row_chance < _TRIAL_PRICE:
            worth = max(worth, 2 * price.row_chance)
        if worth > price.row_chance:
            search.add_window(comb, worth)
        else:
            search.gain += _GAIN_FADE * (_GAIN - search.gain)
        return comb.proposal() if comb.tokens else None


@dataclass(slots=True)
class _Comb:
    """A proposal in the making."""

    tokens: list[int] = field(default_factory=list)
    odds: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    worths: list[float] = field(default_factory=list)

    def add(self, token: int, parent: int, odd: float, kind: int, worth: float) -> int:
        """Add a token behind another, and return its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.odds.append(odd)
        self.kinds.append(kind)
        self.worths.append(worth)
        return len(self.tokens) - 1

    def child(self, parent: int, token: int) -> int | None:
        """Return which token that is the same stands behind another already."""
        behind = zip(self.parents, self.tokens, strict=True)
        return next((i for i, pair in enumerate(behind) if pair == (parent, token)), None)

    def proposal(self) -> Proposal:
        """Return it, finished."""
        return Proposal(
            "lookahead",
            tuple(self.tokens),
            tuple(self.odds),
            tuple(self.kinds),
            tuple(self.parents),
            tuple(self.worths),
        ).best_first()


@dataclass(slots=True)
class _Search:
    """One request's window and pool, and what they have brought: right guesses a step (`gain`).

    `window[j]` are the cells of column j, the trunk's first; in column 0 that one stands for the
    newest token and is not read. `pool[token]` are runs that begin with it, the latest at the end.
    """

    length: int
    rate: AcceptanceRate
    rng: random.Random
    gain: float
    num_tried: float = 0.0  # runs' tokens, a step
    num_steps: int = 0  # in which something was tried
    newest: int = 0
    window: list[list[int]] = field(default_factory=list)
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)

    def column(self, tokens: Sequence[int]) -> list[int]:
        """Return cells for a place of which nothing is known: any of the request's tokens."""
        return self.rng.choices(tokens, k=self.length - 1)

    def add_runs(self, comb: _Comb) -> None:
        """Add the runs that begin with the newest token, those that were met last first."""
        for rank, run in enumerate(reversed(self.pool.get(self.newest, {}))):
            at, chance = ROOT, 1.0
            for depth, token in enumerate(run):
                found = comb.child(at, token)
                if found is None:
                    kind = 2 * min(rank, _MOST_RANK) + (depth > 0)
                    odd = self.rate.of(kind)
                    found = comb.add(token, at, odd, kind, chance * odd)
                at, chance = found, comb.worths[found]

    def add_window(self, comb: _Comb, worth: float) -> None:
        """Add the cells of the window, column by column; their kinds say which they are."""
        trunk = ROOT
        for number, column in enumerate(self.window):
            first_kind = _NUM_KINDS + number * (self.length - 1)
            if number:
                trunk = comb.add(column[0], trunk, 0.0, first_kind, worth)
            at = trunk
            for level in range(1, self.length - 1):
                at = comb.add(column[level], at, 0.0, first_kind + level, worth)

    def collect(self, proposal: Proposal, outcome: Outcome, most: int) -> None:
        """Take in what was drawn behind the last cells of columns."""
        for guess, token in zip(outcome.tried, outcome.drawn[1:], strict=True):
            number, level = divmod(proposal.kinds[guess] - _NUM_KINDS, self.length - 1)
            if number < 0 or level < self.length - 2 or token == NO_TOKEN:
                continue
            column = self.window[number]
            first = column[0] if number else self.newest
            column[:] = (*column[1:], token)
            runs = self.pool.setdefault(first, {})
            runs.pop(tuple(column), None)
            runs[tuple(column)] = None
            if len(runs) > most:
                del runs[next(iter(runs))]

    def advance(self, num_places: int, tokens: Sequence[int]) -> None:
        """Let the window begin at the request's new last token; columns have moved on by one."""
        more = min(num_places - 1, len(self.window))
        self.window[:] = [*self.window[more:], *(self.column(tokens) for _ in range(more))]
