"""Searches the options of a server, and the size of a fleet, for a load with latency objectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec.structs import replace

from twostroke.core.errors import MemoryLimitError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.lab.measure.requests import COMPLETED, Objectives
from twostroke.lab.simulator.gain import (
    MIN_SHARE_GAIN,
    MIN_TAIL_GAIN,
    expected_gain,
    objective_ratios,
)
from twostroke.lab.simulator.machine_speed import MachineSpeed, recorded_speed, slowed
from twostroke.lab.simulator.simulation import simulate
from twostroke.lab.simulator.sweep import DEFAULT_GOOD_SHARE, check_objectives

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twostroke.lab.simulator.gain import Gain
    from twostroke.lab.simulator.load import Workload
    from twostroke.lab.simulator.simulation import Simulation, SimulationSetup

# The values that are tried for each option; none of these options can change an answer.
_TOKEN_BUDGETS: Final = (32, 64, 128, 256, 512, 1024)
_MAX_RUNNING: Final = (2, 4, 8, 16, 32, 64, 128, 256)
INT8: Final = "int8"
_NUM_ROUNDS: Final = 2  # over all options, since one option's best value depends on the others
_NUM_COMPARED: Final = 3  # of the best settings, whose gain is computed for each machine speed
MIN_REQUESTS: Final = 100


class Estimate(Frozen):
    """The figures of a simulated load by which settings are compared.

    Attributes:
        good_share: share of requests that meet the objectives.
        good_per_s: requests per second that meet the objectives.
        ttft_p99_s, tpot_p99_s: 99th percentiles; None without completed requests.
        tail: the largest ratio of a 99th percentile to its objective; above 1 the objective is
            missed.
    """

    good_share: float
    good_per_s: float
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    tail: float

    def is_better_than(self, other: Estimate) -> bool:
        """Whether more requests are good; or about as many, with clearly lower tail latencies."""
        gain = self.good_share - other.good_share
        if abs(gain) > MIN_SHARE_GAIN:
            return gain > 0
        return self.tail < (1 - MIN_TAIL_GAIN) * other.tail

    @property
    def rank(self) -> tuple[float, float]:
        """A sort key: better estimates have a larger rank."""
        return round(self.good_share / MIN_SHARE_GAIN), -self.tail


class OptionChoices(Frozen):
    """Which options a search may change.

    Attributes:
        fixed: options that stay as they are, by field name.
        kv_formats: number formats of keys and values that may be tried; they change answers.
        page_cache_sizes: sizes in bytes of the page cache that may be tried.
        limits: the largest values of options that may be tried, by field name.
    """

    fixed: tuple[str, ...] = ()
    kv_formats: tuple[str, ...] = ()
    page_cache_sizes: tuple[int, ...] = ()
    limits: Mapping[str, int] = {}

    def values(self) -> dict[str, tuple[Any, ...]]:
        """Return the values that may be tried for each option that is not fixed."""
        choices: dict[str, tuple[Any, ...]] = {
            "token_budget": _TOKEN_BUDGETS,
            "max_running": _MAX_RUNNING,
            "kv_format": self.kv_formats,
            "page_cache_size": self.page_cache_sizes,
        }
        for name, limit in self.limits.items():
            values = tuple(value for value in choices[name] if value < limit)
            choices[name] = (*values, limit)
        return {name: values for name, values in choices.items() if name not in self.fixed}


class Advice(Frozen):
    """Settings of a server for a load, with the estimates of the defaults and of these settings.

    Attributes:
        changes: values of options that differ from the defaults, by field name; empty if no setting
            is better beyond the noise.
        default, advised: the estimates on a machine of the median speed.
        best: the changes whose gain has the best low end; equal to `changes` if that low end is
            positive.
        gain: the gain of `best` over the defaults; None if no setting looks better.
        machine: the speeds of the machine for which the gain is computed.
        num_tried: the number of settings that were simulated, including the defaults.
        is_partial: whether the search ended before it had tried all settings.
    """

    changes: dict[str, Any]
    default: Estimate
    advised: Estimate
    best: dict[str, Any]
    gain: Gain | None
    machine: MachineSpeed
    num_tried: int = 0
    is_partial: bool = False


class FleetAdvice(Frozen):
    """The smallest fleet that was found for a load, and its estimate.

    Attributes:
        replicas: the number of servers, with the advised settings.
        prefill_replicas: how many of them only prefill prompts for the others.
        routing: the policy of the router.
        estimate: the figures of the fleet.
        is_enough: whether enough requests meet the objectives.
        is_partial: whether the search ended before a fleet was enough.
    """

    replicas: int
    prefill_replicas: int
    routing: str
    estimate: Estimate
    is_enough: bool
    is_partial: bool = False

    def is_better_than(self, other: FleetAdvice) -> bool:
        """Whether only this fleet is enough, or, if both or none are, it has the better estimate.

        A fleet that is no better at the median speed may be the first that is enough at the lowest
        speed.
        """
        if self.is_enough is not other.is_enough:
            return self.is_enough
        return self.estimate.is_better_than(other.estimate)


def advise(
    setup: SimulationSetup,
    load: Workload,
    objectives: Objectives,
    *,
    choices: OptionChoices | None = None,
    machine: MachineSpeed | None = None,
    watch: Callable[[dict[str, Any], Estimate], None] = lambda _changes, _estimate: None,
    has_time: Callable[[], bool] = lambda: True,
) -> Advice:
    """Search for the options of a server with which most requests meet the objectives.

    The search simulates a machine of the median speed. Then the gains of the best settings are
    computed for all speeds of the machine, and for resampled requests of the load. The setting
    whose gain has the best low end is advised, if even this low end is better than `setup`.

    Args:
        setup: the server with its present settings.
        load: the load, such as a recorded trace.
        objectives: the latency objectives.
        choices: which options may be changed; by default only options that cannot change answers.
        machine: the speeds of the machine; by default from the recorded times of the load.
        watch: called with each tried change and its estimate.
        has_time: called before each further setting; if it returns False, the search ends with the
            best setting so far, whose gain is still computed.

    Raises:
        UsageError: there are no objectives, or too few requests.
    """
    check_objectives(objectives, "trace")
    if len(load.arrivals) < MIN_REQUESTS:
        raise UsageError(
            f"{load.name} has {counted_noun(len(load.arrivals), 'request')}: advice needs at least "
            f"{MIN_REQUESTS}."
        )
    machine = machine or recorded_speed(setup, load)
    trials = _Trials(setup, load, objectives, machine, watch)
    is_partial = not _search(setup, trials, (choices or OptionChoices()).values(), has_time)
    best: dict[str, Any] = {}
    gain: Gain | None = None
    for number, changes in enumerate(trials.best_changes(_NUM_COMPARED)):
        if number and not has_time():
            is_partial = True
            break
        other_gain = trials.gain(changes)
        if gain is None or other_gain.rank > gain.rank:
            best, gain = changes, other_gain
    changes = best if gain is not None and gain.is_beyond_noise else {}
    return Advice(
        changes=changes,
        default=trials.of({}),
        advised=trials.of(changes),
        best=best,
        gain=gain,
        machine=machine,
        num_tried=trials.count,
        is_partial=is_partial,
    )


def _search(
    setup: SimulationSetup,
    trials: _Trials,
    choices: dict[str, tuple[Any, ...]],
    has_time: Callable[[], bool],
) -> bool:
    """Try settings by changing one option after the other from the best setting so far.

    Returns False if the time ended before all settings were tried.
    """
    best: dict[str, Any] = {}
    for _ in range(_NUM_ROUNDS):
        before = best
        for name, values in choices.items():
            for value in values:
                if not has_time():
                    return False
                tried = _with_possible_running(setup, {**best, name: value}, choices)
                changes = _normalized(setup, tried)
                estimate = trials.estimate(changes)
                if estimate is not None and estimate.is_better_than(trials.of(best)):
                    best = changes
        if best == before:
            break
    return True


def _with_possible_running(
    setup: SimulationSetup, changes: dict[str, Any], choices: dict[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Return `changes` with a limit of running requests that the token budget allows.

    Without this, a lower budget could never be tried if the limit of running requests is set.
    """
    token_budget = changes.get("token_budget", setup.batch.token_budget)
    max_running = changes.get("max_running", setup.batch.max_running)
    if "max_running" not in choices or max_running is None or max_running <= token_budget:
        return changes
    return {**changes, "max_running": token_budget}


class _Trials:
    """Simulates a load under changed settings; each setting is simulated only once."""

    def __init__(
        self,
        setup: SimulationSetup,
        load: Workload,
        objectives: Objectives,
        machine: MachineSpeed,
        watch: Callable[[dict[str, Any], Estimate], None],
    ) -> None:
        self._setup = setup
        self._load = load
        self._objectives = objectives
        self._machine = machine
        self._watch = watch
        self._changes: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
        self._estimates: dict[tuple[tuple[str, Any], ...], Estimate | None] = {}
        self._default_ratios: list[np.ndarray] = []
        self.of({})  # the caller gets its errors

    @property
    def count(self) -> int:
        """The number of simulated settings."""
        return len(self._changes)

    def of(self, changes: dict[str, Any]) -> Estimate:
        """Return the estimate of changed settings, which must be possible together."""
        key = tuple(sorted(changes.items()))
        earlier_estimate = self._estimates.get(key)
        if earlier_estimate is not None:
            return earlier_estimate
        setup = changed_setup(self._setup, changes)
        estimate = estimate_load(setup, self._load, self._objectives, self._machine.middle)
        self._estimates[key], self._changes[key] = estimate, changes
        self._watch(changes, estimate)
        return estimate

    def estimate(self, changes: dict[str, Any]) -> Estimate | None:
        """Return the estimate of changed settings; None if they are not possible together."""
        key = tuple(sorted(changes.items()))
        if key in self._estimates:
            return self._estimates[key]
        try:
            return self.of(changes)
        except (UsageError, MemoryLimitError):
            self._estimates[key] = None
            return None

    def best_changes(self, count: int) -> list[dict[str, Any]]:
        """Return up to `count` changes that are better than the default, the best first."""
        default = self.of({})
        better = [
            (estimate, self._changes[key])
            for key, estimate in self._estimates.items()
            if estimate is not None and estimate.is_better_than(default)
        ]
        better.sort(key=lambda trial: trial[0].rank, reverse=True)
        return [changes for _, changes in better[:count]]

    def gain(self, changes: dict[str, Any]) -> Gain:
        """Return the gain of changes over the default, on machines of all speeds."""
        self._default_ratios = self._default_ratios or self._ratios({})
        return expected_gain(self._default_ratios, self._ratios(changes))

    def _ratios(self, changes: dict[str, Any]) -> list[np.ndarray]:
        changed = changed_setup(self._setup, changes)
        all_ratios = []
        for slowness in self._machine.slowness:
            simulation = simulate(*slowed(changed, self._load, slowness))
            all_ratios.append(
                objective_ratios(simulation.logs, _scaled(self._objectives, slowness))
            )
        return all_ratios


def advise_fleet(
    setup: SimulationSetup,
    load: Workload,
    objectives: Objectives,
    *,
    max_replicas: int,
    share: float = DEFAULT_GOOD_SHARE,
    machine: MachineSpeed | None = None,
    watch: Callable[[dict[str, Any], Estimate], bool] = lambda _fleet, _estimate: True,
) -> FleetAdvice:
    """Search for the smallest number of servers with which `share` of requests are good.

    Both routing policies that count work are tried; disaggregation is tried, too, if the speed of
    the link between servers is known. `setup` has the settings of each server. `machine` has the
    speeds of each server. The estimate is for the median speed; a fleet is enough only if it is
    enough at the lowest speed, too. `watch` is called with each tried fleet and its estimate. If it
    returns False, the search ends with the best fleet so far.
    """
    machine = machine or recorded_speed(setup, load)
    routings = ("prefix", "least-work") if setup.cache.prefix_cache else ("least-work",)
    has_link = (setup.link or setup.device.link) is not None and setup.cache.prefix_cache
    best: FleetAdvice | None = None
    for replicas in range(1, max_replicas + 1):
        for prefill_replicas in range(replicas if has_link else 1):
            for routing in routings if replicas - prefill_replicas > 1 else routings[-1:]:
                fleet = {
                    "replicas": replicas,
                    "prefill_replicas": prefill_replicas,
                    "routing": routing,
                }
                servers = replace(setup, **fleet)
                estimate = estimate_load(servers, load, objectives, machine.middle)
                has_time = watch(fleet, estimate)
                is_enough = estimate.good_share >= share
                if is_enough:
                    slow = estimate_load(servers, load, objectives, machine.slowness[-1])
                    is_enough = slow.good_share >= share
                advice = FleetAdvice(replicas, prefill_replicas, routing, estimate, is_enough)
                if best is None or advice.is_better_than(best):
                    best = advice
                if not has_time:
                    return replace(best, is_partial=not best.is_enough)
        if best is not None and best.is_enough:
            break
    assert best is not None, "at least one replica was tried"
    return best


def changed_setup(setup: SimulationSetup, changes: dict[str, Any]) -> SimulationSetup:
    """Return a setup with other values of options of the engine, given by field name."""
    others = ("kv_format", "page_cache_size")
    batch = {name: value for name, value in changes.items() if name not in others}
    changed = replace(setup, batch=replace(setup.batch, **batch))
    if "kv_format" in changes:
        question = replace(setup.question, kv_format=changes["kv_format"])
        changed = replace(changed, question=question)
    if "page_cache_size" in changes:
        changed = replace(changed, page_cache_size=changes["page_cache_size"])
    return changed


def estimate_load(
    setup: SimulationSetup, load: Workload, objectives: Objectives, slowness: float = 1.0
) -> Estimate:
    """Simulate a load, and return the figures by which settings are compared.

    Steps take `slowness` times as long as `setup` predicts; the result has the times of the slower
    machine.
    """
    simulation = simulate(*slowed(setup, load, slowness), _scaled(objectives, slowness))
    return _estimate(simulation, objectives, slowness)


def good_requests(
    setup: SimulationSetup, load: Workload, objectives: Objectives, slowness: float = 1.0
) -> np.ndarray:
    """Simulate a load, and return whether each request meets the objectives: (requests,).

    Steps take `slowness` times as long as `setup` predicts.
    """
    simulation = simulate(*slowed(setup, load, slowness))
    return objective_ratios(simulation.logs, _scaled(objectives, slowness)) <= 1


def _scaled(objectives: Objectives, slowness: float) -> Objectives:
    """Return the objectives divided by `slowness`, for a simulation that `slowed` has changed."""
    limits = (objectives.ttft_s, objectives.tpot_s)
    return Objectives(*(None if limit is None else limit / slowness for limit in limits))


def _estimate(simulation: Simulation, objectives: Objectives, slowness: float) -> Estimate:
    report = simulation.report
    completed = [log.latencies for log in simulation.logs if log.outcome == COMPLETED]
    p99_s: dict[str, float | None] = {}
    for name in ("ttft", "tpot"):
        values = [value for latencies in completed if (value := latencies[name]) is not None]
        p99_s[name] = slowness * float(np.quantile(values, 0.99)) if values else None
    limits = {"ttft": objectives.ttft_s, "tpot": objectives.tpot_s}
    ratios = [
        value / limit
        for name, limit in limits.items()
        if limit is not None and (value := p99_s[name]) is not None
    ]
    return Estimate(
        good_share=report.good_share or 0.0,
        good_per_s=(report.good_per_s or 0.0) / slowness,
        ttft_p99_s=p99_s["ttft"],
        tpot_p99_s=p99_s["tpot"],
        tail=max(ratios, default=float("inf")),
    )


def _normalized(setup: SimulationSetup, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the changes that differ from the setup's present values."""
    present: dict[str, Any] = {
        "token_budget": setup.batch.token_budget,
        "kv_format": setup.question.kv_format,
        "page_cache_size": setup.page_cache_size,
    }
    other = {name: value for name, value in changes.items() if value != present.get(name)}
    default = changed_setup(setup, {k: v for k, v in other.items() if k != "max_running"})
    if other.get("max_running") == default.batch.effective_max_running:
        del other["max_running"]
    return other
