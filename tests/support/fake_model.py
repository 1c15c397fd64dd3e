"""A model that costs nothing, and whose tokens show whether every KV page had the right content."""

from __future__ import annotations

from collections import deque
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.request import NO_PAGE, NO_STATE, FinishReason
from twostroke.core.step import StepResult, TokenLogprobs

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.core.draft_tree import DraftBranch
    from twostroke.core.request import Request
    from twostroke.core.step import Slice, StepPlan

    Windows = tuple[int | None, ...]

VOCAB_SIZE = 50
END = 0


class FakeModel:
    """Runs step plans over pages of numbers.

    `two_arithmetics` computes prompt rows and generated rows differently, as some backends do.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        windows: Windows = (None,),
        *,
        two_arithmetics: bool = False,
        num_states: int = 0,
    ) -> None:
        self._states_in_slots: list[tuple[int, int]] = [(-1, 0)] * num_states  # position, hash
        self.two_arithmetics = two_arithmetics
        self.windows = windows
        self._page_size = page_size
        self._slots = [-1] * (num_pages * page_size)
        self._drawn_tokens: dict[
            Request, list[int]
        ] = {}  # each request's newest token, and its place

    def run(self, plan: StepPlan) -> StepResult:
        """Write the plan's rows, then sample; in reverse order, so that slices are independent."""
        written: set[int] = set()
        if self._states_in_slots:
            self._advance_states(plan)
        for slice_ in reversed(plan.slices):
            self._write(slice_, written)
        tokens = [token for slice_ in plan.slices if slice_.samples for token in self._draw(slice_)]
        scores = [score for slice_ in plan.slices for score in self._score(slice_)]
        states = [self._states(slice_) for slice_ in plan.slices if slice_.num_pooled]
        return StepResult(tokens, [None] * len(tokens), scores=scores, states=states)

    def content(self, page: int) -> list[int]:
        """Return the numbers that a page stores."""
        return self._slots[page * self._page_size : (page + 1) * self._page_size]

    def fill(self, page: int, content: Sequence[int]) -> None:
        """Store numbers in all slots of a page."""
        self._slots[page * self._page_size : (page + 1) * self._page_size] = content

    def state(self, slot: int) -> tuple[int, int]:
        """Return the recurrent state in a slot: its position, and a number."""
        return self._states_in_slots[slot]

    def fill_state(self, slot: int, state: tuple[int, int]) -> None:
        """Store a recurrent state in a slot."""
        self._states_in_slots[slot] = state

    def clear(self) -> None:
        """Lose the content of all pages."""
        self._slots = [-1] * len(self._slots)
        self._states_in_slots = [(-1, 0)] * len(self._states_in_slots)

    def _advance_states(self, plan: StepPlan) -> None:
        """Write the recurrent states of each slice from the one that it reads."""
        written = [slot for slice_ in plan.slices for slot in _states_after(slice_)]
        assert len({*written}) == len(written), "two slices write one state"
        assert not {*written} & {slice_.read_state for slice_ in plan.slices}, (
            "a state is overwritten"
        )
        for slice_ in plan.slices:
            request = slice_.request
            assert not slice_.branches, "a recurrent state cannot branch"
            assert len(slice_.draft_states) == len(slice_.drafts), "a draft without a state"
            position, state = 0, _begin(request.salt)
            if slice_.read_state != NO_STATE:
                position, state = self._states_in_slots[slice_.read_state]
            assert position == slice_.start, "a state of another position"
            tokens = request.tokens[slice_.start : slice_.start + slice_.count]
            if slice_.is_blind:
                tokens = [self._drawn_tokens[request][1]]
            for at, token in enumerate(tokens, position):
                state = self._next_state(request, state, at, token)
            position += len(tokens)
            self._states_in_slots[slice_.write_state] = position, state
            for slot, token in zip(slice_.draft_states, slice_.drafts, strict=True):
                state = self._next_state(request, state, position, token)
                position += 1
                self._states_in_slots[slot] = position, state

    def _next_state(self, request: Request, state: int, at: int, token: int) -> int:
        return hash((state, token, self.two_arithmetics and at >= request.num_prompt))

    def _write(self, slice_: Slice, written: set[int]) -> None:
        request = slice_.request
        assert slice_.count > 0, "an empty slice"
        assert slice_.start >= request.num_computed, "a slice that does not continue"
        for branch in slice_.branches:
            self._copy(request, branch)
        firsts = [branch.first for branch in slice_.branches]
        ends = [*firsts, len(slice_.drafts)]
        tokens = request.tokens[slice_.start : slice_.start + slice_.count]
        if slice_.is_blind:
            position, token = self._drawn_tokens[request]
            assert position == slice_.start, "a token that the step before did not draw"
            tokens = [token]
        tokens += slice_.drafts[: ends[0]]
        rows = self._write_run(request, request.pages, slice_.start, tokens, written)
        for branch, end in zip(slice_.branches, ends[1:], strict=True):
            pages = _pages_of(request, branch)
            for before, row in enumerate(reversed(branch.above), 1):
                self._store(pages, branch.position - before, rows[row], written)
            tokens = [*slice_.drafts[branch.first : end]]
            rows += self._write_run(request, pages, branch.position, tokens, written)

    def _copy(self, request: Request, branch: DraftBranch) -> None:
        """Copy the beginning of a branch's first page from the request's page."""
        if not branch.is_copied:
            return
        size, page_index = self._page_size, branch.own_page_index
        for theirs, branch_pages in zip(request.pages, branch.pages, strict=True):
            source, target = (
                theirs[page_index] * size,
                branch_pages[page_index - branch.page_index] * size,
            )
            self._slots[target : target + size] = self._slots[source : source + size]

    def _write_run(
        self,
        request: Request,
        pages: Sequence[Sequence[int]],
        start: int,
        tokens: Sequence[int],
        written: set[int],
    ) -> list[list[int]]:
        """Write rows one after another; return their numbers."""
        rows = []
        for at, token in enumerate(tokens, start):
            seen = [
                [self._slots[slot] for slot in self._slots_of(pages, group, first, at)]
                for group, first in enumerate(_first_read(self.windows, at))
            ]
            is_output = self.two_arithmetics and at >= request.num_prompt
            rows.append(_numbers(request, token, is_output, seen))
            self._store(pages, at, rows[-1], written)
        return rows

    def _store(
        self, pages: Sequence[Sequence[int]], at: int, numbers: list[int], written: set[int]
    ) -> None:
        for group, number in enumerate(numbers):
            (slot,) = self._slots_of(pages, group, at, at + 1)
            assert slot not in written, "two rows write one slot"
            written.add(slot)
            self._slots[slot] = number

    def _draw(self, slice_: Slice) -> list[int]:
        """Sample the token after the newest token, and after each draft."""
        request = slice_.request
        end = slice_.start + slice_.count
        assert end >= len(request.tokens), "a token is drawn from the middle of a request"
        cuts = [0, *(1 + branch.first for branch in slice_.branches), 1 + len(slice_.drafts)]
        tables = [request.pages, *(_pages_of(request, branch) for branch in slice_.branches)]
        starts = [end, *(branch.position + 1 for branch in slice_.branches)]
        drawn_tokens: list[int] = []
        for pages, start, first, after in zip(tables, starts, cuts[:-1], cuts[1:], strict=True):
            for at in range(start, start + after - first):
                seen = [
                    self._slots[slot]
                    for group, low in enumerate(_first_seen(self.windows, at - 1))
                    for slot in self._slots_of(pages, group, low, at)
                ]
                if self._states_in_slots:
                    seen.append(self._states_in_slots[_states_after(slice_)[len(drawn_tokens)]][1])
                drawn_tokens.append(_choose(seen, request.seed))
        self._drawn_tokens[request] = [end, drawn_tokens[0]]
        return drawn_tokens

    def _score(self, slice_: Slice) -> list[TokenLogprobs]:
        """Return the log-probabilities of the prompt's tokens after the rows that are scored."""
        scores = []
        end = slice_.start + slice_.count + (not slice_.samples)
        for at in range(end - slice_.num_scored, end):
            seen = [
                self._slots[slot]
                for group, low in enumerate(_first_seen(self.windows, at - 1))
                for slot in self._slots_of(slice_.request.pages, group, low, at)
            ]
            scores.append(_likelihood(slice_.request, at, seen))
        return scores

    def _states(self, slice_: Slice) -> NDArray[np.float32]:
        """Return hidden states (rows, 1) of the last rows, which identify the rows."""
        end = slice_.start + slice_.count
        slots = self._slots_of(slice_.request.pages, 0, end - slice_.num_pooled, end)
        return np.array([[_state(self._slots[slot])] for slot in slots], np.float32)

    def _slots_of(
        self, pages: Sequence[Sequence[int]], group: int, first: int, end: int
    ) -> list[int]:
        """Return the slots in which a cache group stores the positions `first` to `end` - 1."""
        size = self._page_size
        slots = []
        for at in range(first, end):
            page = pages[group][at // size]
            assert page != NO_PAGE, "a page that is read was given back"
            slots.append(page * size + at % size)
        return slots


class FakePipeline:
    """Pipeline stages with separate memories, whose results must be equal.

    The first stage runs a step when it starts, the last when its result is needed, and the others
    in between.
    """

    def __init__(self, stages: Sequence[FakeModel], rng: random.Random) -> None:
        assert len(stages) > 1
        self.stages = stages
        self._rng = rng
        self._queues: list[deque[tuple[StepPlan, StepResult]]] = [deque() for _ in stages[1:]]

    def start(self, plan: StepPlan) -> None:
        self._queues[0].append((plan, self.stages[0].run(plan)))
        for stage in range(1, len(self._queues)):
            while self._queues[stage - 1] and self._rng.random() < 0.5:
                self._move(stage)

    def finish(self) -> StepResult:
        for stage in range(1, len(self._queues)):
            if not self._queues[stage]:
                self._move(stage)
        plan, before = self._queues[-1].popleft()
        result = self.stages[-1].run(plan)
        _check_same(result, before)
        return result

    def lose(self) -> None:
        """Lose all steps in flight, and the content of all pages."""
        for queue in self._queues:
            queue.clear()
        for stage in self.stages:
            stage.clear()

    def _move(self, stage: int) -> None:
        """Run the oldest step that a middle stage has not run yet."""
        plan, before = self._queues[stage - 1].popleft()
        _check_same(self.stages[stage].run(plan), before)
        self._queues[stage].append((plan, before))


def _check_same(result: StepResult, before: StepResult) -> None:
    assert result.tokens == before.tokens, "stages draw different tokens"
    assert result.scores == before.scores, "stages report different scores"
    for states, earlier in zip(result.states, before.states, strict=True):
        assert (states == earlier).all(), "stages report different states"


def _states_after(slice_: Slice) -> tuple[int, ...]:
    """Return the slots of the states after a slice's last token, and after each of its drafts."""
    return (slice_.write_state, *slice_.draft_states)


def _pages_of(request: Request, branch: DraftBranch) -> list[list[int]]:
    both = zip(request.pages, branch.pages, strict=True)
    return [[*theirs[: branch.page_index], *branch_pages] for theirs, branch_pages in both]


def expected_output(
    request: Request,
    max_len: int,
    windows: Windows = (None,),
    *,
    two_arithmetics: bool = False,
    has_states: bool = False,
) -> tuple[list[int], FinishReason]:
    """Return what the fake model must generate for a new request of at most `max_len` tokens."""
    tokens = list(request.tokens)
    numbers: list[list[int]] = [[] for _ in windows]
    state = _begin(request.salt)
    params = request.params
    if params.max_tokens == 0:
        return [], FinishReason.LENGTH
    if params.max_tokens is not None:
        max_len = min(max_len, len(tokens) + params.max_tokens)
    while True:
        for at in range(len(numbers[0]), len(tokens)):
            first_read = _first_read(windows, at)
            seen = [
                group_numbers[first:]
                for group_numbers, first in zip(numbers, first_read, strict=True)
            ]
            is_output = two_arithmetics and at >= request.num_prompt
            state = hash((state, tokens[at], is_output))
            row = _numbers(request, tokens[at], is_output, seen)
            for group_numbers, number in zip(numbers, row, strict=True):
                group_numbers.append(number)
        first_seen = _first_seen(windows, len(tokens) - 1)
        last = [
            n
            for group_numbers, first in zip(numbers, first_seen, strict=True)
            for n in group_numbers[first:]
        ]
        if has_states:
            last.append(state)
        tokens.append(_choose(last, request.seed))
        output = tokens[request.num_prompt :]
        if output[-1] in request.end_ids and len(output) > params.min_tokens:
            return output, FinishReason.STOP
        if len(tokens) == max_len:
            return output, FinishReason.LENGTH


def expected_scores(request: Request, windows: Windows = (None,)) -> list[TokenLogprobs]:
    """Return the log-probabilities that the fake model must report for a new request's prompt."""
    if request.params.prompt_logprobs is None:
        return []
    numbers: list[list[int]] = [[] for _ in windows]
    scores = []
    for at, token in enumerate(request.prompt[:-1]):
        first_read = _first_read(windows, at)
        seen = [
            group_numbers[first:] for group_numbers, first in zip(numbers, first_read, strict=True)
        ]
        row = _numbers(request, token, False, seen)
        for group_numbers, number in zip(numbers, row, strict=True):
            group_numbers.append(number)
        first_seen = _first_seen(windows, at)
        last = [
            n
            for group_numbers, first in zip(numbers, first_seen, strict=True)
            for n in group_numbers[first:]
        ]
        scores.append(_likelihood(request, at + 1, last))
    return scores


def expected_states(request: Request, windows: Windows = (None,)) -> list[float]:
    """Return the hidden states that the fake model must report for a new request's rows."""
    numbers: list[list[int]] = [[] for _ in windows]
    for at, token in enumerate(request.prompt):
        first_read = _first_read(windows, at)
        seen = [
            group_numbers[first:] for group_numbers, first in zip(numbers, first_read, strict=True)
        ]
        row = _numbers(request, token, False, seen)
        for group_numbers, number in zip(numbers, row, strict=True):
            group_numbers.append(number)
    return [_state(number) for number in numbers[0]]


def _state(number: int) -> float:
    return float(number % 100_003)


def _likelihood(request: Request, at: int, numbers: list[int]) -> TokenLogprobs:
    """Return the log-probability of a position's token after rows that see these numbers."""
    return TokenLogprobs(-(hash((request.tokens[at], *numbers)) % 1000) / 100)


def _first_seen(windows: Windows, at: int) -> list[int]:
    """Return the first position that a row attends to, for each cache group."""
    return [0 if window is None else max(0, at + 1 - window) for window in windows]


def _first_read(windows: Windows, at: int) -> list[int]:
    """Return the first position whose number determines a row's own number."""
    first_seen = zip(windows, _first_seen(windows, at), strict=True)
    return [max(0, at - 1) if window is None else first for window, first in first_seen]


def _numbers(request: Request, token: int, is_output: bool, seen: list[list[int]]) -> list[int]:
    """Return a row's number in each cache group."""
    state = hash((_begin(request.salt), token, is_output, *map(tuple, seen)))
    return [hash((state, group)) for group in range(len(seen))]


@cache
def _begin(salt: bytes) -> int:
    return int.from_bytes(sha256(salt).digest()[:7])


def _choose(numbers: list[int], seed: int) -> int:
    return hash((seed, *numbers)) % VOCAB_SIZE
