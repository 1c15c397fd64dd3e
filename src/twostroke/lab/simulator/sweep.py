"""Searches for the highest load at which most requests meet their latency objectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.errors import Field, UnreachableError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.lab.measure.report_text import format_ms
from twostroke.lab.simulator.simulation import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.lab.measure.requests import Objectives, RunReport
    from twostroke.lab.simulator.load import Workload
    from twostroke.lab.simulator.simulation import Simulation, SimulationSetup

DEFAULT_GOOD_SHARE: Final = 0.9
_MIN_REQUESTS: Final = 100
_MIN_DURATION_RATIO: Final = 10  # time over which requests arrive, to the mean time of a request
_MAX_DOUBLINGS: Final = 20
_MAX_SPEED_RATIO: Final = 1.03  # the search ends when two speeds differ by less


class LoadProbe(Frozen):
    """One load that a sweep has simulated: its speed and rate, and whether it met the objectives.

    A load meets the objectives if enough of its requests do. `speed` multiplies the workload's
    rate.
    """

    speed: float
    rate: float
    meets: bool
    simulation: Simulation


class Sweep(Frozen):
    """The result of a search for the highest load that meets the latency objectives.

    `probes` are all simulated loads by speed; `best` is the highest that met the objectives.
    """

    probes: tuple[LoadProbe, ...]
    best: LoadProbe

    @property
    def warning(self) -> str:
        """A warning that the best run is too short to be reliable; empty if it is long enough."""
        report = self.best.simulation.report
        count, mean_s = report.num_requests, report.latencies["e2e"].mean
        duration_s = (count - 1) / self.best.rate
        if count >= _MIN_REQUESTS and duration_s >= _MIN_DURATION_RATIO * mean_s:
            return ""
        return (
            "The run is too short for a reliable result: "
            f"{counted_noun(count, 'request', form=',')} arrive within {duration_s:.3g} s, and "
            f"each takes {mean_s:.3g} s. Use at least {_MIN_REQUESTS} requests that arrive over "
            f"{_MIN_DURATION_RATIO} times the time of one request, so that queues have time to "
            "grow."
        )


def sweep(
    setup: SimulationSetup,
    load: Workload,
    objectives: Objectives,
    share: float = DEFAULT_GOOD_SHARE,
    watch: Callable[[LoadProbe], None] = lambda _: None,
) -> Sweep:
    """Search for the highest load at which `share` of the requests meet the objectives.

    At such a load the number of unfinished requests must not grow. `watch` gets each simulated
    load.

    Raises:
        UsageError: there are no objectives, or requests meet them at every speed.
        UnreachableError: requests miss them at every speed.
    """
    check_objectives(objectives)
    probes: list[LoadProbe] = []

    def watch_all(probe: LoadProbe) -> None:
        probes.append(probe)
        watch(probe)

    low, high = search_loads(
        setup, load, objectives, share=share, max_ratio=_MAX_SPEED_RATIO, watch=watch_all
    )
    if low is None:
        report = probes[-1].simulation.report
        missed = ", ".join(_missed_objectives(report, objectives))
        raise UnreachableError(
            f"Even at {probes[-1].rate:.2g} requests/s only {report.good_share:.0%} meet the "
            f"objectives{f' ({missed})' if missed else ''}: raise them, or take faster devices."
        )
    if high is None:
        raise UsageError(
            "All requests meet the objectives even if they arrive at the same time: use more than "
            f"{len(load.arrivals):,}."
        )
    probes.sort(key=lambda probe: probe.speed)
    return Sweep(tuple(probes), max((p for p in probes if p.meets), key=lambda p: p.speed))


def search_loads(
    setup: SimulationSetup,
    load: Workload,
    objectives: Objectives,
    *,
    share: float,
    max_ratio: float,
    watch: Callable[[LoadProbe], None],
) -> tuple[float | None, float | None]:
    """Return (highest good speed, lowest bad speed) of a workload; a speed multiplies its rate.

    At a good speed, `share` of the requests meet the objectives; at a bad speed fewer do, or the
    queue grows. The bad speed is at most `max_ratio` times the good speed. The first result is None
    if no speed is good, the second if no speed is bad. `watch` gets each simulated load.
    """
    if not 0 < share <= 1:
        raise UsageError(f"must be above 0 and at most 1, got {share}.", field="share")

    def meets(speed: float) -> bool:
        changed = load.changed(speed=speed)
        simulation = simulate(setup, changed, objectives)
        report = simulation.report
        meets_objectives = (report.good_share or 0.0) >= share and not report.is_growing
        watch(LoadProbe(speed, changed.rate, meets_objectives, simulation))
        return meets_objectives

    low, high = _bracketing_speeds(meets)
    while low is not None and high is not None and high / low > max_ratio:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low, high


def check_objectives(objectives: Objectives, field: str = "sweep") -> None:
    """Raise UsageError if there are no objectives, which the option `field` needs."""
    if not objectives:
        facts = {"ttft": Field("ttft_s"), "tpot": Field("tpot_s")}
        raise UsageError("needs an objective: {ttft}, {tpot} or both.", field=field, **facts)


def _missed_objectives(report: RunReport, objectives: Objectives) -> Iterator[str]:
    """Yield a clause about each latency objective that the 90th percentile misses."""
    for name, limit_s in (("ttft", objectives.ttft_s), ("tpot", objectives.tpot_s)):
        latency = report.latencies.get(name)
        p90_s = latency.percentiles["p90"].value if latency else 0.0
        if limit_s is not None and p90_s > limit_s:
            times = f"{p90_s / limit_s:,.2f} times the objective"
            yield f"P90 of {name.upper()} is {format_ms(p90_s)} ms, {times}"


def _bracketing_speeds(meets: Callable[[float], bool]) -> tuple[float | None, float | None]:
    """Return (a good speed, a bad speed) of the workload, between which the limit lies.

    `meets` says whether a speed, a factor on the workload's rate, is good. The bad speed, at which
    `meets` is false, is double the good speed. The first is None if no speed is good, the second if
    no speed is bad.
    """
    speed = 1.0
    factor = 2.0 if meets(speed) else 0.5
    if factor < 1 and not meets(factor**_MAX_DOUBLINGS):  # even if each request runs alone
        return None, speed
    for _ in range(_MAX_DOUBLINGS):
        before, speed = speed, speed * factor
        if meets(speed) is (factor < 1):
            return (speed, before) if factor < 1 else (before, speed)
    return (None, speed) if factor < 1 else (speed, None)
