"""The limits of a scheduler, what they refuse, and snapshots of its state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.errors import (
    ContextLengthError,
    Field,
    OverloadedError,
    RequestError,
    UsageError,
)
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from twostroke.core.request import Request

_START: Final = "This model's maximum context length is {context_length} tokens. However, "


class SchedulerConfig(Frozen):
    """The limits of one scheduler.

    Attributes:
        context_length: most tokens, prompt and output together, that the model can hold.
        max_running: most requests that hold pages at once.
        token_budget: most tokens that one step computes. What the requests with one pending token
            leave of it goes to prompts, so it also bounds how long a step, and with it the time
            between two tokens, can take.
        most_scored: most rows of a step that report log-probabilities of prompts; it bounds the
            memory that logits take.
        max_waiting_requests: a request before which so many wait is refused. Those that go after
            it do not count, up to so many again: a flood of one tenant, or of less urgent
            requests, leaves room for others.
        max_waiting_tokens: the same in tokens, unless nothing waits before it.
        max_overtakes: how many later arrivals may pass a request for each level of priority that
            they are more urgent, so that a stream of urgent requests cannot starve the others.
        steps_ahead: how many steps may be in flight when another one is planned. Together they
            compute at most `token_budget` tokens, each its share.
        draws_ahead: whether a step may compute tokens that steps in flight draw. Then each step
            has the whole budget, and nothing is drafted.

    Raises:
        UsageError: the budget cannot serve all running requests.
    """

    context_length: int
    max_running: int = 256
    token_budget: int = 512
    most_scored: int = 128
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1 << 20
    max_overtakes: int = 1000
    steps_ahead: int = 0
    draws_ahead: bool = False

    @property
    def step_budget(self) -> int:
        """Most tokens that one of the steps in flight computes."""
        return self.token_budget if self.draws_ahead else -(-self.token_budget // self._num_steps)

    @property
    def most_in_flight(self) -> int:
        """Most tokens that the steps in flight compute together."""
        return self.token_budget * (self._num_steps if self.draws_ahead else 1)

    @property
    def most_lines(self) -> int:
        """Most rows of a step that lines of batches have beside other requests.

        Few, since each makes the others' next token later; enough for most of a processor's pace.
        """
        return max(1, self.step_budget // 8)

    @property
    def _num_steps(self) -> int:
        return 1 + self.steps_ahead

    def __post_init__(self) -> None:
        """Refuse what could not make progress."""
        if self.token_budget < self.max_running:
            reason = f"must be at least {{other}} ({self.max_running}), got {self.token_budget}."
            raise UsageError(reason, field="token_budget", other=Field("max_running"))


class SchedulerStats(Frozen):
    """A snapshot: requests and pages by state now, and counts since the start.

    `num_prompt_tokens` counts prompts when they are first admitted, `num_hit_tokens` those of
    their tokens that the prefix cache held; their ratio is the hit rate. `num_recoveries` counts
    how often the content of all pages was lost. `num_uncomputed` are tokens of running requests;
    `horizon_s` is how long ago the page was used that was evicted last.
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
    """A copy of the requests that hold pages, by rank, and of the state of all pages.

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


def max_len(request: Request, context_length: int, num_slots: int) -> int:
    """Return how many tokens end the request, prompt included.

    `num_slots` is how many tokens the whole page pool holds. A request that `cuts_limit` ends where
    either is full.

    Raises:
        RequestError: there is no prompt.
        ContextLengthError: the prompt, or prompt and `max_tokens`, exceed either. The wording for
            the context length is OpenAI's, which clients search for.
    """
    answer, num_prompt = request.max_output, len(request.tokens)
    prompt = request.prompt_field
    if not num_prompt:
        raise RequestError("is empty: give at least one token.", field=prompt)
    total = num_prompt + (1 if answer is None else answer)
    if num_prompt + (answer != 0) > context_length:
        raise too_long(prompt, num_prompt, context_length)
    if request.cuts_limit:
        total = min(total, max(num_prompt + 1, min(context_length, num_slots)))
    if total > context_length:
        raise ContextLengthError(
            f"{_START}you requested {total} tokens ({num_prompt} in the {prompt}, {answer} in the "
            f"completion). Please reduce the length of the {prompt} or completion.",
            field="max_tokens",
            num_prompt=num_prompt,
            num_answer=answer,
            context_length=context_length,
        )
    if total > num_slots:
        raise ContextLengthError(
            f"The request needs key-value memory for {total} tokens ({num_prompt} of them "
            f"prompt), but there is memory for {num_slots}. "
            "Shorten the prompt, lower {limit}, or give the cache more memory.",
            field="max_tokens" if answer else prompt,
            limit=Field("max_tokens"),
        )
    return total if answer is not None else min(context_length, num_slots)


def too_long(
    prompt: str, num_prompt: int, context_length: int, *, is_counted: bool = True
) -> ContextLengthError:
    """Return the error of a prompt, in the field `prompt`, that alone exceeds the context length.

    With `is_counted` false it has at least `num_prompt` tokens.
    """
    return ContextLengthError(
        _START + "your {field} resulted in {least}{num_prompt} tokens. "
        "Please reduce the length of the {field}.",
        field=prompt,
        least="" if is_counted else "at least ",
        num_prompt=num_prompt,
        context_length=context_length,
    )


class QueueEstimate(Frozen):
    """Seconds until a request that comes now would start, and that it would delay later ones.

    None if no pace is known.
    """

    wait_s: float | None
    turn_s: float | None


def check_queue(
    config: SchedulerConfig,
    num_requests: int,
    num_tokens: int,
    num_own: int,
    outlook: QueueEstimate,
) -> None:
    """Refuse a request of `num_own` tokens if too much waits before it.

    Its caller may come back when half of that has started: the queue then has room, and work.

    Raises:
        OverloadedError: too many requests wait, or too many tokens.
    """
    is_full = num_requests >= config.max_waiting_requests
    if is_full:
        found, limit = f"{num_requests} requests wait", config.max_waiting_requests
    elif num_requests and num_tokens + num_own > config.max_waiting_tokens:
        found, limit = f"{num_tokens + num_own} tokens would wait", config.max_waiting_tokens
    else:
        return
    room_s = None if outlook.wait_s is None else outlook.wait_s / 2
    raise OverloadedError(
        f"The queue is full: {found}, and at most {limit} may. Try again later.",
        room_s=room_s,
        turn_s=outlook.turn_s,
        is_full=is_full,
    )


def check_deadline(request: Request, waited_s: float, outlook: QueueEstimate) -> None:
    """Refuse a request whose turn will not come in time.

    Raises:
        OverloadedError: what waits before it takes too long.
    """
    left_s = min(request.start_within_s, request.left_s) - waited_s
    if outlook.wait_s and outlook.wait_s > left_s > 0:
        raise OverloadedError(
            f"The work that waits takes about {outlook.wait_s:.1f} s, and this request may wait "
            f"{left_s:.1f} s. Try again later.",
            room_s=outlook.wait_s - left_s,
            turn_s=outlook.turn_s,
        )
