"""Finds the highest load at which nearly all requests meet their objectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.errors import Field, UnreachableError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.lab.measure.report_text import format_ms
from twostroke.lab.simulator.simulation import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.lab.measure.requests import Objectives, RunReport
    from twostroke.lab.simulator.load import Workload
    from twostroke.lab.simulator.simulation import Setup, Simulation

GOOD_SHARE: Final = 0.9
_ENOUGH_REQUESTS: Final = 100
_ENOUGH_TIMES: Final = 10  # the mean time of a request, for which requests arrive
_MOST_DOUBLINGS: Final = 20
_CLOSE: Final = 1.03  # the search ends when two speeds differ by less


class LoadProbe(Frozen):
    """A load that was tried: its speed, and whether enough requests met the objectives."""

    speed: float
    rate: float
    meets: bool
    simulation: Simulation


class Sweep(Frozen):
    """The loads that were tried, by speed; `best` is the highest that met the objectives."""

    probes: tuple[LoadProbe, ...]
    best: LoadProbe

    @property
    def warning(self) -> str:
        """Why the answer means little; empty if the best run was long enough."""
        report = self.best.simulation.report
        count, mean_s = report.num_requests, report.latencies["e2e"].mean
        lasts_s = (count - 1) / self.best.rate
        if count >= _ENOUGH_REQUESTS and lasts_s >= _ENOUGH_TIMES * mean_s:
            return ""
        return (
            f"This means little: {count:,} requests arrive within {lasts_s:.3g} s there, and each "
            f"takes {mean_s:.3g} s. Take more: at least {_ENOUGH_REQUESTS}, that arrive for "
            f"{_ENOUGH_TIMES} times as long as one takes, so that queues have time to grow."
        )


def sweep(
    setup: Setup,
    load: Workload,
    objectives: Objectives,
    share: float = GOOD_SHARE,
    watch: Callable[[LoadProbe], None] = lambda _: None,
) -> Sweep:
    """Search for the highest speed at which `share` of the requests meet the objectives.

    At a speed that counts, the number of requests at work does not grow.

    Raises:
        UsageError: there are no objectives, or every load meets them.
        UnreachableError: no load does.
    """
    check_objectives(objectives)
    if not 0 < share <= 1:
        raise UsageError(f"must be above 0 and at most 1, got {share}.", field="share")
    probes: list[LoadProbe] = []

    def meets(speed: float) -> bool:
        changed = load.changed(speed=speed)
        found = simulate(setup, changed, objectives)
        enough = (found.report.good_share or 0.0) >= share and not found.report.is_growing
        probes.append(LoadProbe(speed, changed.rate, enough, found))
        watch(probes[-1])
        return enough

    low, high = _bracket(meets)
    if low is None:
        one = probes[-1].simulation.report
        late = ", ".join(_late(one, objectives))
        raise UnreachableError(
            f"Even at {probes[-1].rate:.2g} requests/s only {one.good_share:.0%} meet the "
            f"objectives{f' ({late})' if late else ''}: raise them, or take faster devices."
        )
    if high is None:
        raise UsageError(
            "All requests meet the objectives even if they come at once: take more than "
            f"{len(load.arrivals):,}."
        )
    while high / low > _CLOSE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if meets(middle) else (low, middle)
    probes.sort(key=lambda one: one.speed)
    return Sweep(tuple(probes), max((p for p in probes if p.meets), key=lambda p: p.speed))


def check_objectives(objectives: Objectives) -> None:
    """Refuse a sweep without any."""
    if not objectives:
        facts = {"ttft": Field("ttft_s"), "tpot": Field("tpot_s")}
        raise UsageError("needs an objective: {ttft}, {tpot} or both.", field="sweep", **facts)


def _late(report: RunReport, objectives: Objectives) -> Iterator[str]:
    """Yield which latencies are too long, and by how much."""
    for name, limit_s in (("ttft", objectives.ttft_s), ("tpot", objectives.tpot_s)):
        found = report.latencies.get(name)
        taken_s = found.percentiles["p90"].value if found else 0.0
        if limit_s is not None and taken_s > limit_s:
            times = f"{taken_s / limit_s:,.2f} times the objective"
            yield f"P90 of {name.upper()} is {format_ms(taken_s)} ms, {times}"


def _bracket(meets: Callable[[float], bool]) -> tuple[float | None, float | None]:
    """Return a speed that meets, and twice that, which does not; None for what there is not."""
    speed = 1.0
    factor = 2.0 if meets(speed) else 0.5
    if factor < 1 and not meets(factor**_MOST_DOUBLINGS):  # each request is alone
        return None, speed
    for _ in range(_MOST_DOUBLINGS):
        before, speed = speed, speed * factor
        if meets(speed) is (factor < 1):
            return (speed, before) if factor < 1 else (before, speed)
    return (None, speed) if factor < 1 else (speed, None)
