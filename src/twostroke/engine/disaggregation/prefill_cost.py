"""Where a prompt is read: the seconds here against those there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

# Why a prompt is read here or there; the words of metrics and state.
THERE: Final = "there"  # it takes fewer seconds, or the rule says so
HERE: Final = "here"
SHORT: Final = "short"  # no full page is missing that nobody else brings
GONE: Final = "gone"  # no prefill engine is connected
FULL: Final = "full"  # the pool has no room for more transfers
REASONS: Final = (THERE, HERE, SHORT, GONE, FULL)

OVERHEAD_S: Final = 0.005  # of a transfer, as far as nothing was measured lately
_HALF_S: Final = 10.0  # after which half of what was measured is forgotten
_PACE: Final = 50e9  # FLOP/s, until it was measured
_NEW: Final = 0.2  # share of a new measurement


class MissingPrefill(Frozen):
    """What is missing of a prompt: FLOPs to compute it, bytes to fetch it."""

    flops: float
    num_bytes: int


class LocalPrefill(Frozen):
    """A decode engine: work that waits or is being done, its pace, and the prompt's effect.

    A prompt is read in `num_steps` steps. Each running stream gets a token in each of them, and
    waits for all of the prompt only if it lacks as many: `missing` are the tokens that they lack.
    """

    queue_flops: float
    flops_per_s: float
    num_steps: int = 1
    missing: Sequence[int] = ()


class PrefillEngineState(Frozen):
    """A prefill engine: work that waits or is being done, its pace, and that of the way.

    `overhead_s` is what transfers took beyond these.
    """

    queue_flops: float
    flops_per_s: float
    bytes_per_s: float
    overhead_s: float


def here_s(work: MissingPrefill, here: LocalPrefill, pace: float = _PACE) -> float:
    """Return the seconds that reading a prompt here costs all requests together.

    The prompt waits for those before it. Each running stream waits for the steps that read it.
    """
    delayed = sum(min(1.0, count / here.num_steps) for count in here.missing)
    return (here.queue_flops + work.flops * (1 + delayed)) / (here.flops_per_s or pace)


def there_s(work: MissingPrefill, there: PrefillEngineState, pace: float = _PACE) -> float:
    """Return the seconds until the pages that another engine computes are here.

    They are fetched while later ones are computed.
    """
    computing_s = (there.queue_flops + work.flops) / (there.flops_per_s or pace)
    return max(computing_s, work.num_bytes / there.bytes_per_s) + there.overhead_s


class Overhead:
    """What transfers from an engine take beyond its queue, computing and moving.

    It is forgotten with time: otherwise an engine that was slow once would get no prompt again.
    """

    def __init__(self) -> None:
        self._extra_s = self._at_s = 0.0

    def seconds(self, now_s: float) -> float:
        """Return what the next one may take."""
        left: float = 0.5 ** ((now_s - self._at_s) / _HALF_S)
        return OVERHEAD_S + self._extra_s * left

    def learn(self, expected_s: float, took_s: float, now_s: float) -> None:
        """Take in a transfer that just ended, of which `there_s` had returned `expected_s`."""
        seconds = self.seconds(now_s) + _NEW * (took_s - expected_s)
        self._extra_s, self._at_s = max(0.0, seconds) - OVERHEAD_S, now_s


def choose(
    rule: str, work: MissingPrefill, here: LocalPrefill, others: Sequence[PrefillEngineState]
) -> tuple[int | None, float]:
    """Return which of the `others` reads a prompt, None for none, and its seconds there."""
    paces = here.flops_per_s, *(there.flops_per_s for there in others)
    pace = max(paces) or _PACE  # of an engine that has not read a prompt yet
    seconds = [there_s(work, there, pace) for there in others]
    best = min(range(len(seconds)), key=seconds.__getitem__, default=None)
    if best is None or rule == "never":
        return None, 0.0
    goes = rule == "always" or seconds[best] < here_s(work, here, pace)
    return (best, seconds[best]) if goes else (None, seconds[best])
