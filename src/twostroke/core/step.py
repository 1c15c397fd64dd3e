"""One step of the engine: what is to be computed, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.tree import Branch


UNASKED: Final = (None,)  # the log-probabilities of one token of which nobody wants any
NO_TOKEN = -1  # drawn when a row's logits are unusable: its request fails, its batch does not


@dataclass(slots=True)  # not frozen, which would triple its cost: a step makes hundreds
class Slice:
    """One request's share of a step: compute `request.tokens[start:start + count]` and `drafts`.

    The keys and values of these tokens go to the pages in `request.pages`, which
    already reach far enough.
    `samples` says that the last of the `count` rows is the request's newest token, so that a token
    is drawn from its logits. If that one is output there may be `drafts`: guesses of what follows.
    They are rows like the others, and from the logits of each a token is drawn, too, as if the
    drafts up to it were the request's own.
    Drafts are a chain, each following the one before, or behind a slice of one row a tree: then
    `branches` say which of them begin other paths, in the order of their first drafts.
    `num_scored` rows, the last before those in which tokens are drawn, are of the prompt, and what
    is reported of each is how likely the prompt's next token was. Of `num_pooled` rows, the last
    ones, the hidden states are wanted.
    """

    request: Request
    start: int
    count: int
    samples: bool
    drafts: tuple[int, ...] = ()
    branches: tuple[Branch, ...] = ()
    num_scored: int = 0
    num_pooled: int = 0

    @property
    def num_rows(self) -> int:
        """How many tokens are computed, drafts among them."""
        return self.count + len(self.drafts)

    @property
    def num_drawn(self) -> int:
        """How many tokens are drawn."""
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def num_with_logits(self) -> int:
        """How many rows, the last ones, have logits."""
        return self.num_scored + self.num_drawn

    @property
    def scored_tokens(self) -> list[int]:
        """The tokens that are reported on, each behind a scored row."""
        end = self.start + self.count + (not self.samples)
        return self.request.tokens[end - self.num_scored : end]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Who computes which of their tokens in this step.

    `preempted` lost their pages to make room and wait again; they are not in `slices`. `budget` is
    how many rows may be added to it as drafts. `given` is what the Program's `Given` reads, (rows,
    width) in the order of the slices, where it has one.

    `requests`, `starts` and `counts` are those of the slices, gathered once as several ask for them
    in a step; of drafts, which are added later, this would not be true. `is_decode` says that each
    slice is one row that draws, its request's newest token, but for drafts.
    """

    slices: tuple[Slice, ...]
    preempted: tuple[Request, ...] = ()
    budget: int = 0
    given: NDArray[np.float32] | None = field(default=None, compare=False)
    requests: list[Request] = field(init=False, repr=False, compare=False)
    starts: list[int] = field(init=False, repr=False, compare=False)
    counts: list[int] = field(init=False, repr=False, compare=False)
    is_decode: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        slices, counts, keep = self.slices, [s.count for s in self.slices], object.__setattr__
        keep(self, "requests", [s.request for s in slices])
        keep(self, "starts", [s.start for s in slices])
        keep(self, "counts", counts)
        has_one_each = sum(counts) == len(counts)
        keep(self, "is_decode", has_one_each and all([s.samples for s in slices]))  # noqa: C419

    @property
    def has_drafts(self) -> bool:
        """Whether any slice has drafts by now."""
        return any(s.drafts for s in self.slices)

    @property
    def num_rows(self) -> int:
        """How many tokens the step computes."""
        return sum(s.num_rows for s in self.slices)

    @property
    def draws(self) -> list[bool]:
        """Of each row with logits, in order, whether a token is drawn in it; else it is scored."""
        return [place >= s.num_scored for s in self.slices for place in range(s.num_with_logits)]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural) of one token, from the unmodified distribution."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the backend drew: each slice's `num_drawn` tokens, in the plan's order.

    The first of a slice follows the request's newest token, the others its drafts in their order.

    A token is `NO_TOKEN` where nothing could be drawn; `logprobs[i]` is None unless the request
    asked. `elapsed_s` is the whole call, `kernel_s` the part of it inside kernels; both are 0.0
    where the backend does not measure. `hidden` has a row for each drawn token: the backend's
    `shown` value where the token was drawn, if there is one. `scores` has what was asked for of
    each scored row, in the plan's order, and None where the logits are unusable. `states` has for
    each slice with `num_pooled` rows what the logits of these would be computed from (rows, width):
    their last hidden states, normed. They depend on nothing but the rows.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    elapsed_s: float = 0.0
    kernel_s: float = 0.0
    hidden: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    scores: Sequence[TokenLogprobs | None] = ()
    states: Sequence[NDArray[np.float32]] = field(default=(), repr=False, compare=False)


@dataclass(slots=True)  # as Slice
class Delta:
    """What one step brought one request: new tokens, and perhaps its end.

    `scores` are log-probabilities of the prompt's tokens, in their order, from the second on.
    `states` are the hidden states (rows, width) that were wanted of the rows just computed.
    """

    request: Request
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    scores: tuple[TokenLogprobs | None, ...] = ()
    states: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Logits of every row of one sequence, for evaluation.

    `logits` is float32 of shape (rows, vocab_size).
    """

    logits: NDArray[np.float32] = field(repr=False)
