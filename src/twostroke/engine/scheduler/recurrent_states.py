"""The recurrent states of requests: a slot for each step, and snapshots at few page boundaries.

Each step reads the state of a request from one slot and writes it to another, so that a step which
failed, or was undone, can be computed again. The older slot is free once the step is committed.

Snapshots let later requests start after a shared prefix. They are kept

- at the last page boundary before the end of a prompt, where the next turn of a chat continues even
  if the chat template renders the answer differently;
- at the last page boundary before each of the request's `Hints.shared_lengths`: the lengths of
  prefixes that later prompts probably share;
- where two prompts part: after the last page that a later request shares with this one;
- every `SNAPSHOT_TOKENS` tokens, which bounds the number of tokens that a request computes again
  after a shared prefix;
- at the last page boundary that a request has computed, where a longer conversation continues.

Drafts may be refused, so a step with drafts writes a state for each: to a slot after the newest
token and to one after each draft. The commit keeps the slot of the last accepted draft, and the
slot at the last page boundary before it, which may become a snapshot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.errors import MemoryLimitError
from twostroke.core.message_text import counted_noun
from twostroke.core.request import NO_STATE
from twostroke.engine.kv_cache import PrefixHit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.core.options import BatchOptions
    from twostroke.core.request import Request
    from twostroke.core.step import Slice
    from twostroke.engine.kv_cache import PrefixIndex, StatePool
    from twostroke.engine.scheduler.config import SchedulerConfig
    from twostroke.engine.scheduler.request_state import RequestState

SNAPSHOT_TOKENS: Final = 2048
_MAX_RUNNING_SHARE: Final = 0.75  # of the slots that running requests take
_MIN_SNAPSHOT_SHARE: Final = 0.25  # of the slots that drafts leave to snapshots and requests


def slots_per_request(steps_ahead: int) -> int:
    """Return how many slots for recurrent states a running request needs.

    One slot has its current state; each step that may be in flight writes one more.
    """
    return 2 + steps_ahead


def max_running_with(num_slots: int, steps_ahead: int) -> int:
    """Return how many requests may run with `num_slots` slots; a quarter is left for snapshots."""
    return max(1, int(num_slots * _MAX_RUNNING_SHARE) // slots_per_request(steps_ahead))


def hit_with_snapshot(
    index: PrefixIndex, pool: StatePool, keys: list[bytes], hit: PrefixHit
) -> PrefixHit:
    """Shorten a cached prefix to its longest part that ends with a snapshot.

    `keys` are the page keys of the sequence, for which `index` has returned the `hit`.
    """
    num_pages = hit.num_pages
    while True:
        num_pages, slot = pool.longest(keys, num_pages)
        shorter = index.hit(keys[:num_pages])
        if shorter.num_pages == num_pages:
            return PrefixHit(shorter.pages, hit.num_indexed, slot)
        num_pages = shorter.num_pages  # pages of a sliding window are missing


def with_room_for_states(
    config: SchedulerConfig, batch: BatchOptions, num_slots: int
) -> SchedulerConfig:
    """Return a scheduler's limits, with `max_running` lowered to the number of requests with slots.

    `config` has the limits. `num_slots`: slots for recurrent states; 0 for models without such
    states.

    Raises:
        MemoryLimitError: a static or dynamic batch has more requests than there are slots for.
    """
    if not num_slots:
        return config
    max_running = max_running_with(num_slots, config.steps_ahead)
    if batch.policy != "continuous" and batch.batch_size > max_running:
        raise MemoryLimitError(
            f"The recurrent states of {counted_noun(batch.batch_size, 'request')} do not fit into "
            f"memory: lower --batch-size to {max_running}, or raise --kv-memory."
        )
    return replace(config, max_running=min(config.max_running, max_running))


class RecurrentStates:
    """Assigns slots for recurrent states to the slices of steps, and keeps snapshots.

    Attributes:
        pool: the slots.
    """

    def __init__(self, pool: StatePool, page_size: int, num_reserved: int = 0) -> None:
        """Manage the slots of `pool`, for requests with KV pages of `page_size` tokens.

        `num_reserved`: number of slots that running requests may need for steps that are planned
        while a step with drafts is in flight; 0 if no step is planned while another is in flight.
        """
        self.pool = pool
        self._page_size = page_size
        self._pages_between = max(1, SNAPSHOT_TOKENS // page_size)
        self._num_reserved = num_reserved
        # The number of pages of requests whose drafts passed a page boundary, and its slot.
        self._boundary_slots: dict[Request, tuple[int, int]] = {}

    def start(self, state: RequestState, slot: int) -> None:
        """Let a request start from the snapshot in `slot`, or from zeros with `NO_STATE`."""
        request, page_size = state.request, self._page_size
        if slot != NO_STATE:
            assert state.chain is not None
            self.pool.share(slot)
            num_pages = request.num_computed // page_size
            self.pool.use(slot, self.pool.longest_before(state.chain.keys, num_pages))
        request.state_slot = request.planned_state_slot = slot
        state.snapshot_pages |= {(request.num_prompt - 1) // page_size, state.parted_after}
        state.snapshot_pages |= {
            length // page_size
            for length in request.hints.shared_lengths
            if length <= request.num_prompt
        }

    def max_rows(self, state: RequestState, num_rows: int) -> int:
        """Return the number of a request's next rows up to its next snapshot, at most `num_rows`.

        A step must not compute rows past a token after which a snapshot is kept. Without a prefix
        cache there are no snapshots, so the result is `num_rows`.
        """
        if state.chain is None:
            return num_rows
        start, page_size = state.request.num_planned, self._page_size
        first_page = start // page_size + 1
        next_page = -(-first_page // self._pages_between) * self._pages_between
        for page in state.snapshot_pages:
            if first_page <= page < next_page:
                next_page = page
        return min(num_rows, next_page * page_size - start)

    def plan(self, slices: Iterable[Slice]) -> None:
        """Assign each slice of a planned step a slot to read and a slot to write."""
        for slice_ in slices:
            request = slice_.request
            slice_.read_state = request.planned_state_slot
            slice_.write_state = request.planned_state_slot = self.pool.allocate()

    @property
    def num_spare(self) -> int:
        """The number of slots that drafts of the newest planned step may take.

        Drafts leave a quarter of the slots to snapshots, and all slots that requests may need
        before the step is committed.
        """
        pool = self.pool
        num_spare = pool.num_available - int(pool.num_slots * _MIN_SNAPSHOT_SHARE)
        if self._num_reserved:
            num_spare = min(num_spare, pool.num_slots - self._num_reserved - pool.num_extra)
        return max(0, num_spare)

    def add_drafts(self, slice_: Slice) -> None:
        """Give each draft of a slice a slot for the state after it; there must be spare slots."""
        slice_.draft_states = tuple([self.pool.allocate() for _ in slice_.drafts])
        self._count_draft_slots(len(slice_.draft_states))

    def undo(self, slice_: Slice) -> None:
        """Release the slots that a slice of an undone step would have written."""
        self._release_slots((slice_.write_state, *slice_.draft_states))
        self._count_draft_slots(-len(slice_.draft_states))
        slice_.request.planned_state_slot = slice_.read_state

    def commit(self, slices: Iterable[Slice]) -> None:
        """After a step, set each request's current state to the state that the step wrote.

        This is the state after the newest token. If drafts were accepted, `settle` then replaces it
        by the state after the last accepted draft.
        """
        for slice_ in slices:
            if slice_.read_state != NO_STATE:
                self.pool.release(slice_.read_state)
            slice_.request.state_slot = slice_.write_state

    def settle(self, slice_: Slice, last_accepted: int) -> None:
        """Set a request's current state to the state after its last accepted draft.

        `last_accepted` is the index of the draft, or `ROOT` if none was accepted. The other states
        of the step are released, except the state at the last page boundary that the accepted
        drafts passed: `keep_snapshot` may need it.
        """
        request, num_accepted = slice_.request, 1 + last_accepted
        slots = [slice_.write_state, *slice_.draft_states]
        self._count_draft_slots(-len(slice_.draft_states))
        request.state_slot = request.planned_state_slot = slots.pop(num_accepted)
        end = slice_.start + slice_.count  # where the state in the first slot is
        num_pages = (end + num_accepted) // self._page_size
        boundary = num_pages * self._page_size - end
        if 0 <= boundary < num_accepted:
            self._boundary_slots[request] = num_pages, slots.pop(boundary)
        self._release_slots(slots)

    def end_commit(self) -> None:
        """Release the states at page boundaries that `settle` kept and that became no snapshots."""
        if self._boundary_slots:
            self._release_slots([slot for _, slot in self._boundary_slots.values()])
            self._boundary_slots.clear()

    def _count_draft_slots(self, change: int) -> None:
        if self._num_reserved:
            self.pool.num_extra += change

    def _release_slots(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.pool.release(slot)

    def release(self, request: Request) -> None:
        """Release the slot of a request that stops running."""
        if request.state_slot != NO_STATE:
            self.pool.release(request.state_slot)
        request.state_slot = request.planned_state_slot = NO_STATE

    def keep_snapshot(self, state: RequestState) -> None:
        """Keep a request's state as a snapshot, if a page ends at its last computed token.

        If accepted drafts passed the end of a page, the state there is kept. A snapshot after
        generated tokens replaces the request's earlier snapshot after generated tokens, unless
        other requests have used the earlier snapshot.
        """
        request, chain = state.request, state.chain
        num_pages, rest = divmod(request.num_settled, self._page_size)
        slot = request.state_slot
        if rest and request in self._boundary_slots:
            num_pages, slot = self._boundary_slots[request]
            rest = 0
        if rest or chain is None or not 0 < num_pages <= len(chain.keys):
            return
        is_lasting = num_pages in state.snapshot_pages or num_pages % self._pages_between == 0
        is_generated = num_pages * self._page_size > request.num_prompt
        if not is_lasting and not is_generated:
            return
        key = chain.keys[num_pages - 1]
        if self.pool.find(key) != NO_STATE:
            return
        if not is_lasting:
            if state.last_snapshot is not None and not self.pool.is_shared(state.last_snapshot):
                self.pool.drop(state.last_snapshot)
            state.last_snapshot = key
        num_tokens = num_pages * self._page_size
        previous = self.pool.longest_before(chain.keys, num_pages)
        is_shared = num_pages == state.parted_after
        self.pool.keep(slot, key, num_tokens, previous, is_shared=is_shared)
