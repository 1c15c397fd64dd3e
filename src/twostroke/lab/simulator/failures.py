"""Failures of simulated replicas: their rates, their random times, and episodes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec.structs import replace

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen, check_range

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGINE: Final = "engine"  # the engine's process dies, and its server starts another one
REPLICA: Final = "replica"  # the machine, or the server's process, is gone at once
SPOT: Final = "spot"  # the provider takes the machine back after a notice
FAILURE_KINDS: Final = (ENGINE, REPLICA, SPOT)
_MAX_TIME_S: Final = 1e12
_MAX_WAIT_S: Final = 3600.0


class Failure(Frozen):
    """A failure of a simulated replica.

    Attributes:
        at_s: when it happens, in seconds since the start of the load.
        replica: the index of the replica.
        kind: `ENGINE`, `REPLICA` or `SPOT`.
        down_s: seconds from the end of the process or the machine until its successor answers.
        notice_s: seconds from the notice, at `at_s`, to the end of a spot machine.
    """

    at_s: float
    replica: int
    kind: str
    down_s: float
    notice_s: float = 0.0

    @property
    def lost_s(self) -> float:
        """When the process or the machine ends."""
        return self.at_s + self.notice_s

    @property
    def back_s(self) -> float:
        """When its successor answers."""
        return self.lost_s + self.down_s


class RouterTimes(Frozen):
    """The times of the router that decide how requests end after a failure.

    Attributes:
        detection_s: seconds until the router notices that a machine is gone.
        wait_s: seconds that a request waits for a replica, as `route --wait`.
        resume_wait_s: seconds that a stream waits for a replica that continues it, as
            `route --resume-wait`; 0: it ends with an error.
    """

    detection_s: float = 2.0
    wait_s: float = 5.0
    resume_wait_s: float = 60.0

    def __post_init__(self) -> None:
        """Raise UsageError, with the field, if a time is out of range."""
        check_range(self, "detection_s", "wait_s", "resume_wait_s", low=0, high=_MAX_WAIT_S)


class FailureRates(Frozen):
    """How often replicas fail, and how long their restarts take.

    Failures are independent, at random times. A time between failures is the mean time that one
    replica runs before it fails in this way; None: it never does.

    Attributes:
        mtbf_s: time between failures of a machine or of its server.
        engine_mtbf_s: time between deaths of an engine process.
        spot_mtbf_s: time between losses of a spot machine.
        num_spot: number of replicas on spot machines, the last ones; None for all, if
            `spot_mtbf_s` is given.
        cold_start_s: from the end of a machine until its successor answers requests.
        engine_start_s: from the death of an engine until the next engine computes.
        notice_s: from the notice of a spot loss to the end of the machine.
    """

    mtbf_s: float | None = None
    engine_mtbf_s: float | None = None
    spot_mtbf_s: float | None = None
    num_spot: int | None = None
    cold_start_s: float = 120.0
    engine_start_s: float = 10.0
    notice_s: float = 120.0

    def __post_init__(self) -> None:
        """Raise UsageError, with the field, if a value is out of range."""
        check_range(self, "mtbf_s", "engine_mtbf_s", "spot_mtbf_s", high=_MAX_TIME_S)
        check_range(self, "cold_start_s", "engine_start_s", high=_MAX_TIME_S)
        check_range(self, "notice_s", low=0, high=_MAX_TIME_S)
        check_range(self, "num_spot", low=0, high=1 << 20)

    @property
    def never_fail(self) -> bool:
        """Whether no rate is given."""
        return self.mtbf_s is self.engine_mtbf_s is self.spot_mtbf_s is None

    def is_spot(self, index: int, num_replicas: int) -> bool:
        """Whether a replica is on a spot machine."""
        if self.spot_mtbf_s is None:
            return False
        return self.num_spot is None or index >= num_replicas - self.num_spot

    def mtbf_of(self, index: int, num_replicas: int) -> dict[str, float]:
        """Return the mean seconds between failures of a replica, by kind."""
        spot_mtbf_s = self.spot_mtbf_s if self.is_spot(index, num_replicas) else None
        by_kind = {ENGINE: self.engine_mtbf_s, REPLICA: self.mtbf_s, SPOT: spot_mtbf_s}
        return {kind: mtbf_s for kind, mtbf_s in by_kind.items() if mtbf_s is not None}

    def failures_per_s(self, num_replicas: int) -> float:
        """Return the number of failures per second of replicas that all run."""
        return sum(
            1 / mtbf_s
            for index in range(num_replicas)
            for mtbf_s in self.mtbf_of(index, num_replicas).values()
        )

    def failure(self, kind: str, at_s: float, replica: int) -> Failure:
        """Return a failure of this kind, with the times of its restart."""
        down_s = self.engine_start_s if kind == ENGINE else self.cold_start_s
        return Failure(at_s, replica, kind, down_s, self.notice_s if kind == SPOT else 0.0)


def random_failures(
    rates: FailureRates, num_replicas: int, duration_s: float, rng: np.random.Generator
) -> tuple[Failure, ...]:
    """Return random failures of replicas within a duration, in the order of their times.

    Each replica runs for an exponentially distributed time, fails, and runs again after its
    restart.
    """
    failures: list[Failure] = []
    for index in range(num_replicas):
        mtbf_of = rates.mtbf_of(index, num_replicas)
        if not mtbf_of:
            continue
        per_s = np.array([1 / mtbf_s for mtbf_s in mtbf_of.values()])
        kinds, total_per_s = list(mtbf_of), float(per_s.sum())
        at_s = float(rng.exponential()) / total_per_s
        while at_s < duration_s:
            kind = kinds[int(rng.choice(len(kinds), p=per_s / total_per_s))]
            failures.append(rates.failure(kind, at_s, index))
            at_s = failures[-1].back_s + float(rng.exponential()) / total_per_s
    return tuple(sorted(failures, key=lambda failure: failure.at_s))


class Episode(Frozen):
    """Failures that are so close together that the later ones meet the effects of the earlier ones.

    Attributes:
        failures: with times since the first of them.
        duration_s: from the first failure to the end of the last restart.
        num_down: the most replicas that are down, or have got notice, at the same time.
    """

    failures: tuple[Failure, ...]
    duration_s: float
    num_down: int

    @property
    def stratum(self) -> tuple[int, ...]:
        """The replicas that are down at the same time, and the kinds of failures."""
        kinds = [failure.kind for failure in self.failures]
        return self.num_down, *(int(kind in kinds) for kind in FAILURE_KINDS)


def find_episodes(failures: Sequence[Failure], settle_s: float) -> list[Episode]:
    """Divide failures, in the order of their times, into episodes.

    The next episode begins at least `settle_s` after all replicas of the last one are back.
    """
    groups: list[list[Failure]] = []
    end_s = -np.inf
    for failure in failures:
        if failure.at_s > end_s + settle_s:
            groups.append([])
        groups[-1].append(failure)
        end_s = max(end_s, failure.back_s)
    return [_episode(group) for group in groups]


def _episode(failures: Sequence[Failure]) -> Episode:
    begin_s = failures[0].at_s
    changes = [(failure.at_s, 1) for failure in failures]
    changes += [(failure.back_s, -1) for failure in failures]
    num_down = np.cumsum([change for _, change in sorted(changes)]).max()
    moved = [replace(failure, at_s=failure.at_s - begin_s) for failure in failures]
    duration_s = max(failure.back_s for failure in moved)
    return Episode(tuple(moved), duration_s, int(num_down))


def share_of_time_short(failures: Sequence[Failure], num_spare: int, duration_s: float) -> float:
    """Return the share of a duration in which more than `num_spare` replicas are down."""
    changes = [(failure.lost_s, 1) for failure in failures]
    changes += [(failure.back_s, -1) for failure in failures]
    changes.sort()
    short_s, num_down, since_s = 0.0, 0, 0.0
    for at_s, change in changes:
        if num_down > num_spare:
            short_s += min(at_s, duration_s) - min(since_s, duration_s)
        num_down += change
        since_s = at_s
    return short_s / duration_s


def check_failures(failures: Sequence[Failure], num_replicas: int) -> None:
    """Raise UsageError if a failure names a replica or a kind that does not exist."""
    for failure in failures:
        if failure.kind not in FAILURE_KINDS or not 0 <= failure.replica < num_replicas:
            reason = f"There is no {failure.kind!r} failure of replica {failure.replica}."
            raise UsageError(f"{reason} Kinds: {', '.join(FAILURE_KINDS)}.")
