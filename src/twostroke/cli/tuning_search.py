"""The program that looks for better options of a running server, in a process of low priority.

Its standard input is a `TuningQuestion` in JSON. Each line of its standard output is a
`TuningAnswer`; the last one counts, also if the program is killed for its time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping  # noqa: TC003 - msgspec reads it
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.options import EngineOptions  # noqa: TC001 - msgspec reads it
from twostroke.core.recorded_trace import ServerSettings  # noqa: TC001 - msgspec reads it
from twostroke.lab.measure.requests import Objectives  # noqa: TC001 - msgspec reads it
from twostroke.lab.simulator.advice import Estimate  # noqa: TC001 - msgspec reads it
from twostroke.lab.simulator.gain import Gain, Interval  # noqa: TC001 - msgspec reads them

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.core.recorded_trace import TracedRequest
    from twostroke.lab.simulator import RequestArrival, SimulationSetup
    from twostroke.lab.simulator.machine_speed import MachineSpeed
    from twostroke.lab.simulator.recorded_traces import RecordedTrace

MAX_REQUESTS = 1000  # of the trace, the newest ones
MIN_MEASURED = 100  # completed requests, before the present settings are judged


class TuningQuestion(Frozen):
    """A running server, and the trace that it records.

    Attributes:
        model: the model's name or path.
        options: the options of the engine at its start.
        trace: the path of the trace.
        objectives: the latency objectives.
        present: the settings of the server now.
        usual: the settings that the server has without changes of the tuner.
        changed_s: when the server got its present settings, in seconds of Unix time; 0 if these
            are the settings of its start.
        limits: the largest values that the engine has room for.
        fixed: options that stay as they are.
        search_s: the seconds after which the search ends with the best setting so far.
    """

    model: str
    options: EngineOptions
    trace: str
    objectives: Objectives
    present: ServerSettings
    usual: ServerSettings
    limits: ServerSettings
    fixed: tuple[str, ...] = ()
    changed_s: float = 0.0
    search_s: float = 1e9


class TuningAnswer(Frozen):
    """The advice for a running server, and how its present settings did.

    Attributes:
        num_requests: the requests of the trace that the advice is for.
        num_measured: completed requests that arrived under the present settings.
        measured_share: the share of these that met the objectives.
        measured_gain: this share, less the share that is estimated for the same requests with the
            usual settings; None if these are the present settings, or for too few requests.
        default, advised: the estimates with the present and with the advised settings.
        changes: the advised changes; empty if no setting is better beyond the noise.
        gain: the gain of the changes.
        num_tried: the number of settings that were simulated.
        is_partial: whether the search ended before it had tried all settings.
        notes: sentences about the parts of the trace that were not used.
        error: the reason why there is no advice.
    """

    num_requests: int = 0
    num_measured: int = 0
    measured_share: float = 0.0
    measured_gain: Interval | None = None
    default: Estimate | None = None
    advised: Estimate | None = None
    changes: Mapping[str, Any] = {}
    gain: Gain | None = None
    num_tried: int = 0
    is_partial: bool = False
    notes: tuple[str, ...] = ()
    error: str = ""


def answer(
    question: TuningQuestion, emit: Callable[[TuningAnswer], None] = lambda _: None
) -> TuningAnswer:
    """Return the advice for a server by the newest requests of its trace.

    `emit` gets the answer before the search, which only judges the present settings.

    Raises:
        TwostrokeError: the trace cannot be read, has too few requests, or has times that no
            simulation reaches.
    """
    from twostroke.lab.simulator.advice import OptionChoices, advise
    from twostroke.lab.simulator.machine_speed import recorded_speed

    end_s = time.monotonic() + question.search_s
    recorded = _read_newest_requests(Path(question.trace))
    load = recorded.workload(Path(question.trace).name).last(MAX_REQUESTS)
    setup = simulation_setup(
        question.model, _with_settings(question, question.present), remeasure=False
    )
    machine = recorded_speed(setup, load)
    if machine.is_out_of_range:
        raise UsageError(
            "The recorded times are less than half or more than twice the simulated ones, so "
            "nothing is tuned: run `twostroke plan MODEL --calibrate`, with nothing beside it."
        )
    served_requests = _ServedRequests(question, recorded)
    gain = None
    if question.usual != question.present and served_requests.num_completed >= MIN_MEASURED:
        usual_setup = replace(setup, batch=_with_settings(question, question.usual).batch)
        gain = served_requests.gain_over(usual_setup, machine)
    judgement = TuningAnswer(
        num_requests=len(load.arrivals),
        num_measured=served_requests.num_completed,
        measured_share=served_requests.measured_share,
        measured_gain=gain,
        is_partial=True,
        notes=load.notes,
    )
    emit(judgement)
    advice = advise(
        setup,
        load,
        question.objectives,
        choices=OptionChoices(question.fixed, limits=msgspec.structs.asdict(question.limits)),
        machine=machine,
        has_time=lambda: time.monotonic() < end_s,
    )
    return replace(
        judgement,
        default=advice.default,
        advised=advice.advised,
        changes=advice.changes,
        gain=advice.gain,
        num_tried=advice.num_tried,
        is_partial=advice.is_partial,
    )


def _read_newest_requests(path: Path) -> RecordedTrace:
    """Return the newest requests of a trace that may have any size."""
    from twostroke.lab.simulator.recorded_traces import NEWEST_LINES, read_recorded_trace

    try:
        return read_recorded_trace(path, newest_lines=NEWEST_LINES)
    except OSError as error:
        raise UsageError(f"{path.name} cannot be read: {error.strerror}.") from None


class _ServedRequests:
    """Requests of a trace that arrived after the server got its present settings.

    Only completed requests are compared: the others have no times. The others are simulated as
    well, because they took time of the steps.

    Attributes:
        num_completed: the number of completed requests.
    """

    def __init__(self, question: TuningQuestion, recorded: RecordedTrace) -> None:
        self._objectives = question.objectives
        pairs: list[tuple[TracedRequest, RequestArrival]] = []
        if recorded.settings == question.present and recorded.num_with_settings:
            count = min(recorded.num_with_settings, MAX_REQUESTS)
            all_pairs = zip(recorded.requests[-count:], recorded.arrivals()[-count:], strict=True)
            changed_s = question.changed_s + recorded.shift_s
            pairs = [
                (request, arrival)
                for request, arrival in all_pairs
                if not question.changed_s or request.arrival_s >= changed_s
            ]
        pairs.sort(key=lambda pair: pair[0].arrival_s)
        self._arrivals = [arrival for _, arrival in pairs]
        self._are_completed = np.array([_is_completed(request) for request, _ in pairs], bool)
        completed = [request for request, _ in pairs if _is_completed(request)]
        self._are_good = np.array([_is_good(request, self._objectives) for request in completed])
        self.num_completed = len(completed)

    @property
    def measured_share(self) -> float:
        """The share of the completed requests that met the objectives."""
        return float(np.mean(self._are_good)) if self.num_completed else 0.0

    def gain_over(self, setup: SimulationSetup, machine: MachineSpeed) -> Interval:
        """Return this share, less the share of the same requests in simulations of a setup."""
        from twostroke.lab.simulator.advice import good_requests
        from twostroke.lab.simulator.gain import measured_gain
        from twostroke.lab.simulator.load import sorted_workload

        load = sorted_workload("served", self._arrivals)
        estimated = [
            good_requests(setup, load, self._objectives, slowness)[self._are_completed]
            for slowness in machine.slowness
        ]
        return measured_gain(estimated, self._are_good)


def simulation_setup(
    model: str, options: EngineOptions, *, remeasure: bool = True
) -> SimulationSetup:
    """Return the simulation of a server of this machine with these options of its engine.

    With `remeasure` the machine's limits are measured again, which slows other programs down.
    """
    from twostroke.cli.planning import correction_of
    from twostroke.lab import planner
    from twostroke.lab.simulator import SimulationSetup

    threads = options.compute.num_threads
    device = planner.this_machine(threads, remeasure=remeasure)
    planned = planner.load_planned_model(model)
    kv_format = options.cache.kv_format
    if kv_format == "auto":
        kv_format = planner.default_kv_format(is_here=True)
    return SimulationSetup(
        model=planned,
        device=device,
        question=planner.Question(kv_format=kv_format),
        cache=options.cache,
        batch=options.batch,
        calibration=correction_of(planned, device, threads),
        is_here=True,
    )


def _with_settings(question: TuningQuestion, settings: ServerSettings) -> EngineOptions:
    batch = replace(question.options.batch, **msgspec.structs.asdict(settings))
    return replace(question.options, batch=batch)


def _is_completed(request: TracedRequest) -> bool:
    has_times = request.ttft_s is not None and request.e2e_s is not None
    return request.outcome == "completed" and has_times


def _is_good(request: TracedRequest, objectives: Objectives) -> bool:
    """Whether a completed request met the objectives."""
    assert request.ttft_s is not None
    assert request.e2e_s is not None
    num_further = request.output_tokens - 1
    tpot_s = (request.e2e_s - request.ttft_s) / num_further if num_further > 0 else 0.0
    limits = ((request.ttft_s, objectives.ttft_s), (tpot_s, objectives.tpot_s))
    return all(limit_s is None or time_s <= limit_s for time_s, limit_s in limits)


def main() -> None:
    """Answer the question in the standard input."""
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=TuningQuestion)
    last = TuningAnswer()

    def emit(part: TuningAnswer) -> None:
        nonlocal last
        last = part
        _write(part)

    try:
        _write(answer(question, emit=emit))
    except TwostrokeError as error:
        _write(replace(last, error=str(error)))  # the present limits may have been judged


def _write(result: TuningAnswer) -> None:
    # An estimate without completed requests has an infinite tail, which JSON does not have.
    finite = replace(
        result,
        default=_with_finite_tail(result.default),
        advised=_with_finite_tail(result.advised),
    )
    sys.stdout.buffer.write(msgspec.json.encode(finite) + b"\n")
    sys.stdout.buffer.flush()


def _with_finite_tail(estimate: Estimate | None) -> Estimate | None:
    return None if estimate is None else replace(estimate, tail=min(estimate.tail, 1e9))


if __name__ == "__main__":
    main()
