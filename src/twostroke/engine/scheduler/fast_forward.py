"""Performs several decode steps at once, for a simulation that knows the tokens beforehand.

In such steps every running request gets its next token and nothing else happens: no request waits,
prefills, ends or lacks a page. Afterwards pages, tokens and the prefix cache are exactly as calling
`plan` and `commit` for each step would have left them.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.engine.kv_cache import PagePool
    from twostroke.engine.scheduler.request_state import RequestState


def num_fast_forward_steps(running: Sequence[RequestState], pool: PagePool, max_steps: int) -> int:
    """Return how many of the next decode steps a simulation can perform at once.

    The result is at most `max_steps`; 0 if the next step needs the scheduler. In these steps no
    running request prefills, samples its first token, ends, or fails to get a page. The caller
    guarantees that no request waits, and adds or ends no request meanwhile.
    """
    page_size = pool.page_size
    num_groups = len(pool.groups.windows)
    num_steps = max_steps
    for state in reversed(running):  # the last requests are the likeliest to prefill still
        request = state.request
        num_tokens = len(request.tokens)
        if num_tokens - request.num_planned != 1 or num_tokens <= request.num_prompt:
            return 0
        if request.end_ids or request.pooling is not None:
            return 0
        num_steps = min(num_steps, state.max_len - num_tokens - 1)
    while num_steps > 0 and running:
        num_new_pages = 0
        for state in running:
            num_tokens = state.request.num_planned + num_steps
            num_new_pages += max(0, -(-num_tokens // page_size) - len(state.request.pages[0]))
        if num_new_pages * num_groups <= pool.num_available:
            break
        num_steps //= 2
    return max(0, num_steps) if running else 0


def fast_forward(
    running: Sequence[RequestState],
    tokens: Sequence[Sequence[int]],
    page_size: int,
    *,
    allocate_page: Callable[[RequestState], object],
    update_pages: Callable[[RequestState], None],
) -> None:
    """Perform several decode steps at once, for a simulation that knows the sampled tokens.

    `tokens` has the sampled tokens, shaped (requests, steps). `num_fast_forward_steps` must have
    allowed this number of steps. Pages are allocated and published in the order of the steps and,
    within a step, of the running requests. `allocate_page` allocates a request's next page in each
    cache group. `update_pages` publishes full pages in the prefix cache and releases pages that
    have left a sliding window.
    """
    num_steps = len(tokens[0])
    starts = [state.request.num_computed for state in running]
    # Events by time. A time is twice the step for the allocation of a page before the step, and
    # one more for the publication of pages after the step. The second value indexes `running`.
    events: list[tuple[int, int]] = []
    for index, (state, start) in enumerate(zip(running, starts, strict=True)):
        state.request.tokens.extend(tokens[index])
        events.append((2 * (-start % page_size), index))
        events.append((2 * (state.update_at - start) - 1, index))
    heapq.heapify(events)
    while events[0][0] < 2 * num_steps:
        time, index = events[0]
        state = running[index]
        start = starts[index]
        request = state.request
        step = time // 2
        if time % 2:
            request.num_computed = request.num_planned = start + step + 1
            update_pages(state)
            time = 2 * (state.update_at - start) - 1
        else:
            request.num_computed = request.num_planned = start + step
            allocate_page(state)
            time += 2 * page_size
        heapq.heapreplace(events, (time, index))
    for state, start in zip(running, starts, strict=True):
        state.request.num_computed = state.request.num_planned = start + num_steps
