"""When waiting requests may start: continuous, dynamic and static batching.

A policy only opens the door; who goes first, who gets which tokens and who must give way is the
scheduler's, the same under every policy. A request that was called once needs no second call, also
when it is preempted.
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
    """What a policy decides on.

    `num_active` requests were called and have not ended, `num_waiting` were not called yet, the
    first of them since `oldest_s`; at least one waits. `is_flushed` says that no more will come.
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
    """Everyone may start at every step."""

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
class Dynamic:
    """A batch starts with `size` requests or `max_wait_s` after the first; none joins it later."""

    size: int
    max_wait_s: float

    def __post_init__(self) -> None:
        """Refuse an empty batch and a time that is none."""
        _check_size(self.size)
        if not (math.isfinite(self.max_wait_s) and self.max_wait_s >= 0):
            reason = f"must be a number of seconds, got {self.max_wait_s!r}."
            raise UsageError(reason, field="max_wait_s")

    @property
    def max_batch(self) -> int | None:
        """The batch's size."""
        return self.size

    def num_called(self, queue: Queue) -> int:
        """A batch, once the last one is done and this one is full or has waited long enough."""
        return min(queue.num_waiting, self.size) if self.wait_s(queue) == 0 else 0

    def wait_s(self, queue: Queue) -> float | None:
        """What is left of the first one's waiting time."""
        if queue.num_active:
            return None
        if queue.num_waiting >= self.size or queue.is_flushed:
            return 0.0
        return max(0.0, queue.oldest_s + self.max_wait_s - queue.now_s)


@dataclass(frozen=True, slots=True)
class Static:
    """A batch starts with `size` requests, after a flush with fewer; none joins it later."""

    size: int

    def __post_init__(self) -> None:
        """Refuse an empty batch."""
        _check_size(self.size)

    @property
    def max_batch(self) -> int | None:
        """The batch's size."""
        return self.size

    def num_called(self, queue: Queue) -> int:
        """A batch, once the last one is done and this one is full."""
        return min(queue.num_waiting, self.size) if self.wait_s(queue) == 0 else 0

    def wait_s(self, queue: Queue) -> float | None:
        """Never by time alone."""
        if queue.num_active:
            return None
        return 0.0 if queue.num_waiting >= self.size or queue.is_flushed else None


def make_policy(options: BatchOptions) -> Policy:
    """Return the policy that `options.policy` names; the options have checked the name."""
    policies: dict[str, Policy] = {
        "continuous": Continuous(),
        "dynamic": Dynamic(options.batch_size, options.max_wait_s),
        "static": Static(options.batch_size),
    }
    return policies[options.policy]


def _check_size(size: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UsageError(f"must be an integer of at least 1, got {size!r}.", field="batch_size")
