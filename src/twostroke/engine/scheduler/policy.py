"""When waiting requests may start: continuous, dynamic and static batching.

A policy only says when requests may start, and how many together. Their order, their tokens and
preemption are the scheduler's, the same under every policy. Preempted requests start again without
asking the policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from twostroke.core.options import BatchOptions


class Queue(Frozen):
    """The state that a policy decides on.

    `num_active` requests were let start and have not ended; `num_waiting`, at least one, were not.
    The first of these came at `oldest_s`. After a flush no more will come.
    """

    num_waiting: int
    num_active: int
    oldest_s: float
    now_s: float
    is_flushed: bool


class Continuous(Frozen):
    """Any request may start at any step."""

    @property
    def size(self) -> int | None:
        """Most requests that start together; None for any number."""
        return None

    def wait_s(self, queue: Queue) -> float | None:  # noqa: ARG002 others look at the queue
        """Return the seconds until requests may start; None for never."""
        return 0.0


class Batched(Frozen):
    """A batch of `size` requests starts at once, and none joins it later.

    After a flush, or `max_wait_s` after its first request if that is given, it starts with fewer.
    """

    size: int
    max_wait_s: float | None = None

    def wait_s(self, queue: Queue) -> float | None:
        """Return the seconds until a batch may start if only time changes; None for never."""
        if queue.num_active:
            return None
        if queue.num_waiting >= self.size or queue.is_flushed:
            return 0.0
        if self.max_wait_s is None:
            return None
        return max(0.0, queue.oldest_s + self.max_wait_s - queue.now_s)


Policy = Continuous | Batched


def make_policy(options: BatchOptions) -> Policy:
    """Return the policy that `options.policy` names."""
    policies: dict[str, Policy] = {
        "continuous": Continuous(),
        "dynamic": Batched(options.batch_size, options.max_wait_s),
        "static": Batched(options.batch_size, options.fill_timeout_s),
    }
    return policies[options.policy]
