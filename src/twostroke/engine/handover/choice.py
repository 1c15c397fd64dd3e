"""Where a prompt is read: the seconds here against those there."""

from __future__ import annotations

from typing import Final

from twostroke.core.frozen import Frozen

# Why a prompt is read here or there; the words of metrics and state.
THERE: Final = "there"  # it takes fewer seconds, or the rule says so
HERE: Final = "here"
SHORT: Final = "short"  # no full page is missing that nobody else brings
GONE: Final = "gone"  # no prefill engine is connected
FULL: Final = "full"  # the pool has no room for more transfers
REASONS: Final = (THERE, HERE, SHORT, GONE, FULL)

_PACE: Final = 50e9  # FLOP/s, until it was measured


class Work(Frozen):
    """What is missing of a prompt: FLOPs to compute it, bytes to fetch it."""

    flops: float
    num_bytes: int


class Here(Frozen):
    """A decode engine: work that waits or is being done, its pace, and streams that it delays."""

    queue_flops: float
    flops_per_s: float
    num_streams: int


class There(Frozen):
    """A prefill engine: work that waits or is being done, its pace, and that of the way."""

    queue_flops: float
    flops_per_s: float
    bytes_per_s: float
    overhead_s: float


def here_s(work: Work, here: Here) -> float:
    """Return the seconds that reading a prompt here costs all requests together.

    The prompt waits for those before it. While it is read, each running stream waits, too.
    """
    pace = here.flops_per_s or _PACE
    return (here.queue_flops + work.flops * (1 + here.num_streams)) / pace


def there_s(work: Work, there: There) -> float:
    """Return the seconds until the pages that another engine computes are here.

    They are fetched while later ones are computed.
    """
    computing_s = (there.queue_flops + work.flops) / (there.flops_per_s or _PACE)
    return max(computing_s, work.num_bytes / there.bytes_per_s) + there.overhead_s


def choose(rule: str, work: Work, here: Here, others: list[There]) -> tuple[int | None, float]:
    """Return which of the `others` reads a prompt, None for none, and its seconds there."""
    seconds = [there_s(work, there) for there in others]
    best = min(range(len(seconds)), key=seconds.__getitem__, default=None)
    if best is None or rule == "never":
        return None, 0.0
    goes = rule == "always" or seconds[best] < here_s(work, here)
    return (best, seconds[best]) if goes else (None, seconds[best])
