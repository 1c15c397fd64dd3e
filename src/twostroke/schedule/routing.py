"""Which of several replicas a request goes to: pure functions of what is known of the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Final

from twostroke.core.frozen import Frozen


class ReplicaView(Frozen):
    """What a router knows of a replica when a request comes.

    `num_tokens` are the tokens of its requests that have not ended, prompts and what was written so
    far. `num_hit` are the tokens of the new prompt that its prefix cache holds.
    """

    num_requests: int
    num_tokens: int
    num_hit: int = 0


# From the number of the request, and the views of at least one replica, to a replica's index.
Route = Callable[[int, Sequence[ReplicaView]], int]


def round_robin(number: int, views: Sequence[ReplicaView]) -> int:
    """Take the replicas in turn."""
    return number % len(views)


def least_work(number: int, views: Sequence[ReplicaView]) -> int:
    """Take the replica with the fewest tokens; in turn, if several have."""
    return _least([view.num_tokens for view in views], number)


def two_choices(number: int, views: Sequence[ReplicaView]) -> int:
    """Take the one with fewer tokens of two random replicas (Mitzenmacher, 2001)."""
    digest = sha256(number.to_bytes(8)).digest()
    first = int.from_bytes(digest[:8]) % len(views)
    other = (first + 1 + int.from_bytes(digest[8:16]) % max(1, len(views) - 1)) % len(views)
    return min((first, other), key=lambda index: views[index].num_tokens)


def prefix(number: int, views: Sequence[ReplicaView]) -> int:
    """Take the replica with the fewest tokens after those that its cache saves are subtracted.

    So a replica that holds a prompt's beginning gets it, unless it is busier by more than that.
    """
    return _least([view.num_tokens - view.num_hit for view in views], number)


ROUTES: Final[dict[str, Route]] = {
    "round-robin": round_robin,
    "least-work": least_work,
    "two-choices": two_choices,
    "prefix": prefix,
}
LOOKS_AT_PREFIXES: Final = frozenset({"prefix"})


def _least(loads: Sequence[int], number: int) -> int:
    """Return the index of the least load, the next from `number` on if there are several."""
    count = len(loads)
    return min(range(count), key=lambda index: (loads[index], (index - number) % count))
