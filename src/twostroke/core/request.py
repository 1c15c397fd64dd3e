"""`Request`: the tokens, progress and options of one sequence in the engine; pooling of states."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import RequestError, nearest
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from twostroke.core.constraint import Matcher
    from twostroke.core.sampling import SamplingParams

DEFAULT_SERVICE_TIER: Final = "default"


BATCH_SERVICE_TIER: Final = "batch"  # for batch requests; clients cannot ask for it


# `Request.priority` of each service tier: lower numbers go first.
SERVICE_TIERS: Final[dict[str, int]] = {
    DEFAULT_SERVICE_TIER: 0,
    "flex": 1,
    "priority": -1,
    BATCH_SERVICE_TIER: 2,
}


NO_STATE = -1  # the slot of a request that has no recurrent state: its first row starts from zeros
NO_PAGE = -1  # in a list of pages: the page was released, since no later row reads its tokens


class FinishReason(StrEnum):
    """Why the engine ended a request; shown to clients as `finish_reason`."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens (perhaps 0) or the context length
    CANCEL = "cancel"  # the caller cancelled or disconnected
    ERROR = "error"  # the engine failed on it


class Pooling(Enum):
    """Which final hidden states, after the last norm, make up a text's embedding."""

    MEAN = "mean"  # the mean over all tokens
    LAST = "last"  # the state of the last token, which depends on all tokens
    NONE = "none"  # the state of each token: one vector per token, as the model computes it


class Hints(Frozen):
    """Advice of a caller about its request, which may change the speed and never the tokens.

    Attributes:
        speculate: the method of speculation, a name in `core.options.SPECULATE`.
        prediction: the output that the caller expects, as token ids.
        shows_progress: whether the caller gets an output after each step that prefills a part of
            the prompt.
        keep_s: seconds for which the prompt's KV pages should stay in the page cache, if the engine
            has one.
        shared_lengths: lengths, in tokens, of prefixes of the prompt that later prompts may share.
            For models with recurrent layers, a snapshot is kept after them.
    """

    speculate: str = "auto"
    prediction: tuple[int, ...] = ()
    shows_progress: bool = False
    keep_s: float = 0.0
    shared_lengths: tuple[int, ...] = ()


NO_HINTS = Hints()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence of tokens on its way through the engine: a prompt and its answer.

    There are no phases: a step computes a slice `tokens[num_planned:num_planned + count]`, and a
    request is decoding once all of its tokens except the last are computed. Only the scheduler
    changes a request after it was added. Times are on the engine's monotonic clock.

    Attributes:
        tokens: token ids of the prompt, followed by the output.
        num_prompt: the number of prompt tokens in `tokens`.
        seed: the seed of the random numbers; token `i` of the output uses counter `i`.
        end_ids: token ids that end the request, stop ids included.
        priority: the order between requests; lower numbers go first.
        tenant: the caller, for fair shares and limits.
        weight: the tenant's share of computed tokens, relative to the weights of other tenants.
        salt: separates the prefix caches of tenants.
        prompt_field: the caller's name of the prompt, for errors, such as "messages".
        cuts_limit: whether a `max_tokens` that exceeds the context is lowered, not refused.
        start_within_s: maximum number of seconds from arrival to the first step.
        timeout_s: maximum number of seconds from arrival to the end.
        spent_s: seconds of `timeout_s` that were used before arrival.
        is_admitted: whether another engine, which has died, had admitted the request before. Then
            the limits of the queue do not apply.
        hints: advice about speculation and caching.
        matcher: tells which tokens the constraint in `params` allows; None without a constraint.
        pooling: the hidden states to return for an embedding; no token is sampled then.
        arrival_s: the time when the request was added.
        started_s: the time when the request first got pages; 0 before that.
        num_computed: how many tokens committed steps have computed.
        num_planned: how many tokens are computed by committed steps or by steps in flight; it may
            exceed `len(tokens)`, since a step in flight may sample a token that the next computes.
        pages: a list for each of the model's cache groups, all equally long: entry i is the id of
            the KV page with the group's part of `tokens[i * page_size:]`, or `NO_PAGE` if the page
            is entirely before the group's window. Empty while the request waits.
        state_slot: the slot of the recurrent state after `num_computed` tokens, for models with
            such states; `NO_STATE` before the first token.
        planned_state_slot: the slot of the recurrent state after `num_planned` tokens.
        num_final: how many tokens are final; None for all. Only a draft model's request has further
            tokens: it copies the main model's request with its drafts, which may still be removed.
        num_cached: prompt tokens found in the prefix cache when the request first started.
        num_scored: prompt tokens, from the second on, whose log-probabilities were reported.
        num_drafted: draft tokens that were computed.
        num_accepted: draft tokens that were accepted.
        num_preemptions: how often the request lost all of its pages.
        num_moves: how often some entries of `pages` were replaced, by a preemption or by the pages
            of an accepted branch. Otherwise the lists only grow, or `NO_PAGE` replaces pages before
            a sliding window.
        finish_reason: why the request ended; None until then.
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
    is_admitted: bool = False
    hints: Hints = NO_HINTS
    matcher: Matcher | None = None
    pooling: Pooling | None = None
    arrival_s: float = 0.0
    started_s: float = 0.0
    num_computed: int = 0
    num_planned: int = 0
    pages: list[list[int]] = field(default_factory=list)
    state_slot: int = NO_STATE
    planned_state_slot: int = NO_STATE
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
        """The token ids of the request's prompt."""
        return self.tokens[: self.num_prompt]

    @property
    def output(self) -> list[int]:
        """The token ids that the request has generated so far."""
        return self.tokens[self.num_prompt :]

    @property
    def start_by_s(self) -> float:
        """The time on the engine's clock by which the request must start, or fail."""
        return self.arrival_s + min(self.start_within_s, self.remaining_s)

    @property
    def end_by_s(self) -> float:
        """The time on the engine's clock by which the request must end, or fail."""
        return self.arrival_s + self.remaining_s

    @property
    def remaining_s(self) -> float:
        """The seconds of the request's timeout that were left when the engine got the request."""
        return self.timeout_s - self.spent_s

    @property
    def num_output(self) -> int:
        """The number of tokens that the request has generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """The number of known tokens that are not planned in a step yet.

        It is 0 while a step in flight samples the next token.
        """
        return max(0, len(self.tokens) - self.num_planned)

    @property
    def is_in_flight(self) -> bool:
        """Whether a step that is not committed yet computes some of the request's tokens."""
        return self.num_planned > self.num_computed

    @property
    def can_sample_ahead(self) -> bool:
        """Whether a token can be sampled while the host does not yet know the token before it.

        The step that samples the earlier token is then still in flight. A request with a
        constraint, a penalty or pooling needs the earlier token first.
        """
        return self.matcher is None and self.pooling is None and not self.params.has_penalties

    @property
    def num_settled(self) -> int:
        """The number of computed tokens that cannot be removed any more.

        Without `num_final` these are all computed tokens.
        """
        if self.num_final is None:
            return self.num_computed
        return min(self.num_computed, self.num_final)

    @property
    def num_unscored(self) -> int:
        """The number of prompt tokens whose requested log-probabilities are not reported yet."""
        if self.params.prompt_logprobs is None:
            return 0
        return self.num_prompt - 1 - self.num_scored

    @property
    def max_output(self) -> int | None:
        """The maximum number of tokens to generate; None if only the context length is a limit."""
        return self.params.max_tokens if self.pooling is None else 0

    @property
    def needs_all_rows(self) -> bool:
        """Whether every prompt token must be computed, so that cached KV pages cannot be used."""
        return self.pooling in {Pooling.MEAN, Pooling.NONE} or self.num_unscored > 0

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self.finish_reason is not None


AUTO_POOLING: Final = "auto"
_MAX_QUOTED_LENGTH: Final = 40  # characters of an unknown pooling in an error
POOLINGS: Final = (AUTO_POOLING, *(pooling.value for pooling in Pooling))


class EmbeddingParams(Frozen):
    """How a text becomes a vector of length 1, or one vector per token with the pooling "none".

    Attributes:
        pooling: one of `POOLINGS`; "auto" is the pooling that the model's files name, else the
            mean.
        dimensions: how many values of the vector to keep, from the first on; the vector is then
            scaled to length 1 again. None keeps all. Vectors of tokens are never scaled.

    Raises:
        RequestError: the pooling is unknown, or `dimensions` is not an integer from 1 on.
    """

    pooling: str = AUTO_POOLING
    dimensions: int | None = None

    def __post_init__(self) -> None:
        """Raise RequestError if the pooling or the number of dimensions is not valid."""
        if self.pooling not in POOLINGS:
            word = str(self.pooling)[:_MAX_QUOTED_LENGTH]
            reason = f"must be {', '.join(POOLINGS)}, got {word!r}."
            raise RequestError(reason + nearest(word, POOLINGS), field="pooling")
        count = self.dimensions
        if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
            raise RequestError(f"must be an integer, got {count!r}.", field="dimensions")
        if count is not None and count < 1:
            raise RequestError(f"must be at least 1, got {count}.", field="dimensions")
