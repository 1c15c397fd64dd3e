"""One step of the engine: its plan and its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct, field
from msgspec.structs import force_setattr

from twostroke.core.draft_tree import DraftBranch
from twostroke.core.frozen import Frozen
from twostroke.core.request import NO_STATE, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


NO_LOGPROBS: Final = (None,)  # log-probabilities of one token, if the request wants none
NO_TOKEN = -1  # sampled from logits that are NaN: only this request fails


class Slice(Struct):  # a step makes hundreds
    """One request's part of a step: its next tokens to compute, and its drafts.

    The slice computes `request.tokens[start:start + count]` and `drafts`. Each token is a row of
    the step. The keys and values of the rows are stored in `request.pages`, which already have room
    for them.

    A blind slice has one row, for the token that the previous step samples. Only the backend knows
    this token when the step is planned. A blind slice samples, and has no drafts.

    Attributes:
        request: the request.
        start: the index in `request.tokens` of the first token to compute.
        count: how many tokens to compute, without drafts.
        samples: whether the last of the `count` rows is the request's newest token, so that a
            token is sampled from the row's logits.
        drafts: drafts of the next tokens. A token is sampled after each draft as well, as if
            the drafts up to it were part of the request. Drafts are a chain or, after a slice
            of one row, a tree.
        branches: the chains of a draft tree besides its first one, ordered by their first
            drafts.
        num_scored: how many rows, before the rows that sample, report the log-probability of
            the prompt's next token.
        num_pooled: how many rows, at the end, return their hidden states.
        read_state: the slot of the recurrent state from which the first row starts, for models with
            such states; `NO_STATE` for zeros.
        write_state: the slot for the recurrent state after the last of the `count` rows. It is
            never `read_state`, so that a failed step can run again.
        draft_states: a slot for the recurrent state after each draft; empty for models without
            such states. The slot after the last accepted draft becomes the request's.
    """

    request: Request
    start: int
    count: int
    samples: bool
    drafts: tuple[int, ...] = ()
    branches: tuple[DraftBranch, ...] = ()
    num_scored: int = 0
    num_pooled: int = 0
    read_state: int = NO_STATE
    write_state: int = NO_STATE
    draft_states: tuple[int, ...] = ()

    @property
    def is_blind(self) -> bool:
        """Whether the slice computes a token that the previous step is still sampling."""
        return self.start >= len(self.request.tokens)

    @property
    def num_rows(self) -> int:
        """The number of tokens that the slice computes, drafts included."""
        return self.count + len(self.drafts)

    @property
    def num_drawn(self) -> int:
        """The number of tokens sampled for the slice: one after its rows, and one for each draft.

        It is 0 if the slice ends before the prompt's last token, so that no token is sampled.
        """
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def num_with_logits(self) -> int:
        """The number of rows at the slice's end that need logits: to sample or to score a token."""
        return self.num_scored + self.num_drawn

    @property
    def scored_tokens(self) -> list[int]:
        """The prompt tokens whose log-probabilities the slice reports.

        Each token follows one of the slice's scored rows.
        """
        end = self.start + self.count + (not self.samples)
        return self.request.tokens[end - self.num_scored : end]


class StepPlan(Frozen):
    """The work of one engine step, which the scheduler plans: a slice for each request in the step.

    Attributes:
        slices: the slices, in the order of their rows.
        preempted: requests that lost their pages to make room, and wait again; they have no
            slice.
        budget: how many draft tokens may be added to the step.
        external: (rows, width) input values for the Program's `ExternalInput` operation, None
            if it has none. Draft heads read the main model's hidden states in this way.
        requests: the request of each slice; collected once, because a step needs it several
            times.
        starts: `start` of each slice.
        counts: `count` of each slice.
        is_decode: whether each slice has one row, apart from drafts, and samples.
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
        slices = self.slices
        counts = [slice_.count for slice_ in slices]
        force_setattr(self, "requests", [slice_.request for slice_ in slices])
        force_setattr(self, "starts", [slice_.start for slice_ in slices])
        force_setattr(self, "counts", counts)
        have_one_row = sum(counts) == len(counts)
        is_decode = have_one_row and all([slice_.samples for slice_ in slices])  # noqa: C419
        force_setattr(self, "is_decode", is_decode)

    @property
    def has_drafts(self) -> bool:
        """Whether any slice of the step has draft tokens."""
        return any([slice_.drafts for slice_ in self.slices])  # noqa: C419 - twice as quick

    @property
    def num_prompt_rows(self) -> int:
        """The number of prompt tokens that the step computes."""
        spans = [(slice_.start, slice_.count, slice_.request.num_prompt) for slice_ in self.slices]
        return sum([min(count, end - start) for start, count, end in spans if start < end])

    @property
    def num_rows(self) -> int:
        """The number of tokens that the step computes, drafts included."""
        return sum(slice_.num_rows for slice_ in self.slices)

    @property
    def draws(self) -> list[bool]:
        """For each row with logits, in order, whether a token is sampled from the logits.

        The logits of the other rows only give the log-probability of the prompt's next token.
        """
        return [
            row >= slice_.num_scored
            for slice_ in self.slices
            for row in range(slice_.num_with_logits)
        ]


class TokenLogprobs(Frozen):
    """Natural log-probabilities of a token and of the likeliest tokens at its position.

    They follow from the model's logits alone, before temperature, penalties and other sampling
    rules.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class StepResult(Frozen):
    """The tokens that an engine step sampled, and the times of the step.

    Times are 0.0 if they were not measured.

    Attributes:
        tokens: `num_drawn` tokens of each slice, in the plan's order. A slice's first token follows
            the request's newest one, further tokens follow its drafts. `NO_TOKEN` if the logits are
            NaN.
        logprobs: the log-probabilities of each token; None if the request does not want them.
        elapsed_s: seconds that the backend took for the step.
        kernel_s: seconds of the step inside kernels.
        hidden: (tokens, width) a hidden state for each sampled token, if the backend was built to
            return one (`tapped_value` names the Program's value). Draft heads read it.
        scores: the log-probabilities of the scored rows; None if logits are NaN.
        states: for each slice with `num_pooled` rows, (rows, width) their final hidden states,
            which depend on these rows alone.
        collective_s: seconds of the step in collectives, waiting for other ranks included.
        num_compiled: how many kernels were compiled and graphs captured for the step.
        crowded_s: `elapsed_s` if some threads did not compute because other programs keep cores
            busy, else 0.0.
        row_states: (rows, width) like `hidden`, but for all rows of the step, in the plan's order.
            Valid until the next step; None if the backend does not report it.
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
    row_states: NDArray[np.float32] | None = None


class RequestDelta(Frozen):
    """The outcome of one engine step for one request: new tokens, and perhaps its end.

    Attributes:
        request: the request; its `finish_reason` tells whether it has ended.
        tokens: the new tokens.
        logprobs: the log-probabilities of each new token.
        scores: log-probabilities of the prompt's next tokens, in order, from the second token
            on.
        states: (rows, width) the hidden states of the rows to pool.
    """

    request: Request
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    scores: tuple[TokenLogprobs | None, ...] = ()
    states: NDArray[np.float32] | None = None
