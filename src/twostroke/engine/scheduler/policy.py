"""Batching policies: when waiting requests may start (continuous, dynamic and static batching).

A policy decides only when requests may start and how many start together. The scheduler decides
their order, their tokens and preemption in the same way under every policy. A preempted request
starts again without asking the policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from twostroke.core.options import BatchOptions


class QueueState(Frozen):
    """The state of the queue from which a batching policy decides whether requests start.

    Attributes:
        num_waiting: requests that the policy has not started yet, at least one.
        num_active: requests that the policy has started and that have not ended.
        first_arrival_s: arrival of the first waiting request.
        now_s: the current time, on the same clock.
        is_flushed: whether the caller has said that no more requests will come.
    """

    num_waiting: int
    num_active: int
    first_arrival_s: float
    now_s: float
    is_flushed: bool


class Continuous(Frozen):
    """Continuous batching: any request may start in any step."""

    @property
    def size(self) -> int | None:
        """The maximum number of requests that start together: None, since there is no limit."""
        return None

    def wait_s(self, queue: QueueState) -> float | None:  # noqa: ARG002 - the same interface
        """Return the seconds until waiting requests may start: 0 with continuous batching."""
        return 0.0


class Batched(Frozen):
    """Static or dynamic batching: `size` requests start together, and none joins them later.

    A batch starts with fewer requests after a flush, or `max_wait_s` seconds after its first
    request arrived. With None for `max_wait_s`, it waits without a limit.
    """

    size: int
    max_wait_s: float | None = None

    def wait_s(self, queue: QueueState) -> float | None:
        """Return the seconds until the next batch may start if no further request arrives.

        Returns None if only an event can start it: a running batch ends, or another request
        arrives.
        """
        if queue.num_active:
            return None
        if queue.num_waiting >= self.size or queue.is_flushed:
            return 0.0
        if self.max_wait_s is None:
            return None
        return max(0.0, queue.first_arrival_s + self.max_wait_s - queue.now_s)


Policy = Continuous | Batched


def make_policy(options: BatchOptions) -> Policy:
    """Return the batching policy that `options.policy` names."""
    policies: dict[str, Policy] = {
        "continuous": Continuous(),
        "dynamic": Batched(options.batch_size, options.max_wait_s),
        "static": Batched(options.batch_size, options.fill_timeout_s),
    }
    return policies[options.policy]
