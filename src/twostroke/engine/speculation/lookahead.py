"""Lookahead decoding (Fu et al. 2024): drafts that the target model makes for itself.

Jacobi iteration takes several next tokens as drafts and samples a token after each. The sampled
tokens are the next drafts, and after some rounds many of them are tokens that the model would
generate, though often at another position. Lookahead decoding collects the n-grams that appear on
the way.
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

# The kind of an n-gram's token depends on the age of the n-gram (the latest has age 0), and on
# whether it is the first token. The priors are for both kinds of each age.
_MAX_AGE = 3
_PRIOR = tuple(chance for age in range(_MAX_AGE + 1) for chance in (0.3 / (1 + age), 0.4))
_NUM_NGRAM_KINDS = len(_PRIOR)
_MAX_WINDOW_CHANCE = 0.3  # a window is left out if its rows must be right more often than this
_MIN_ROW_VALUE = 0.01  # of the window's rows


class _DraftRow(NamedTuple):
    """A draft token of lookahead decoding, from which a `Proposal` is built."""

    token: int
    chance: float
    kind: int
    parent: int
    value: float


class Lookahead:
    """Lookahead decoding: the target model drafts for itself, without another model.

    In each step, a window of extra draft tokens is computed for a request. It has `num_columns`
    columns of `length` - 1 cells; a cell is a token. The first cells of all columns are a chain
    that follows the newest token, called the trunk. The other cells of a column follow the column's
    first cell. The token that the step samples after a column's last cell completes an n-gram of
    `length` tokens, which is stored for the request. In the next step, the column has lost its
    first cell, and the sampled token is its last cell.

    Of the n-grams that begin with the newest token, the latest `max_ngrams` are proposed as drafts.
    How much a window row helps later steps is not known, so its value is taken to be twice its
    cost. If the window costs more time than it saves, `ProposerGain` pauses the proposer.
    """

    name = "lookahead"

    def __init__(self, num_columns: int = 3, length: int = 3, max_ngrams: int = 2) -> None:
        """Start without n-grams.

        The window has `num_columns` columns; n-grams have `length` tokens. At most `max_ngrams` are
        proposed for a request.
        """
        assert num_columns >= 1
        assert length >= 3, "n-grams of two tokens need no window"
        self.num_columns = num_columns
        self.length = length
        self.max_ngrams = max_ngrams
        self._rate = AcceptanceRate((*_PRIOR, *(0.0,) * (num_columns * (length - 1))))
        self._requests: dict[Request, _LookaheadState] = {}

    def propose(self, requests: Sequence[Request], cost: DraftCost) -> list[Proposal | None]:
        """Return n-grams and the window's cells as drafts for each request; None for no drafts.

        The window's cells are rarely right, but must be computed like drafts. Each request has one
        pending token.
        """
        return [self._propose(request, cost) for request in requests]

    def learn(self, request: Request, proposal: Proposal, outcome: DraftOutcome) -> None:
        """Store new n-grams, which end with the tokens sampled after the window's columns.

        Also learns which of the proposed n-grams were right.
        """
        search = self._requests.get(request)
        if search is None:
            return
        search.rate.learn(proposal, outcome)
        search.collect(proposal, outcome, self.max_ngrams)
        search.advance(len(outcome.accepted), request.tokens)

    def finish(self, request: Request) -> None:
        """Drop the window and the n-grams of a request that has ended."""
        self._requests.pop(request, None)

    def close(self) -> None:
        """Do nothing: lookahead decoding has no threads and little memory to release."""

    def _propose(self, request: Request, cost: DraftCost) -> Proposal | None:
        search = self._requests.get(request)
        if search is None:
            rate, rng = self._rate.for_request(), random.Random(request.seed)
            search = self._requests[request] = _LookaheadState(self.length, rate, rng)
            search.advance(self.num_columns, request.tokens)
        search.newest = request.tokens[-1]
        rows = search.ngram_rows()
        if cost.row_chance < _MAX_WINDOW_CHANCE:
            search.add_window(rows, max(_MIN_ROW_VALUE, 2 * cost.row_chance))
        if not rows:
            return None
        tokens, chances, kinds, parents, values = zip(*rows, strict=True)
        tree = Proposal(self.name, tokens, chances, kinds, parents=parents, values=values)
        return tree.best_first()


@dataclass(slots=True)
class _LookaheadState:
    """The window and the collected n-grams of one request in lookahead decoding.

    Attributes:
        length: the length of n-grams.
        rate: the acceptance rate of the request.
        rng: random numbers, from which new columns get their tokens.
        newest: the request's newest token.
        window: the cells of each column, the trunk's cell first.
        pool: the stored n-grams: for each first token, the other tokens of its n-grams, the latest
            n-gram last.
    """

    length: int
    rate: AcceptanceRate
    rng: random.Random
    newest: int = 0
    window: list[list[int]] = field(default_factory=list)
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)

    def ngram_rows(self) -> list[_DraftRow]:
        """Return the n-grams that begin with the newest token as a tree of drafts, latest first."""
        rows: list[_DraftRow] = []
        row_index: dict[tuple[int, int], int] = {}  # by parent and token
        for age, ngram in enumerate(reversed(self.pool.get(self.newest, {}))):
            parent, value = ROOT, 1.0
            for depth, token in enumerate(ngram):
                index = row_index.setdefault((parent, token), len(rows))
                if index == len(rows):
                    kind = 2 * min(age, _MAX_AGE) + (depth > 0)
                    chance = self.rate.of(kind)
                    rows.append(_DraftRow(token, chance, kind, parent, value * chance))
                parent, value = index, rows[index].value
        return rows

    def add_window(self, rows: list[_DraftRow], value: float) -> None:
        """Append the window's cells to a step's drafts, column by column.

        The kind of each draft encodes the index of its cell, so that `collect` finds the cell.
        `value` is the value of each cell's row, in tokens.
        """
        trunk = ROOT
        for number, column in enumerate(self.window):
            first_kind = _NUM_NGRAM_KINDS + number * (self.length - 1)
            parent = trunk
            for level, token in enumerate(column):
                if number or level:  # the first column's trunk cell stands for the newest token
                    rows.append(_DraftRow(token, 0.0, first_kind + level, parent, value))
                    parent = len(rows) - 1
                if not level:
                    trunk = parent

    def collect(self, proposal: Proposal, outcome: DraftOutcome, max_ngrams: int) -> None:
        """Add n-grams to the pool, with the tokens sampled after the columns' last cells.

        The pool keeps the latest `max_ngrams` for each first token. Each column drops its first
        cell and appends the sampled token.
        """
        for draft, token in zip(outcome.tried, outcome.sampled[1:], strict=True):
            number, level = divmod(proposal.kinds[draft] - _NUM_NGRAM_KINDS, self.length - 1)
            if number < 0 or level < self.length - 2 or token == NO_TOKEN:
                continue
            column = self.window[number]
            first = column[0] if number else self.newest
            column[:] = (*column[1:], token)
            ngrams = self.pool.setdefault(first, {})
            ngrams.pop(tuple(column), None)
            ngrams[tuple(column)] = None
            if len(ngrams) > max_ngrams:
                del ngrams[next(iter(ngrams))]

    def advance(self, count: int, tokens: Sequence[int]) -> None:
        """Drop the window's first `count` columns, and append `count` columns from `tokens`.

        Their cells are drawn at random from `tokens`.
        """
        new = [self.rng.choices(tokens, k=self.length - 1) for _ in range(count)]
        self.window = (self.window + new)[count:] if self.window else new
