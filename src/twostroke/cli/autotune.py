"""`twostroke serve --autotune`: tunes options that cannot change answers, by a recorded trace."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.cli.live_tuning import MIN_GOOD_SHARE, TUNED_FLAGS, LiveTuner, estimate_text
from twostroke.cli.options import check_effect, is_given_by_user
from twostroke.cli.tuning_search import MAX_REQUESTS, TuningQuestion, simulation_setup
from twostroke.core.errors import Field, TwostrokeError, UsageError
from twostroke.core.message_text import counted_noun
from twostroke.core.recorded_trace import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from twostroke.cli.live_tuning import TunableEngine
    from twostroke.core.options import EngineOptions
    from twostroke.lab.measure.requests import Objectives
    from twostroke.lab.simulator import SimulationSetup
    from twostroke.lab.simulator.advice import Estimate
    from twostroke.lab.simulator.load import Workload
    from twostroke.server.options import Objective

_MIN_REQUESTS: Final = 125  # of the trace, if simulations are slow, such as of an overload
_MAX_SIMULATION_S: Final = 0.5  # more requests are taken only if their simulation takes less
_MAX_SEARCH_S: Final = 15.0  # then the gain of the best setting so far is computed
_PROGRESS_INTERVAL_S: Final = 5.0
_logger = logging.getLogger("twostroke.serve")


class Autotune:
    """Chooses options of an engine from recorded traffic: before it starts, and while it serves.

    Attributes:
        is_live: whether the server records the trace, so that it is tuned while it serves.
    """

    def __init__(
        self,
        model: str,
        trace: Path,
        objectives: Objectives,
        *,
        is_live: bool = False,
        interval_s: float | None = None,
    ) -> None:
        """Tune an engine of `model` by a recorded trace; `interval_s` is for a live tuner."""
        self.is_live = is_live
        self._interval_s = interval_s
        self._model = model
        self._trace = trace
        self._objectives = objectives

    def start_options(self, options: EngineOptions) -> tuple[EngineOptions, ServerSettings]:
        """Return the options to start an engine with, and the limits of its first steps.

        The limits are the token budget of a step and the maximum number of running requests.

        An engine that is tuned while it serves gets memory for the larger of the tuned and the
        usual limits, so that the tuner can return to the usual limits. An engine whose steps cannot
        be simulated is not tuned while it serves.
        """
        if self.is_live and (
            options.compute.backend not in {"auto", "cpu"} or options.parallel.num_ranks > 1
        ):
            self.is_live = False
            _logger.info(
                "Autotune: the options stay while the server runs, since only steps of the backend "
                "cpu without ranks are simulated."
            )
        tuned = autotuned(self._model, options, self._trace, self._objectives)
        settings = _settings(tuned)
        if not self.is_live:
            return tuned, settings
        usual_settings = _settings(options)
        room = replace(
            options.batch,
            token_budget=max(settings.token_budget, usual_settings.token_budget),
            max_running=max(settings.max_running, usual_settings.max_running),
        )
        return replace(options, batch=room), settings

    def live_tuner(
        self, engine: TunableEngine, usual_options: EngineOptions, settings: ServerSettings
    ) -> LiveTuner:
        """Return the tuner of a started engine.

        `usual_options` are the options without tuning, and `settings` the limits from
        `start_options`.
        """
        config = engine.facts.config
        limits = ServerSettings(config.token_budget, config.max_running)
        question = TuningQuestion(
            model=self._model,
            options=usual_options,
            trace=str(self._trace),
            objectives=self._objectives,
            present=_within(settings, limits),
            usual=_within(_settings(usual_options), limits),
            limits=limits,
            fixed=fixed_options(),
        )
        return LiveTuner(engine, question, self._interval_s)


def autotune_of(values: dict[str, Any], *, is_alone: bool) -> Autotune:
    """Return the tuner of a `serve` command with --autotune.

    `values` has the command's parameters; `is_alone` says whether one model is served.

    Raises:
        UsageError: several models are served, or there is no objective for TTFT or TPOT.
    """
    trace: Path = values["autotune"]
    if not is_alone:
        raise UsageError(
            "needs one model: leave out {other}.", field="autotune", other=Field("models")
        )
    from twostroke.server.observability.objectives import parse_objective

    objectives = _objectives([parse_objective(text) for text in values["objectives"]])
    recorded: Path | None = values["record_trace"]
    is_live = recorded is not None and recorded.resolve() == trace.resolve()
    check_effect("autotune_interval", "record_trace", has_effect=is_live, value=str(trace))
    interval_s = values["autotune_interval"]
    return Autotune(values["model"], trace, objectives, is_live=is_live, interval_s=interval_s)


def fixed_options() -> tuple[str, ...]:
    """Return the options that the user has set, and that the tuner must not change."""
    return tuple(name for name in TUNED_FLAGS if is_given_by_user(name))


def _within(settings: ServerSettings, limits: ServerSettings) -> ServerSettings:
    """Return settings, each at most as high as in `limits`, for which an engine has memory."""
    return ServerSettings(
        token_budget=min(settings.token_budget, limits.token_budget),
        max_running=min(settings.max_running, limits.max_running),
    )


def _settings(options: EngineOptions) -> ServerSettings:
    return ServerSettings(options.batch.token_budget, options.batch.effective_max_running)


def autotuned(
    model: str, options: EngineOptions, trace: Path, objectives: Objectives
) -> EngineOptions:
    """Return engine options with a better token budget and number of streams for recorded traffic.

    Options that the user gave stay. Logs the changes, with the figures that are expected with and
    without them. Without a trace, or if nothing is better, the options stay as they are.
    """
    from twostroke.cli.advise import gain_text
    from twostroke.lab.simulator import read_trace
    from twostroke.lab.simulator.advice import OptionChoices, advise, changed_setup
    from twostroke.lab.simulator.recorded_traces import NEWEST_LINES

    # --record-trace has already made the file, without any line.
    if not trace.exists() or (trace.is_file() and not trace.stat().st_size):
        _logger.info("Autotune: there is no trace %s yet; the options stay.", trace)
        return options
    try:
        load = read_trace(str(trace), newest_lines=NEWEST_LINES).last(MAX_REQUESTS)
        setup = simulation_setup(model, options)
        load = _newest_requests(setup, load, objectives)
        requests = counted_noun(len(load.arrivals), "request", form=",")
        text = "Autotune: simulating the newest %s of %s with other options."
        _logger.info(text, requests, load.name)
        search = _TimedSearch()
        advice = advise(
            setup,
            load,
            objectives,
            choices=OptionChoices(fixed=fixed_options()),
            watch=search.watch,
            has_time=search.has_time,
        )
    except TwostrokeError as error:
        _logger.warning("Autotune: %s The options stay.", error)
        return options
    for note in load.notes:
        _logger.warning("Autotune: %s", note)
    if not advice.changes:
        noise = " beyond the noise" if advice.gain is not None else ""
        text = "Autotune: no other options are better%s for %s: %s."
        _logger.info(text, noise, load.name, estimate_text(advice.default))
        return options
    if advice.advised.good_share < MIN_GOOD_SHARE:
        text = "Autotune: no options are enough for %s: with the best, %s. The options stay."
        _logger.info(text, load.name, estimate_text(advice.advised))
        return options
    changes = ", ".join(f"{TUNED_FLAGS[name]} {value}" for name, value in advice.changes.items())
    expected = (
        f"Expected: {estimate_text(advice.advised)}. Without: {estimate_text(advice.default)}."
    )
    assert advice.gain is not None, "changes have a gain"
    gain = gain_text(advice.gain)
    _logger.info("Autotune: %s, from %s. %s Gain: %s.", changes, load.name, expected, gain)
    return replace(options, batch=changed_setup(setup, advice.changes).batch)


def _newest_requests(setup: SimulationSetup, load: Workload, objectives: Objectives) -> Workload:
    """Return the newest requests of a load: as long a part as can be simulated in half a second."""
    from twostroke.lab.simulator.advice import estimate_load

    newest = load.last(_MIN_REQUESTS)
    while len(newest.arrivals) < len(load.arrivals):
        longer = load.last(2 * len(newest.arrivals))
        start_s = time.monotonic()
        estimate_load(setup, longer, objectives)
        if time.monotonic() - start_s > _MAX_SIMULATION_S:
            break
        newest = longer
    return newest


class _TimedSearch:
    """Limits the time of a search, and logs its progress every few seconds."""

    def __init__(self) -> None:
        self._start_s = self._logged_s = time.monotonic()
        self._num_tried = 0
        self._is_ended = False

    def watch(self, _changes: dict[str, Any], _estimate: Estimate) -> None:
        """Count a setting that was tried, and log the progress every few seconds."""
        self._num_tried += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= _PROGRESS_INTERVAL_S:
            self._logged_s = now_s
            tried = counted_noun(self._num_tried, "setting")
            _logger.info("Autotune: %s tried in %.0f s.", tried, now_s - self._start_s)

    def has_time(self) -> bool:
        """Whether the search may continue; logs it once when the time limit ends the search."""
        is_late = time.monotonic() - self._start_s >= _MAX_SEARCH_S
        if is_late and not self._is_ended:
            self._is_ended = True
            tried = counted_noun(self._num_tried, "setting")
            text = "Autotune: the search ends after %.0f s with %s; checking the best of them."
            _logger.info(text, _MAX_SEARCH_S, tried)
        return not is_late


def _objectives(objectives: Sequence[Objective]) -> Objectives:
    """Return the TTFT and TPOT objectives of requests of the default service tier.

    Raises:
        UsageError: there is no such objective.
    """
    from twostroke.core.request import DEFAULT_SERVICE_TIER
    from twostroke.lab.measure.requests import Objectives
    from twostroke.server.observability.objectives import limits_of

    limits = limits_of(objectives)[DEFAULT_SERVICE_TIER]
    result = Objectives(limits.get("ttft"), limits.get("tpot"))
    if not result:
        reason = "needs an objective for ttft or tpot, such as {other} ttft=0.5."
        raise UsageError(reason, field="autotune", other=Field("objectives"))
    return result
