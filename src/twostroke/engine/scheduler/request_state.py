"""The scheduler's state of each request: its priority key, and its pages in the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.engine.kv_cache import PrefixChain


class PriorityKey(NamedTuple):
    """The sort key of a request in all queues of the scheduler.

    The request with the smallest key is served first and preempted last.

    Attributes:
        position: `turn`, shifted by the request's priority level.
        turn: the request's own arrival number or, if it overtakes requests of the same
            priority, the arrival number of the first of them.
        virtual_start: start on the virtual clock of fair queueing, in tokens per unit of
            weight.
        has_siblings: whether the request's tenant had other unfinished requests of this
            priority. With equal virtual starts, tenants with a single request go first.
        arrival: the request's own arrival number.
    """

    position: int
    turn: int
    virtual_start: float
    has_siblings: bool
    arrival: int


@dataclass(slots=True, eq=False)
class RequestState:
    """A request in the scheduler: its priority key, and its pages in the prefix cache.

    Attributes:
        priority_key: set when the request is added. It changes only if a later request of the same
            tenant has an earlier deadline: then the two requests exchange keys.
        num_times_overtaken: how many later requests have taken this request's key.
        charged_tokens: tokens that the tenant has been charged for this request so far.
        max_len: number of tokens, prompt included, at which the request ends.
        chain: hash keys of the request's full pages; None without a prefix cache.
        num_published: how many of the request's first pages are in the prefix index.
        num_indexed: how many of the first pages the index had when the request started, in cache
            groups with full attention. Groups with a window may have had fewer.
        publish_at: value of `num_computed` from which the next page is full.
        update_at: value of `num_computed` from which the next page is full or out of a window.
        awaited_key: key of the page for which this request waits, because another request or a KV
            transfer brings it; None if the request waits for no page.
        has_started: whether the request has ever held pages.
        is_running: whether the request holds pages now; otherwise it waits.
        snapshot_pages: for models with recurrent layers, the page counts at which a snapshot is
            kept: 3 means after the first three pages.
        parted_after: how many of the first pages were cached when the request last looked for its
            prefix, if the cache had no snapshot of the recurrent state after them; else 0.
        compared_at: how many requests of the scheduler had started when this waiting request's
            prompt was last compared with the running requests; -1 if it was not compared yet.
        last_snapshot: page key of the newest snapshot after generated tokens.
        may_sample_ahead: whether a step may compute a token that an earlier step in flight samples.
    """

    request: Request
    priority_key: PriorityKey
    max_len: int
    chain: PrefixChain | None
    charged_tokens: float = 0.0
    num_times_overtaken: int = 0
    num_published: int = 0
    num_indexed: int = 0
    publish_at: int = 0
    update_at: int = 0
    awaited_key: bytes | None = None
    snapshot_pages: set[int] = field(default_factory=set)
    parted_after: int = 0
    compared_at: int = -1
    last_snapshot: bytes | None = None
    has_started: bool = False
    is_running: bool = False
    may_sample_ahead: bool = False

    @property
    def samples_ahead(self) -> bool:
        """Whether a step may compute the request's next row although its token is not known.

        An earlier step, which is still in flight, samples that token.
        """
        num_planned = self.request.num_planned
        can_follow = len(self.request.tokens) <= num_planned < self.max_len - 1
        return self.may_sample_ahead and can_follow


def priority_key(state: RequestState) -> PriorityKey:
    """Return a request's priority key, by which all queues are sorted."""
    return state.priority_key
