"""When waiting requests may start: continuous, dynamic and static batching.

A policy only says how many requests may start. Their order, their tokens and preemption are the
scheduler's, the same under every policy. A preempted request needs no second call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from twostroke.core.errors import UsageError

if TYPE_CHECKING:
    from twostroke.core.config import BatchOptions


@dataclass(frozen=True, slots=True)
class Queue:
    """The state that a policy decides on.

    `num_active` requests were called and have not ended; `num_waiting`, at least one, were not
    called yet. The first of these came at `oldest_s`. After a flush no more will come.
    """

    num_waiting: int
    num_active: int
    oldest_s: float
    now_s: float
    is_flushed: bool


class Policy(Protocol):
    """Decides how many of the waiting requests may start."""

    @property
    def max_batch(self) -> int | None:
        """Most requests that are called together, None for any number."""

    def num_called(self, queue: Queue) -> int:
        """How many may start now."""

    def wait_s(self, queue: Queue) -> float | None:
        """Seconds until `num_called` is positive if nothing but time changes; None for never."""


@dataclass(frozen=True, slots=True)
class Continuous:
    """Any request may start at any step."""

    @property
    def max_batch(self) -> int | None:
        """Any number."""
        return None

    def num_called(self, queue: Queue) -> int:
        """All of them."""
        return queue.num_waiting

    def wait_s(self, queue: Queue) -> float | None:  # noqa: ARG002 others look at the queue
        """At once."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Batched:
    """A batch of `size` requests starts at once, and none joins it later.

    After a flush, or `max_wait_s` after its first request if that is given, it starts with fewer.
    """

    size: int
    max_wait_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse an empty batch and an impossible time."""
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            reason = f"must be an integer of at least 1, got {self.size!r}."
            raise UsageError(reason, field="batch_size")
        wait_s = self.max_wait_s
        if wait_s is not None and not (math.isfinite(wait_s) and wait_s >= 0):
            reason = f"must be a number of seconds, got {wait_s!r}."
            raise UsageError(reason, field="max_wait_s")

    @property
    def max_batch(self) -> int | None:
        """The batch's size."""
        return self.size

    def num_called(self, queue: Queue) -> int:
        """A batch, once the last one is done and this one is full or has waited long enough."""
        return min(queue.num_waiting, self.size) if self.wait_s(queue) == 0 else 0

    def wait_s(self, queue: Queue) -> float | None:
        """The rest of the first request's waiting time."""
        if queue.num_active:
            return None
        if queue.num_waiting >= self.size or queue.is_flushed:
            return 0.0
        if self.max_wait_s is None:
            return None
        return max(0.0, queue.oldest_s + self.max_wait_s - queue.now_s)


def make_policy(options: BatchOptions) -> Policy:
    """Return the policy that `options.policy` names; the options have checked the name."""
    policies: dict[str, Policy] = {
        "continuous": Continuous(),
        "dynamic": Batched(options.batch_size, options.max_wait_s),
        "static": Batched(options.batch_size),
    }
    return policies[options.policy]
