"""Finds how far a load can grow on given replicas, and which latency objective is missed next."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen
from twostroke.lab.measure.requests import COMPLETED
from twostroke.lab.simulator.sweep import DEFAULT_GOOD_SHARE, check_objectives, search_loads

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.lab.measure.requests import Objectives
    from twostroke.lab.simulator.load import Workload
    from twostroke.lab.simulator.simulation import Simulation, SimulationSetup
    from twostroke.lab.simulator.sweep import LoadProbe

# `LoadLimit.missed` is an objective, or one of these.
QUEUE: Final = "queue"  # enough requests meet the objectives, but the queue grows
REFUSED: Final = "refusals"  # too many requests are refused
_MAX_MULTIPLE_RATIO: Final = 1.05  # the search ends when two loads differ by less


class LoadLimit(Frozen):
    """The highest load, as a multiple of a given one, at which enough requests meet objectives.

    Attributes:
        multiple: the highest good load; 0 if requests miss the objectives at every load, infinity
            if they meet them even if all arrive at the same time.
        missed: the objective that is missed at the next higher load: "ttft", "tpot", `QUEUE` or
            `REFUSED`; empty if there is none.
        today: the simulation of the given load.
    """

    multiple: float
    missed: str
    today: Simulation


def find_load_limit(
    setup: SimulationSetup,
    load: Workload,
    objectives: Objectives,
    share: float = DEFAULT_GOOD_SHARE,
    watch: Callable[[LoadProbe], None] = lambda _: None,
) -> LoadLimit:
    """Search for the highest multiple of a load at which `share` of requests meet the objectives.

    `watch` gets each simulated load.

    Raises:
        UsageError: there are no objectives.
    """
    check_objectives(objectives)
    probes: list[LoadProbe] = []

    def watch_all(probe: LoadProbe) -> None:
        probes.append(probe)
        watch(probe)

    low, high = search_loads(
        setup, load, objectives, share=share, max_ratio=_MAX_MULTIPLE_RATIO, watch=watch_all
    )
    today = next(probe.simulation for probe in probes if probe.speed == 1.0)
    if high is None:
        return LoadLimit(math.inf, "", today)
    failed = next(probe for probe in reversed(probes) if probe.speed == high)
    if low is None:  # the slowest load failed, too
        failed = min(probes, key=lambda probe: probe.speed)
    missed = missed_objective(failed.simulation, objectives, share)
    return LoadLimit(low or 0.0, missed, today)


def missed_objective(simulation: Simulation, objectives: Objectives, share: float) -> str:
    """Return why a simulated load is too high: "ttft", "tpot", `QUEUE` or `REFUSED`.

    It is `REFUSED` if fewer than `share` of the requests were completed; `QUEUE` if enough requests
    meet the objectives, but the number of unfinished requests grows; and otherwise the objective
    that the fewest requests meet.
    """
    logs = simulation.logs
    completed = [log.latencies for log in logs if log.outcome == COMPLETED]
    if len(completed) < share * len(logs):
        return REFUSED
    limits = {"ttft": objectives.ttft_s, "tpot": objectives.tpot_s}
    counts = {
        name: sum((latencies[name] or 0.0) <= limit_s for latencies in completed)
        for name, limit_s in limits.items()
        if limit_s is not None
    }
    missed = min(counts, key=counts.__getitem__)
    is_met = (simulation.report.good_share or 0.0) >= share
    return QUEUE if is_met and simulation.report.is_growing else missed
