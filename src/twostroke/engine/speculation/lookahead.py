"""Guesses that the model makes for itself: lookahead decoding (Fu et al. 2024).

Jacobi iteration guesses several next tokens and lets the model draw a token after each. The drawn
tokens become the next guesses, and after some rounds much of them is what the model says, though
often at another place. Lookahead decoding keeps the short runs that appear on the way.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from twostroke.core.draft_tree import ROOT
from twostroke.core.step import NO_TOKEN
from twostroke.engine.speculation.acceptance import AcceptanceRate
from twostroke.engine.speculation.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.request import Request
    from twostroke.engine.speculation.proposal import DraftCost, DraftOutcome

# A run's token is of a kind by the rank of its run (the latest is first), and by whether it begins
# the run; with how often such tokens are right before anything is known.
_MOST_RANK = 3
_PRIOR = tuple(odd for rank in range(_MOST_RANK + 1) for odd in (0.3 / (1 + rank), 0.4))
_NUM_KINDS = len(_PRIOR)
_MOST_CHANCE = 0.3  # a window is left out if each row must bring more tokens than this
_LEAST_WORTH = 0.01  # of the window's rows


class _DraftRow(NamedTuple):
    """A guess as `Proposal` has it."""

    token: int
    odd: float
    kind: int
    parent: int
    worth: float


class Lookahead:
    """Looks ahead with a window of `num_columns`, collects runs of `length` tokens, and tries them.

    Column j of the window holds guesses for the places from j after the newest token on: what was
    drawn for it in the last `length` - 1 steps. The first cells of the columns, the trunk, follow
    each other; the other cells of a column follow its first one. The token drawn after a column's
    last cell completes a run, which goes into the request's pool, and moves the column on by one.

    Of the runs that begin with the newest token, the latest `most_tried` are guesses. Nobody knows
    what a row of the window is worth for later steps, so where rows are cheap it counts as twice
    what it costs. If that turns out wrong, the proposer's account (`worth.Account`) ends it.
    """

    name = "lookahead"

    def __init__(self, num_columns: int = 3, length: int = 3, most_tried: int = 2) -> None:
        """Begin without any run."""
        assert num_columns >= 1
        assert length >= 3, "runs of two tokens need no window"
        self.num_columns, self.length, self.most_tried = num_columns, length, most_tried
        self._rate = AcceptanceRate((*_PRIOR, *(0.0,) * (num_columns * (length - 1))))
        self._requests: dict[Request, _Search] = {}

    def propose(self, requests: Sequence[Request], price: DraftCost) -> list[Proposal | None]:
        """Return guesses for each request, which has one token to compute, or None."""
        return [self._propose(request, price) for request in requests]

    def learn(self, request: Request, proposal: Proposal, outcome: DraftOutcome) -> None:
        """Collect what was drawn after the window, and learn which guesses were right."""
        search = self._requests.get(request)
        if search is None:
            return
        search.rate.learn(proposal, outcome)
        search.collect(proposal, outcome, self.most_tried)
        search.advance(len(outcome.right), request.tokens)

    def finish(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._requests.pop(request, None)

    def close(self) -> None:
        """Release nothing."""

    def _propose(self, request: Request, price: DraftCost) -> Proposal | None:
        search = self._requests.get(request)
        if search is None:
            rate, rng = self._rate.for_request(), random.Random(request.seed)
            search = self._requests[request] = _Search(self.length, rate, rng)
            search.advance(self.num_columns, request.tokens)
        search.newest = request.tokens[-1]
        rows = search.run_rows()
        if price.row_chance < _MOST_CHANCE:
            search.add_window(rows, max(_LEAST_WORTH, 2 * price.row_chance))
        if not rows:
            return None
        tokens, odds, kinds, parents, worths = zip(*rows, strict=True)
        return Proposal(self.name, tokens, odds, kinds, parents, worths).best_first()


@dataclass(slots=True)
class _Search:
    """One request's window and pool.

    `window[j]` are the cells of column j, the trunk's first. `pool[token]` are runs that follow it,
    the latest last.
    """

    length: int
    rate: AcceptanceRate
    rng: random.Random
    newest: int = 0
    window: list[list[int]] = field(default_factory=list)
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)

    def run_rows(self) -> list[_DraftRow]:
        """Return the runs that begin with the newest token as a tree, the latest run first."""
        rows: list[_DraftRow] = []
        places: dict[tuple[int, int], int] = {}  # by parent and token
        for rank, run in enumerate(reversed(self.pool.get(self.newest, {}))):
            at, chance = ROOT, 1.0
            for depth, token in enumerate(run):
                place = places.setdefault((at, token), len(rows))
                if place == len(rows):
                    kind = 2 * min(rank, _MOST_RANK) + (depth > 0)
                    odd = self.rate.of(kind)
                    rows.append(_DraftRow(token, odd, kind, at, chance * odd))
                at, chance = place, rows[place].worth
        return rows

    def add_window(self, rows: list[_DraftRow], worth: float) -> None:
        """Add the cells of the window, column by column; their kinds number them."""
        trunk = ROOT
        for number, column in enumerate(self.window):
            first_kind = _NUM_KINDS + number * (self.length - 1)
            at = trunk
            for level, token in enumerate(column):
                if number or level:  # the first column's trunk cell stands for the newest token
                    rows.append(_DraftRow(token, 0.0, first_kind + level, at, worth))
                    at = len(rows) - 1
                if not level:
                    trunk = at

    def collect(self, proposal: Proposal, outcome: DraftOutcome, most: int) -> None:
        """Complete runs with what was drawn after the last cells of columns."""
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

    def advance(self, count: int, tokens: Sequence[int]) -> None:
        """Replace the first columns by new ones at the end, with any of the request's tokens."""
        new = [self.rng.choices(tokens, k=self.length - 1) for _ in range(count)]
        self.window = (self.window + new)[count:] if self.window else new
