"""A request: its tokens, and how many of them are computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from twostroke.core.embedding import Pooling

if TYPE_CHECKING:
    from twostroke.core.constraint import Matcher
    from twostroke.core.sampling import SamplingParams


NO_PAGE = -1  # in a group's list: a page that no later row will read


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context was reached, or no token was wanted
    CANCEL = "cancel"  # the caller went away or asked
    ERROR = "error"  # the engine failed under it


@dataclass(frozen=True, slots=True)
class Hints:
    """Advice that may make a request faster and never changes its tokens.

    `speculate` is the method that guesses its next tokens, a name in `core.config.SPECULATE`.
    `prediction` is an output that the caller expects, as tokens.
    """

    speculate: str = "auto"
    prediction: tuple[int, ...] = ()


NO_HINTS = Hints()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence of tokens on its way through the engine.

    There are no phases: a step computes a slice `tokens[num_computed:num_computed + count]`,
    and a request whose `num_computed` has caught up with all but its last token is
    decoding. Only the scheduler changes a request after it was added.

    Attributes:
        tokens: prompt followed by output.
        num_prompt: how many of `tokens` are prompt.
        seed: the seed that was drawn or given; row `i` of the output uses counter `i`.
        end_ids: tokens that end the request (empty under `ignore_eos`), stop ids included.
        pages: one list for each of the model's cache groups, all equally long: entry i is the id
            of the key-value page that holds the group's part of `tokens[i * page_size:]`, or
            `NO_PAGE` if it is wholly before the group's window. No lists while it waits.
        hints: how its next tokens may be guessed, and from which text.
        matcher: says which tokens keep its output within `params.constraint`, if there is one.
        pooling: which of its last hidden states are wanted; then no token is drawn for it. None
            for a request that is to be continued.
        num_final: how many of its tokens will stay; None for all. Those after them are guesses of a
            model that follows another one, and may be taken back.
        num_cached: prompt tokens found in the prefix cache when it was first admitted.
        num_scored: prompt tokens, from the second on, whose log-probabilities were reported.
        num_drafted: tokens that were guessed and computed before they were known.
        num_accepted: how many of these were right.
        num_preemptions: how often it lost all of its pages.
        num_moves: how often pages that it had were replaced, after a preemption or by a branch's;
            otherwise its lists only grow, or are emptied before windows.
        salt: separates the prefix cache of one tenant from another's.
        prompt_field: the caller's name for the prompt, "prompt" or "messages", for errors.
        arrival_s: when it was added, on the engine's monotonic clock.
        started_s: when it was first given pages; 0 before that.
    """

    id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    end_ids: frozenset[int] = frozenset()
    priority: int = 0
    tenant: str = ""
    salt: bytes = b""
    prompt_field: str = "prompt"
    hints: Hints = NO_HINTS
    matcher: Matcher | None = None
    pooling: Pooling | None = None
    arrival_s: float = 0.0
    started_s: float = 0.0
    num_computed: int = 0
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
        """The tokens that were given."""
        return self.tokens[: self.num_prompt]

    @property
    def output(self) -> list[int]:
        """The tokens that were generated."""
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """How many tokens are not computed yet; 0 only once it is finished."""
        return len(self.tokens) - self.num_computed

    @property
    def num_settled(self) -> int:
        """How many tokens are computed and will stay."""
        if self.num_final is None:
            return self.num_computed
        return min(self.num_computed, self.num_final)

    @property
    def num_unscored(self) -> int:
        """How many prompt tokens' log-probabilities are wanted and not reported yet."""
        if self.params.prompt_logprobs is None:
            return 0
        return self.num_prompt - 1 - self.num_scored

    @property
    def max_output(self) -> int | None:
        """How many tokens may be drawn for it; None for as many as the context holds."""
        return self.params.max_tokens if self.pooling is None else 0

    @property
    def needs_all_rows(self) -> bool:
        """Whether something is wanted of its prompt's rows, so that cached ones are of no use."""
        return self.pooling is Pooling.MEAN or self.num_unscored > 0

    @property
    def is_finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None
