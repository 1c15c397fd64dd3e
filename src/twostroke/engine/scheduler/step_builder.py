"""Collects the slices of a step while it is planned, within the limits of the step.

Rows of a prompt may report log-probabilities (scored rows) or hidden states (pooled rows, for
embeddings). A pooled request samples no token: it ends with its last row.

Batch requests have the lowest service tier. They pause while other requests have prompts to
prefill, and only few of their rows share a step with other requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.request import BATCH_SERVICE_TIER, SERVICE_TIERS, Pooling
from twostroke.core.step import Slice
from twostroke.engine.scheduler.request_state import priority_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.core.request import Request
    from twostroke.engine.scheduler.config import SchedulerConfig
    from twostroke.engine.scheduler.request_state import RequestState


class StepBuilder:
    """The slices of the step that is being planned, and how many rows may be added.

    Attributes:
        budget: number of rows that may still be added.
        scored_rows_left: number of rows that may still report log-probabilities of prompts.
        batch_rows_left: number of rows that batch requests may still have beside other requests;
            None if all running requests are batch requests.
        slices: the slices so far.
        owners: the request state of each slice.
        preempted: requests that lost their pages for this step.
        num_reserved: pages that running requests may still need soon; None if not counted yet.
        urgent: the most urgent request with a prompt to prefill, for which batch requests with a
            larger priority key pause; None if there is none.
    """

    __slots__ = (
        "_first_running",
        "_has_prefill",
        "_paused",
        "batch_rows_left",
        "budget",
        "num_reserved",
        "owners",
        "preempted",
        "scored_rows_left",
        "slices",
        "urgent",
    )

    def __init__(self, budget: int, max_scored_rows: int) -> None:
        self.budget = budget
        self.scored_rows_left = max_scored_rows
        self.batch_rows_left: int | None = None
        self.slices: list[Slice] = []
        self.owners: list[RequestState] = []
        self.preempted: list[Request] = []
        self.num_reserved: int | None = None
        self.urgent: RequestState | None = None
        self._paused: list[tuple[Slice, RequestState]] = []
        self._first_running: RequestState | None = None
        self._has_prefill = False

    def max_rows(self, request: Request, num_rows: int) -> int:
        """Return how many of a request's next rows this step may compute, at most `num_rows`.

        The only limit is `scored_rows_left`, for rows that report log-probabilities of the prompt.
        """
        if request.num_unscored <= self.scored_rows_left:
            return num_rows
        start = request.num_planned
        return min(num_rows, max(start, request.num_scored) - start + self.scored_rows_left)

    def add_slice(self, state: RequestState, count: int) -> None:
        """Add a slice that computes the next `count` tokens of a request."""
        request = state.request
        start = request.num_planned
        num_scored = _num_scored(request, count)
        slice_ = Slice(
            request,
            start,
            count,
            samples=start + count == len(request.tokens) and request.pooling is None,
            num_scored=num_scored,
            num_pooled=_num_pooled(request, count),
        )
        self.slices.append(slice_)
        self.owners.append(state)
        request.num_planned += count
        self.budget -= count
        self.scored_rows_left -= num_scored
        self._has_prefill = True
        self._count_rows(state, count)

    def remove_preempted(self, state: RequestState) -> None:
        """Remove the slice of a preempted request, which has just lost its pages, from the step."""
        self.preempted.append(state.request)
        self.num_reserved = None
        if state in self.owners:
            index = self.owners.index(state)
            self.budget += self.slices[index].count
            self.scored_rows_left += self.slices[index].num_scored
            del self.slices[index], self.owners[index]

    def is_paused(self, state: RequestState) -> bool:
        """Whether a request is an offline batch request that must get no row in this step."""
        if not is_batch_request(state) or state is self._first_running:
            return False
        if self.batch_rows_left == 0:
            return True
        return self.urgent is not None and self.urgent.priority_key < state.priority_key

    def rows_left(self, state: RequestState) -> int:
        """Return how many more rows (tokens) a request may compute in this step."""
        if self.batch_rows_left is None or not is_batch_request(state):
            return self.budget
        return min(self.budget, self.batch_rows_left)

    def pause_batch_requests(
        self,
        running: Sequence[RequestState],
        *,
        prefilling: Sequence[RequestState],
        ready: Sequence[RequestState],
        max_batch_rows: int,
    ) -> None:
        """Remove decode slices of offline batch requests that would slow down other requests.

        If other requests run, at most `max_batch_rows` of these slices stay. None stay if another
        request has a prompt to prefill: a running request in `prefilling`, or a waiting request in
        `ready`. Batch requests with higher priority, and the first running request, are never
        paused, so that no batch request waits forever. All sequences are sorted by priority key.
        """
        if not running or not is_batch_request(running[-1]):
            return
        self._first_running = running[0]
        if not is_batch_request(running[0]):
            self.batch_rows_left = max_batch_rows
        urgent = [state for state in (*prefilling, *ready) if not is_batch_request(state)]
        self.urgent = min(urgent, key=priority_key, default=None)
        if self.batch_rows_left is None and self.urgent is None:
            return
        pairs = list(zip(self.slices, self.owners, strict=True))
        self.slices.clear()
        self.owners.clear()
        for slice_, state in pairs:
            if self.is_paused(state):
                self._paused.append((slice_, state))
                slice_.request.num_planned = slice_.start
            else:
                self._append(slice_, state)

    def resume_batch_requests(self) -> bool:
        """Add the paused batch requests' decode slices again if no prompt could be prefilled.

        Returns whether slices may have been added.
        """
        if self.urgent is None or self._has_prefill:
            return False
        self.urgent = None
        for slice_, state in self._paused:
            # A request that is still running has its pages, too.
            if state.is_running and self.budget and not self.is_paused(state):
                self._append(slice_, state)
                slice_.request.num_planned = slice_.start + slice_.count
                self.budget -= slice_.count
        return True

    def _append(self, slice_: Slice, state: RequestState) -> None:
        self.slices.append(slice_)
        self.owners.append(state)
        self._count_rows(state, slice_.count)

    def _count_rows(self, state: RequestState, count: int) -> None:
        if self.batch_rows_left is not None and is_batch_request(state):
            self.batch_rows_left -= count


def is_batch_request(state: RequestState) -> bool:
    """Whether a request belongs to an offline batch job, by its service tier."""
    return state.request.priority >= SERVICE_TIERS[BATCH_SERVICE_TIER]


def schedulable(running: list[RequestState], config: SchedulerConfig) -> Iterable[RequestState]:
    """Return the running requests that may be in the next step, in the order of `running`.

    If only one step is in flight at a time, these are all running requests. With `steps_ahead`,
    each step in flight gets an equal share of the decoding requests, so that consecutive steps of a
    pipeline take the same time.

    With `samples_ahead`, requests that sample ahead (a step may compute a token that an earlier
    step in flight samples) are in every step. Other requests wait until their sampled tokens are
    known and then continue together, since a step with few rows takes about as long as a step with
    many.
    """
    steps_ahead = config.steps_ahead
    if not steps_ahead:
        return running
    if config.samples_ahead:
        others_are_out = any(map(_awaits_token, running))
        return [
            state
            for state in running
            if state.samples_ahead or _is_ready(state, others_are_out=others_are_out)
        ]
    decoding = [state for state in running if state.request.num_pending < 2]
    share = -(-len(decoding) // (1 + steps_ahead))
    ready = [state for state in decoding if state.request.num_pending]
    later = set(ready[share:])
    return (state for state in running if state.request.num_pending and state not in later)


def _awaits_token(state: RequestState) -> bool:
    """Whether a step in flight samples the next token of a request that cannot sample ahead."""
    request = state.request
    is_out = not request.num_pending and request.num_computed >= request.num_prompt
    return is_out and not state.may_sample_ahead


def _is_ready(state: RequestState, *, others_are_out: bool) -> bool:
    """Whether a running request that does not sample ahead may be in the next step.

    `others_are_out`: whether steps in flight sample tokens of requests that cannot sample ahead.
    Then such a request waits if it has only one pending token, so that all of these requests
    continue in the same step; a request that prefills does not wait.
    """
    waits_for_others = others_are_out and not state.may_sample_ahead
    return state.request.num_pending > (1 if waits_for_others else 0)


def _num_scored(request: Request, count: int) -> int:
    """Return how many of a request's next `count` rows report a prompt token's log-probability.

    Each row of the prompt is scored once: rows computed again after a preemption are not counted.
    The last row of the prompt samples a token instead.
    """
    if not request.num_unscored:
        return 0
    assert request.num_computed <= request.num_scored, "a row was computed without its score"
    end = min(request.num_planned + count, request.num_prompt - 1)
    return max(0, end - max(request.num_planned, request.num_scored))


def _num_pooled(request: Request, count: int) -> int:
    """Return how many of a request's next `count` rows report hidden states, for an embedding.

    These are all rows, or with the pooling "last" only the row of the text's last token. Rows that
    are computed again after a preemption are counted again.
    """
    match request.pooling:
        case None:
            return 0
        case Pooling.MEAN | Pooling.NONE:
            return count
        case Pooling.LAST:
            return int(request.num_planned + count == len(request.tokens))
