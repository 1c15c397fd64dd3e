"""One step of the engine: its plan and its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct, field
from msgspec.structs import force_setattr

from twostroke.core.draft_tree import DraftBranch
from twostroke.core.frozen import Frozen
from twostroke.core.request import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


UNASKED: Final = (None,)  # log-probabilities of one token, if the request wants none
NO_TOKEN = -1  # drawn from logits that are not numbers: the request fails, the others do not


class Slice(Struct):  # a step makes hundreds
    """One request's share of a step: compute `request.tokens[start:start + count]` and `drafts`.

    Keys and values of these tokens are stored in `request.pages`, which are already long enough.
    If the last of the `count` rows is the request's newest token, the slice `samples`: a token is
    drawn from that row's logits. Then `drafts` may follow, guesses of the next tokens. A token is
    drawn after each draft too, as if the drafts up to it were part of the request. Drafts are a
    chain or, after a slice of one row, a tree: `branches` are the drafts that begin other paths, in
    order.

    A blind slice has one row, of the token that the request draws in the step before, which only
    the backend knows yet. It samples, and has no drafts.

    The last `num_scored` rows before those that draw report the log-probability of the prompt's
    next token. The last `num_pooled` rows return their hidden states.
    """

    request: Request
    start: int
    count: int
    samples: bool
    drafts: tuple[int, ...] = ()
    branches: tuple[DraftBranch, ...] = ()
    num_scored: int = 0
    num_pooled: int = 0

    @property
    def is_blind(self) -> bool:
        """Whether its token is not known yet."""
        return self.start >= len(self.request.tokens)

    @property
    def num_rows(self) -> int:
        """How many tokens are computed, drafts included."""
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
        """The prompt tokens after the scored rows, whose log-probabilities are reported."""
        end = self.start + self.count + (not self.samples)
        return self.request.tokens[end - self.num_scored : end]


class StepPlan(Frozen):
    """The work of one step: a slice for each of its requests.

    `preempted` requests lost their pages to make room and wait again; they are not in `slices`.
    Up to `budget` rows may be added as drafts. `external` is the value of the Program's
    `ExternalInput`, (rows, width) in the order of the slices.

    `requests`, `starts` and `counts` are those of the slices, collected once because a step needs
    them several times. With `is_decode` each slice has one row, its request's newest token or a
    blind one, apart from drafts.
    """

    slices: tuple[Slice, ...]
    preempted: tuple[Request, ...] = ()
    budget: int = 0
    external: NDArray[np.float32] | None = None
    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    is_decode: bool = False

    def __post_init__(self) -> None:
        slices, counts, keep = self.slices, [s.count for s in self.slices], force_setattr
        keep(self, "requests", [s.request for s in slices])
        keep(self, "starts", [s.start for s in slices])
        keep(self, "counts", counts)
        has_one_each = sum(counts) == len(counts)
        keep(self, "is_decode", has_one_each and all([s.samples for s in slices]))  # noqa: C419

    @property
    def has_drafts(self) -> bool:
        """Whether any slice has drafts."""
        return any([s.drafts for s in self.slices])  # noqa: C419 - twice as quick

    @property
    def num_prompt_rows(self) -> int:
        """How many tokens of prompts the step computes."""
        prompts = [(s.start, s.count, s.request.num_prompt) for s in self.slices]
        return sum([min(count, end - start) for start, count, end in prompts if start < end])

    @property
    def num_rows(self) -> int:
        """How many tokens the step computes."""
        return sum(s.num_rows for s in self.slices)

    @property
    def draws(self) -> list[bool]:
        """For each row with logits, in order, whether it draws a token; the others are scored."""
        return [place >= s.num_scored for s in self.slices for place in range(s.num_with_logits)]


class TokenLogprobs(Frozen):
    """Natural log-probabilities of one token, from the model's own distribution."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class StepResult(Frozen):
    """The tokens that a step drew: `num_drawn` of each slice, in the plan's order.

    A slice's first token follows the request's newest, the others follow its drafts. It is
    `NO_TOKEN` if none could be drawn; `logprobs[i]` is None unless the request asked for it.
    `elapsed_s` is the whole call, `kernel_s` its part inside kernels and `collective_s` its part in
    collectives, waiting for other ranks included; they are 0.0 if not measured. `crowded_s` is the
    whole call if fewer threads than all computed, because other programs keep cores busy.
    `hidden` has the backend's `tapped_value` for each drawn token. `scores` are the log-
    probabilities of scored rows, None if logits are not numbers. `states` has, for each slice with
    `num_pooled` rows, their final hidden states (rows, width), which depend on these rows alone.
    `num_compiled` counts kernels that were compiled and graphs that were captured for the step.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    elapsed_s: float = 0.0
    kernel_s: float = 0.0
    hidden: NDArray[np.float32] | None = None
    scores: Sequence[TokenLogprobs | None] = ()
    states: Sequence[NDArray[np.float32]] = ()
    collective_s: float = 0.0
    num_compiled: int = 0
    crowded_s: float = 0.0


class RequestDelta(Frozen):
    """The outcome of one step for one request: new tokens, and perhaps its end.

    `scores` are log-probabilities of the prompt's next tokens, in order, from the second token on.
    `states` are the hidden states (rows, width) of the rows to pool.
    """

    request: Request
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    scores: tuple[TokenLogprobs | None, ...] = ()
    states: NDArray[np.float32] | None = None
