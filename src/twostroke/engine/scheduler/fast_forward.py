"""Steps that need no decision: each running request gets its next token, and nothing else happens.

Who knows the tokens beforehand, as a simulation does, can count such steps and do them together.
Pages, tokens and the prefix cache are then as `plan` and `commit` would leave them step by step.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.engine.kv_cache import PagePool
    from twostroke.engine.scheduler.request_state import RequestState


def num_quiet(running: Sequence[RequestState], pool: PagePool, most: int) -> int:
    """Return how many of the next steps, at most `most`, are quiet.

    No request waits, reads its prompt, draws its first token, ends, or finds no page for a token.
    None is added or finished meanwhile.
    """
    size, num_groups = pool.page_size, len(pool.groups.windows)
    for ticket in reversed(running):  # the last ones may still read their prompts
        request = ticket.request
        num_tokens = len(request.tokens)
        if num_tokens - request.num_planned != 1 or num_tokens <= request.num_prompt:
            return 0
        if request.end_ids or request.pooling is not None:
            return 0
        most = min(most, ticket.max_len - num_tokens - 1)
    while most > 0 and running:
        ends = [(t.request.num_planned + most, t.request.pages[0]) for t in running]
        num_places = sum([max(0, -(-end // size) - len(pages)) for end, pages in ends])
        if num_places * num_groups <= pool.num_available:
            break
        most //= 2
    return max(0, most) if running else 0


def do_quiet(
    running: Sequence[RequestState],
    tokens: Sequence[Sequence[int]],
    page_size: int,
    make_room: Callable[[RequestState], object],
    settle: Callable[[RequestState], None],
) -> None:
    """Do steps that `num_quiet` counts, in which requests draw `tokens`: (requests, steps).

    Pages are taken and settled in the order of the steps, and by rank within each.
    """
    num_steps, starts = len(tokens[0]), [ticket.request.num_computed for ticket in running]
    due: list[tuple[int, int]] = []  # steps, twice, and one more for commits; places of requests
    for place, (ticket, start) in enumerate(zip(running, starts, strict=True)):
        ticket.request.tokens.extend(tokens[place])
        due.append((2 * (-start % page_size), place))
        due.append((2 * (ticket.due_at - start) - 1, place))
    heapq.heapify(due)
    while due[0][0] < 2 * num_steps:
        at, place = due[0]
        ticket, start = running[place], starts[place]
        request, step = ticket.request, at // 2
        if at % 2:
            request.num_computed = request.num_planned = start + step + 1
            settle(ticket)
            at = 2 * (ticket.due_at - start) - 1
        else:
            request.num_computed = request.num_planned = start + step
            make_room(ticket)
            at += 2 * page_size
        heapq.heapreplace(due, (at, place))
    for ticket, start in zip(running, starts, strict=True):
        ticket.request.num_computed = ticket.request.num_planned = start + num_steps
