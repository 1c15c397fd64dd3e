"""The limits of a scheduler, and snapshots of its state."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from twostroke.core.errors import Field, UsageError

if TYPE_CHECKING:
    from twostroke.core.request import Request


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of one scheduler.

    Attributes:
        context_length: most tokens, prompt and output together, that the model can hold.
        max_running: most requests that hold pages at once.
        token_budget: most tokens that one step computes. What the requests with one pending token
            leave of it goes to prompts, so it also bounds how long a step, and with it the time
            between two tokens, can take.
        most_scored: most rows of a step that report log-probabilities of prompts; it bounds the
            memory that logits take.
        max_waiting_requests: a longer queue refuses.
        max_waiting_tokens: a queue with more tokens refuses, unless it is empty.
        max_overtakes: how many later arrivals may pass a request for each level of priority that
            they are more urgent. It is what keeps a stream of urgent requests from starving the
            others for ever.

    Raises:
        UsageError: a limit is below 1, or the budget cannot serve all running requests.
    """

    context_length: int
    max_running: int = 256
    token_budget: int = 512
    most_scored: int = 128
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1 << 20
    max_overtakes: int = 1000

    def __post_init__(self) -> None:
        """Refuse what could not make progress."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                reason = f"must be an integer of at least 1, got {value!r}."
                raise UsageError(reason, field=field.name)
        if self.token_budget < self.max_running:
            reason = f"must be at least {{other}} ({self.max_running}), got {self.token_budget}."
            raise UsageError(reason, field="token_budget", other=Field("max_running"))


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot: requests and pages by state now, and counts since the start.

    `num_prompt_tokens` counts prompts when they are first admitted, `num_hit_tokens` those of
    their tokens that the prefix cache held; their ratio is the hit rate.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_free_pages: int
    num_cached_pages: int
    num_referenced_pages: int
    num_prompt_tokens: int
    num_hit_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """A copy of the running requests, by rank, and of the state of all pages.

    `held[i]` are the pages of `running[i]`, a tuple for each cache group (with `NO_PAGE`). `counts`
    are the references to each page; `cached` are the unreferenced pages in the prefix cache.
    `waiting_since_s` is the arrival of the request that has waited longest, if any waits.
    """

    stats: SchedulerStats
    running: tuple[Request, ...]
    held: tuple[tuple[tuple[int, ...], ...], ...]
    counts: tuple[int, ...]
    cached: tuple[int, ...]
    waiting_since_s: float | None
