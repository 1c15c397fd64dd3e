"""Limits of a scheduler, the errors of requests that exceed them, and snapshots of its state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from twostroke.core.errors import (
    ContextLengthError,
    Field,
    OverloadedError,
    RequestError,
    UsageError,
)
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    from twostroke.core.options import BatchOptions
    from twostroke.core.request import Request

_CONTEXT_LENGTH_TEXT: Final = (
    "This model's maximum context length is {context_length} tokens. However, "
)


class SchedulerConfig(Frozen):
    """The limits of one scheduler: request length, running requests, tokens a step, queue.

    Attributes:
        context_length: maximum number of tokens of a request, prompt and output together.
        max_running: maximum number of requests that hold pages at once.
        token_budget: maximum number of tokens that one step computes. Decoding requests come first
            and prompts get the rest, so it also bounds the duration of a step and with it the time
            between two tokens.
        max_scored_rows: maximum number of rows in a step that report log-probabilities of prompts;
            bounds the memory for logits.
        max_waiting_requests: a request is refused if this many requests wait before it. Waiting
            requests with larger priority keys are not counted, unless there are more than this
            number of them. So the requests of one tenant, or less urgent requests, do not fill the
            queue for others.
        max_waiting_tokens: the same limit in tokens; it does not apply if no request waits.
        max_overtakes: a request may overtake only requests that arrived less than this number of
            arrivals earlier; this distance grows by the same number for each level of priority by
            which the later request is more urgent. So urgent requests cannot starve other requests.
        steps_ahead: how many steps may be in flight when another step is planned. All steps in
            flight together compute at most `token_budget` tokens; each step may use an equal share
            of this budget.
        samples_ahead: whether a step may compute tokens that steps in flight sample. Then each step
            has the whole budget, and there are no drafts.

    Raises:
        UsageError: the budget is smaller than the number of running requests.
    """

    context_length: int
    max_running: int = 256
    token_budget: int = 512
    max_scored_rows: int = 128
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1 << 20
    max_overtakes: int = 1000
    steps_ahead: int = 0
    samples_ahead: bool = False

    @classmethod
    def from_options(
        cls,
        batch: BatchOptions,
        context_length: int,
        *,
        steps_ahead: int = 0,
        samples_ahead: bool = False,
    ) -> Self:
        """Return the scheduler's limits for an engine with these batch options.

        `steps_ahead` and `samples_ahead` come from the backend; see the attributes of the class.
        """
        return cls(
            context_length=context_length,
            max_running=batch.effective_max_running,
            token_budget=batch.token_budget,
            max_waiting_requests=batch.max_waiting_requests,
            max_waiting_tokens=batch.max_waiting_tokens,
            steps_ahead=steps_ahead,
            samples_ahead=samples_ahead,
        )

    @property
    def step_budget(self) -> int:
        """The maximum number of tokens that one step computes.

        With `steps_ahead`, the steps in flight share the token budget. With `samples_ahead`, each
        step has the whole budget.
        """
        if self.samples_ahead:
            return self.token_budget
        return -(-self.token_budget // self._num_steps)

    @property
    def max_tokens_in_flight(self) -> int:
        """The maximum number of tokens that all steps in flight compute together."""
        return self.token_budget * (self._num_steps if self.samples_ahead else 1)

    @property
    def max_batch_rows(self) -> int:
        """The maximum number of rows of offline batch requests in a step with other requests.

        The number is small, since each of these rows delays the next tokens of the other requests,
        and large enough for most of the throughput of a batch.
        """
        return max(1, self.step_budget // 8)

    @property
    def _num_steps(self) -> int:
        return 1 + self.steps_ahead

    def __post_init__(self) -> None:
        """Raise UsageError for limits under which a running request would get no row in a step."""
        if self.token_budget < self.max_running:
            reason = f"must be at least {{other}} ({self.max_running}), got {self.token_budget}."
            raise UsageError(reason, field="token_budget", other=Field("max_running"))


class SchedulerStats(Frozen):
    """Counts of a scheduler: its requests and pages by state now, and sums since the start.

    Attributes:
        num_running, num_waiting: requests.
        num_waiting_tokens: tokens of waiting requests.
        num_free_pages, num_cached_pages, num_referenced_pages: pages by state, see `PagePool`.
        num_prompt_tokens: prompt tokens of requests that have started, each request counted
            once.
        num_hit_tokens: the part of `num_prompt_tokens` that the prefix cache had.
        num_preemptions: how often a request lost its pages to another request.
        num_recoveries: how often all KV pages were lost, for instance with a rank that died.
        num_uncomputed: tokens of running requests that are not computed yet.
        horizon_s: seconds between the last use and the eviction of the page that was evicted
            last; None if no page was evicted. A cached prefix survives about this long without
            use.
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
    num_recoveries: int
    num_uncomputed: int = 0
    horizon_s: float | None = None


class SchedulerView(Frozen):
    """A copy of the running requests, sorted by priority key, and of the state of all KV pages.

    Attributes:
        stats: the counts of the same moment.
        running: requests that hold pages.
        pages: the page lists of each running request, a tuple per cache group (with `NO_PAGE`).
        reference_counts: number of references to each page of the pool.
        cached_pages: pages in the prefix cache that no request references.
        waiting_since_s: arrival of the request that has waited longest; None if none waits.
    """

    stats: SchedulerStats
    running: tuple[Request, ...]
    pages: tuple[tuple[tuple[int, ...], ...], ...]
    reference_counts: tuple[int, ...]
    cached_pages: tuple[int, ...]
    waiting_since_s: float | None


def max_len(request: Request, context_length: int, num_slots: int) -> int:
    """Return the number of tokens, prompt included, at which the scheduler must end a request.

    `num_slots` is how many tokens of one request the page pool can hold. A request with
    `cuts_limit` ends where the context or the pool is full; other requests that do not fit are
    refused.

    Raises:
        RequestError: the prompt is empty.
        ContextLengthError: the prompt, or prompt and `max_tokens`, exceed the context length or
            the page pool. The message about the context length is OpenAI's, for which clients
            search.
    """
    max_output, num_prompt = request.max_output, len(request.tokens)
    if max_output is not None:
        max_output -= request.num_output  # tokens that another engine has generated
    prompt_field = request.prompt_field
    if not num_prompt:
        raise RequestError("is empty: give at least one token.", field=prompt_field)
    total = num_prompt + (1 if max_output is None else max_output)
    if num_prompt + (max_output != 0) > context_length:
        raise prompt_too_long(prompt_field, num_prompt, context_length)
    if request.cuts_limit:
        total = min(total, max(num_prompt + 1, min(context_length, num_slots)))
    if total > context_length:
        raise ContextLengthError(
            f"{_CONTEXT_LENGTH_TEXT}you requested {counted_noun(total, 'token')} ({num_prompt} in "
            f"the {prompt_field}, {max_output} in the completion). Please reduce the length of "
            f"the {prompt_field} or completion.",
            field="max_tokens",
            num_prompt=num_prompt,
            num_answer=max_output,
            context_length=context_length,
        )
    if total > num_slots:
        raise ContextLengthError(
            f"The request needs key-value memory for {counted_noun(total, 'token')} "
            f"({num_prompt} of them "
            f"prompt), but there is memory for {num_slots}. "
            "Shorten the prompt, lower {limit}, or give the cache more memory.",
            field="max_tokens" if max_output else prompt_field,
            limit=Field("max_tokens"),
        )
    return total if max_output is not None else min(context_length, num_slots)


def prompt_too_long(
    prompt_field: str, num_prompt: int, context_length: int, *, is_exact: bool = True
) -> ContextLengthError:
    """Return the error for a prompt that alone exceeds the model's context length.

    `prompt_field` names the prompt's field in the client's request. With `is_exact=False`, the
    error says that the prompt has at least `num_prompt` tokens, because counting stopped there.
    """
    return ContextLengthError(
        _CONTEXT_LENGTH_TEXT + "your {field} resulted in {least}{num_prompt} tokens. "
        "Please reduce the length of the {field}.",
        field=prompt_field,
        least="" if is_exact else "at least ",
        num_prompt=num_prompt,
        context_length=context_length,
    )


class QueueEstimate(Frozen):
    """The estimated waiting times in the scheduler's queue if a new request joins it.

    Attributes:
        wait_s: seconds until the new request would start; None without measurements.
        delay_s: seconds by which the new request would delay later requests; None without
            measurements.
    """

    wait_s: float | None
    delay_s: float | None


def check_queue(
    config: SchedulerConfig,
    *,
    num_requests: int,
    num_tokens: int,
    num_new_tokens: int,
    estimate: QueueEstimate,
) -> None:
    """Refuse a new request if too many requests or tokens wait before it in the scheduler's queue.

    `num_requests` and `num_tokens` wait before the new request, which has `num_new_tokens`. The
    error advises clients to retry after half of the estimated wait: by then the queue has room, and
    the engine still has work.

    Raises:
        OverloadedError: too many requests or tokens wait.
    """
    is_full = num_requests >= config.max_waiting_requests
    if is_full:
        queued, limit = (
            counted_noun(num_requests, "request waits", "requests wait"),
            config.max_waiting_requests,
        )
    elif num_requests and num_tokens + num_new_tokens > config.max_waiting_tokens:
        queued = f"{counted_noun(num_tokens + num_new_tokens, 'token')} would wait"
        limit = config.max_waiting_tokens
    else:
        return
    raise OverloadedError(
        f"The queue is full: {queued}, and at most {limit} may. Try again later.",
        room_s=None if estimate.wait_s is None else estimate.wait_s / 2,
        turn_s=estimate.delay_s,
        is_full=is_full,
    )


def check_deadline(request: Request, waited_s: float, estimate: QueueEstimate) -> None:
    """Refuse a new request that would still wait in the scheduler's queue at its deadline to start.

    Raises:
        OverloadedError: the requests before it take too long.
    """
    left_s = min(request.start_within_s, request.remaining_s) - waited_s
    if estimate.wait_s and estimate.wait_s > left_s > 0:
        raise OverloadedError(
            f"The work that waits takes about {estimate.wait_s:.1f} s, and this request may wait "
            f"{left_s:.1f} s. Try again later.",
            room_s=estimate.wait_s - left_s,
            turn_s=estimate.delay_s,
        )
