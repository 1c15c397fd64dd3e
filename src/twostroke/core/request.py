"""A request: its tokens, how many of them are computed, and its class of service."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from twostroke.core.embedding import Pooling
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from twostroke.core.constraint import Matcher
    from twostroke.core.sampling import SamplingParams


DEFAULT_SERVICE: Final = "default"


BATCH_SERVICE: Final = "batch"  # lines of batches; clients cannot ask for it


# `Request.priority` of each class: lower goes first.
SERVICES: Final[dict[str, int]] = {
    DEFAULT_SERVICE: 0,
    "flex": 1,
    "priority": -1,
    BATCH_SERVICE: 2,
}


NO_PAGE = -1  # in a group's list of pages: no later row reads this part


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens (perhaps 0) or the context length
    CANCEL = "cancel"  # the caller cancelled or disconnected
    ERROR = "error"  # the engine failed on it


class Hints(Frozen):
    """Advice about a request that never changes its tokens.

    `speculate` is the method of guessing, a name in `core.config.SPECULATE`. `prediction` is the
    output that the caller expects, as tokens. With `shows_progress` each step that reads a part of
    the prompt has an output. The prompt's pages are to be kept for `keep_s` seconds, in a page
    cache if there is one.
    """

    speculate: str = "auto"
    prediction: tuple[int, ...] = ()
    shows_progress: bool = False
    keep_s: float = 0.0


NO_HINTS = Hints()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence of tokens on its way through the engine.

    There are no phases: a step computes a slice `tokens[num_planned:num_planned + count]`, and
    a request is decoding once all of its tokens except the last are computed. Only the scheduler
    changes a request after it was added.

    Attributes:
        tokens: prompt followed by output.
        num_prompt: the number of prompt tokens in `tokens`.
        seed: of the random numbers; token `i` of the output uses counter `i`.
        end_ids: tokens that end the request, stop ids included.
        tenant, weight: who asks, and their share of computed tokens against that of others.
        salt: separates the prefix caches of tenants.
        prompt_field: the caller's name of the prompt, for errors, such as "messages".
        cuts_limit: whether a `max_tokens` above what fits is lowered to that, and not refused.
        start_within_s, timeout_s: seconds after its arrival by which it must have begun to be
            computed, and have ended; `spent_s` of the latter were over when it arrived.
        hints: how its next tokens may be guessed.
        matcher: tells which tokens keep its output within `params.constraint`, if it has one.
        pooling: the hidden states to return for an embedding; no token is drawn then.
        arrival_s: when it was added, on the engine's monotonic clock.
        started_s: when it first got pages; 0 before that.
        num_computed: how many tokens are computed, by steps that are committed.
        num_planned: how many are computed, or are about to be by steps in flight; these may draw
            some of them first.
        pages: a list for each of the model's cache groups, all equally long: entry i is the id of
            the key-value page with the group's part of `tokens[i * page_size:]`, or `NO_PAGE` if
            that is entirely before the group's window. No lists while it waits.
        num_final: how many of its tokens are final; None for all. The others are guesses of a
            model that follows another one, and may be removed.
        num_cached: prompt tokens found in the prefix cache when it was first admitted.
        num_scored: prompt tokens, from the second on, whose log-probabilities were reported.
        num_drafted: guessed tokens that were computed.
        num_accepted: how many of these were right.
        num_preemptions: how often it lost all of its pages.
        num_moves: how often some of its pages were replaced, after a preemption or by a branch's;
            otherwise its lists only grow, or get `NO_PAGE` before windows.
    """

    id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    end_ids: frozenset[int] = frozenset()
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    salt: bytes = b""
    prompt_field: str = "prompt"
    cuts_limit: bool = False
    start_within_s: float = math.inf
    timeout_s: float = math.inf
    spent_s: float = 0.0
    hints: Hints = NO_HINTS
    matcher: Matcher | None = None
    pooling: Pooling | None = None
    arrival_s: float = 0.0
    started_s: float = 0.0
    num_computed: int = 0
    num_planned: int = 0
    pages: list[list[int]] = field(default_factory=list)
    num_final: int | None = None
    num_cached: int = 0
    num_scored: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    num_moves: int = 0
    finish_reason: FinishReason | None = None

    @property
    def prompt(self) -> list[int]:
        """The prompt's tokens."""
        return self.tokens[: self.num_prompt]

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.num_prompt :]

    @property
    def start_by_s(self) -> float:
        """Until when it must have started, on the engine's monotonic clock."""
        return self.arrival_s + min(self.start_within_s, self.left_s)

    @property
    def end_by_s(self) -> float:
        """Until when it must have ended."""
        return self.arrival_s + self.left_s

    @property
    def left_s(self) -> float:
        """The seconds of its timeout that were left when it arrived."""
        return self.timeout_s - self.spent_s

    @property
    def num_output(self) -> int:
        """How many tokens are generated."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """How many known tokens no step computes yet; 0 while it waits for its next token."""
        return max(0, len(self.tokens) - self.num_planned)

    @property
    def is_in_flight(self) -> bool:
        """Whether a step that is not committed yet computes some of its tokens."""
        return self.num_planned > self.num_computed

    @property
    def draws_by_itself(self) -> bool:
        """Whether its next token can be drawn before the tokens in flight are known."""
        return self.matcher is None and self.pooling is None and not self.params.has_penalties

    @property
    def num_settled(self) -> int:
        """How many tokens are computed and final."""
        if self.num_final is None:
            return self.num_computed
        return min(self.num_computed, self.num_final)

    @property
    def num_unscored(self) -> int:
        """How many prompt tokens still need their log-probabilities reported."""
        if self.params.prompt_logprobs is None:
            return 0
        return self.num_prompt - 1 - self.num_scored

    @property
    def max_output(self) -> int | None:
        """The most tokens to draw; None for as many as the context holds."""
        return self.params.max_tokens if self.pooling is None else 0

    @property
    def needs_all_rows(self) -> bool:
        """Whether all prompt rows must be computed, so that cached pages cannot be used."""
        return self.pooling in {Pooling.MEAN, Pooling.NONE} or self.num_unscored > 0

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None
