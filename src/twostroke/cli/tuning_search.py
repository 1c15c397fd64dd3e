"""The program that looks for better options of a running server, in a process of low priority.

Its standard input is a `TuningQuestion` in JSON. Each line of its standard output is a
`TuningAnswer`; the last complete line counts, even if the program was killed after a time limit.
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
    """The input of a search: a running server, and the trace that it records.

    Attributes:
        model: the model's name or path.
        options: the options of the engine at its start.
        trace: the path of the trace.
        objectives: the latency objectives.
        present: the current settings of the server.
        usual: the settings that the server would have without the tuner.
        changed_s: the Unix time in seconds at which the server got its current settings; 0 if it
            has had them since its start.
        limits: the largest values for which the engine has memory.
        fixed: the names of options that must not change.
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
    """The result of a search: advice for a running server, and a judgement of its settings.

    Attributes:
        num_requests: the number of the trace's requests on which the advice is based.
        num_measured: the number of completed requests that arrived under the current settings.
        measured_share: the share of the measured requests that met the objectives.
        measured_gain: `measured_share` minus the share that is estimated for the same requests with
            the usual settings; None if the current settings are the usual settings, or if there are
            too few requests.
        default, advised: the estimates with the current and with the advised settings.
        changes: the advised changes; empty if no setting is better beyond the noise.
        gain: the gain of the advised over the current settings; None if nothing was compared.
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
    """Return the advice for a server, based on the newest requests of its trace.

    Before the search, `emit` is called with an answer that only judges the current settings.

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
    """Requests of a trace that arrived after the server got its current settings.

    Only completed requests are compared with a simulation, since other requests have no times. The
    simulation has all requests, because each of them took time in the engine's steps.

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
        """Return the measured share minus the share of good requests in simulations of `setup`.

        Positive values mean that the server's current settings are better than `setup`.
        `machine` has the speeds of this machine to simulate. The result is an interval, with its
        expected value.
        """
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
    """Return the setup to simulate a server on this machine with these engine options.

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
    """Read a `TuningQuestion` from standard input, and write answers to standard output."""
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
