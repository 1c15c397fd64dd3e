"""`serve --autotune` while the server runs: changes, their effect, and the way back."""

from __future__ import annotations

import json
import logging
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from support.tiny import write_tiny_gguf
from support.waiting import wait_for
from twostroke.backends import machine_limits
from twostroke.cli import live_tuning, tuning_search
from twostroke.cli.autotune import Autotune
from twostroke.cli.live_tuning import LiveTuner
from twostroke.cli.tuning_search import TuningAnswer, TuningQuestion
from twostroke.core.errors import UsageError
from twostroke.core.options import ComputeOptions, EngineOptions, ParallelOptions
from twostroke.core.recorded_trace import ServerSettings
from twostroke.lab.measure.requests import Objectives
from twostroke.lab.simulator import advice, machine_speed, recorded_traces
from twostroke.lab.simulator.advice import Estimate
from twostroke.lab.simulator.gain import Gain, Interval
from twostroke.lab.simulator.machine_speed import MachineSpeed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

USUAL, TUNED = ServerSettings(512, 256), ServerSettings(512, 8)
QUESTION = TuningQuestion(
    model="tiny",
    options=EngineOptions(),
    trace="trace",
    objectives=Objectives(0.5, 0.05),
    present=USUAL,
    usual=USUAL,
    limits=USUAL,
)


def estimate(share: float) -> Estimate:
    return Estimate(share, 1.0, 0.4, 0.03, 0.8)


ADVICE = TuningAnswer(
    num_requests=1000,
    default=estimate(0.6),
    advised=estimate(0.9),
    changes={"max_running": 8},
    gain=Gain(Interval(0.3, 0.2, 0.4), None, None),
)


class Engine:
    """Notes its limits."""

    def __init__(self) -> None:
        self.limits: list[tuple[int, int]] = []
        self.facts: Any = SimpleNamespace(config=SimpleNamespace())

    def change_limits(self, token_budget: int, max_running: int) -> None:
        self.limits.append((token_budget, max_running))


class Loop:
    """Calls functions at once."""

    def call_soon_threadsafe(self, function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def tuner(engine: Engine) -> Any:
    tuner = LiveTuner(engine, QUESTION)
    tuner.start(Loop())  # type: ignore[arg-type]
    yield tuner
    tuner.close()


def test_better_limits_are_applied_and_logged(
    tuner: LiveTuner, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        tuner.take(ADVICE)
    assert engine.limits == [(512, 8)]
    assert "--max-running 8 from now on, from the newest 1,000 requests" in caplog.text
    assert "Expected: 90.0% meet the objectives" in caplog.text
    assert "Without: 60.0% meet the objectives" in caplog.text
    assert "+30.0 points (+20.0 to +40.0)" in caplog.text


def test_limits_stay_without_advice_and_under_an_overload(tuner: LiveTuner, engine: Engine) -> None:
    tuner.take(replace(ADVICE, changes={}, gain=None))
    tuner.take(replace(ADVICE, advised=estimate(0.4)))
    tuner.take(TuningAnswer(error="trace has 3 requests: advice needs at least 100."))
    assert engine.limits == []


def test_limits_that_stay_are_logged_with_their_estimate(
    tuner: LiveTuner, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        tuner.take(replace(ADVICE, changes={}, gain=None))
    assert "the limits stay, by the newest 1,000 requests: 60.0% meet the objectives" in caplog.text


def test_the_best_of_a_search_that_ended_early_is_applied_and_marked(
    tuner: LiveTuner, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        tuner.take(replace(ADVICE, is_partial=True, num_tried=7))
    assert engine.limits == [(512, 8)]
    assert "1,000 requests (in part: the search ended after 7 settings). Expected" in caplog.text


def test_notes_about_the_trace_are_logged_once(
    tuner: LiveTuner, caplog: pytest.LogCaptureFixture
) -> None:
    note = "trace: only its newest 20,000 lines are read."
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            tuner.take(replace(ADVICE, changes={}, gain=None, notes=(note,)))
    assert caplog.text.count(note) == 1


@pytest.mark.parametrize(
    ("share", "noise", "count", "limits"),
    [
        (0.62, 0.1, 300, [(512, 8), (512, 256)]),  # worse than without, by more than chance
        (0.62, 0.2, 300, [(512, 8)]),  # by chance
        (0.95, 0.1, 300, [(512, 8)]),
        (0.10, 0.1, 99, [(512, 8)]),  # too few requests
    ],
)
def test_limits_are_taken_back_if_fewer_requests_are_good(
    tuner: LiveTuner,
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
    share: float,
    noise: float,
    count: int,
    limits: list[tuple[int, int]],
) -> None:
    tuner.take(ADVICE)
    gain = share - 0.75
    no_advice = TuningAnswer(
        num_requests=1000,
        num_measured=count,
        measured_share=share,
        measured_gain=Interval(gain, gain - noise, gain + noise),
    )
    with caplog.at_level(logging.INFO):
        tuner.take(no_advice)
    assert engine.limits == limits
    is_judged = (
        f"{share:.1%} of {count} completed requests met the objectives; without, 75.0%"
        in caplog.text
    )
    assert is_judged is (count >= 100)
    tuner.take(ADVICE)  # what was taken back is not tried again
    assert engine.limits[: len(limits)] == limits
    assert engine.limits[-1] == limits[-1]


def test_an_engine_with_more_room_begins_with_the_tuned_limits(engine: Engine) -> None:
    tuner = LiveTuner(engine, replace(QUESTION, present=TUNED))
    tuner.start(Loop())  # type: ignore[arg-type]
    tuner.close()
    assert engine.limits == [(512, 8)]


def write_trace(path: Path, settings: ServerSettings, count: int, first_s: float = 0.0) -> None:
    header = {"recorded_trace": 1, "block_tokens": 16}
    fields = {"token_budget": settings.token_budget, "max_running": settings.max_running}
    lines = [json.dumps({**header, "settings": fields})]
    lines += [
        json.dumps(
            {
                "arrival_s": first_s + 0.5 * number,
                "prompt_tokens": 30,
                "output_tokens": 9,
                "ttft_s": 0.1 if number % 4 else 0.9,
                "e2e_s": 1.0,
            }
        )
        for number in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")


def test_a_search_measures_the_present_settings_and_estimates_the_usual_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_speed, "recorded_speed", lambda *_: MachineSpeed())
    model, trace = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "trace"
    write_trace(trace, TUNED, 120)
    question = replace(
        QUESTION, model=str(model), trace=str(trace), present=TUNED, objectives=Objectives(0.5)
    )
    answer = tuning_search.answer(question)
    assert (answer.num_requests, answer.num_measured) == (120, 120)
    assert answer.measured_share == 0.75
    assert answer.measured_gain is not None
    assert not answer.is_partial
    same = tuning_search.answer(replace(question, present=USUAL))
    assert same.measured_gain is None
    assert same.num_measured == 0


def test_a_search_without_time_judges_and_gives_the_best_setting_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_speed, "recorded_speed", lambda *_: MachineSpeed())
    model, trace = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "trace"
    write_trace(trace, TUNED, 120)
    question = replace(
        QUESTION,
        model=str(model),
        trace=str(trace),
        present=TUNED,
        objectives=Objectives(0.5),
        search_s=0.0,
    )
    emitted: list[TuningAnswer] = []
    answer = tuning_search.answer(question, emit=emitted.append)
    assert (answer.is_partial, answer.num_tried) == (True, 1)
    assert answer.default == answer.advised
    (judgement,) = emitted  # before the search
    assert judgement.measured_gain == answer.measured_gain is not None
    assert (judgement.is_partial, judgement.default) == (True, None)


def test_the_newest_part_of_a_long_trace_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_speed, "recorded_speed", lambda *_: MachineSpeed())
    monkeypatch.setattr(recorded_traces, "MAX_REQUESTS", 200)
    monkeypatch.setattr(recorded_traces, "NEWEST_LINES", 150)
    model, trace = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "trace"
    write_trace(trace, TUNED, 300)
    question = replace(
        QUESTION,
        model=str(model),
        trace=str(trace),
        present=TUNED,
        objectives=Objectives(0.5),
        search_s=0.0,
    )
    answer = tuning_search.answer(question)
    assert (answer.num_requests, answer.num_measured) == (150, 150)
    assert answer.notes == ("trace: only its newest 150 lines are read.",)


def test_only_completed_requests_that_arrived_after_the_change_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_speed, "recorded_speed", lambda *_: MachineSpeed())
    model, trace = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "trace"
    write_trace(trace, TUNED, 120)
    lost = {"prompt_tokens": 30, "output_tokens": 1}
    with trace.open("a") as file:
        for number, outcome in enumerate(("cancelled", "failed") * 20):
            file.write(json.dumps({**lost, "arrival_s": 60 + number, "outcome": outcome}) + "\n")
    counted: list[int] = []

    def all_good(_setup: Any, load: Any, *_: Any) -> np.ndarray:
        are_completed = np.array([arrival.recorded_e2e_s is not None for arrival in load.arrivals])
        counted.append(len(load.arrivals))
        return are_completed  # an estimate that counts the other requests is below 1

    monkeypatch.setattr(advice, "good_requests", all_good)
    question = replace(
        QUESTION,
        model=str(model),
        trace=str(trace),
        present=TUNED,
        objectives=Objectives(0.5),
        search_s=0.0,
    )
    answer = tuning_search.answer(question)
    assert (answer.num_measured, answer.measured_share) == (120, 0.75)
    assert answer.measured_gain is not None
    assert answer.measured_gain.expected == -0.25
    later = tuning_search.answer(replace(question, changed_s=10.0))
    assert (later.num_measured, later.measured_share) == (100, 0.75)
    num_speeds = len(MachineSpeed().slowness)
    assert counted == [160] * num_speeds + [140] * num_speeds
    last = tuning_search.answer(replace(question, changed_s=10.1))
    assert (last.num_measured, last.measured_gain) == (99, None)


def test_the_times_of_a_change_follow_a_clock_that_jumped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_speed, "recorded_speed", lambda *_: MachineSpeed())
    model, trace = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "trace"
    pause_s = 5 * 86_400.0
    write_trace(trace, USUAL, 3)
    text = trace.read_text()
    write_trace(trace, TUNED, 120, first_s=pause_s)
    trace.write_text(text + trace.read_text())
    question = replace(QUESTION, model=str(model), trace=str(trace), present=TUNED, search_s=0.0)
    answer = tuning_search.answer(replace(question, changed_s=pause_s - 1))
    assert answer.num_measured == 120
    answer = tuning_search.answer(replace(question, changed_s=pause_s + 9.9))
    assert answer.num_measured == 100


def test_times_that_no_simulation_reaches_tune_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = MachineSpeed((0.9, 1.0, 1.2, 2.0, 2.2), 500)
    monkeypatch.setattr(machine_speed, "recorded_speed", lambda *_: far)
    model, trace = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "trace"
    write_trace(trace, USUAL, 120)
    with pytest.raises(UsageError, match="plan MODEL --calibrate"):
        tuning_search.answer(replace(QUESTION, model=str(model), trace=str(trace)))


def test_a_reason_is_logged_once(tuner: LiveTuner, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for error in ("A.", "A.", "B."):
            tuner.take(TuningAnswer(error=error))
    texts = [record.getMessage() for record in caplog.records]
    assert texts[-2:] == ["Autotune: A.", "Autotune: B."]


@pytest.mark.parametrize(
    ("options", "is_live"),
    [
        (EngineOptions(), True),
        (EngineOptions(compute=ComputeOptions(backend="gpu")), False),
        (EngineOptions(parallel=ParallelOptions(tensor=2)), False),
    ],
)
def test_engines_that_are_not_simulated_are_not_tuned_while_they_serve(
    options: EngineOptions, is_live: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    autotune = Autotune("tiny", tmp_path / "none", Objectives(0.5), is_live=True)
    with caplog.at_level(logging.INFO):
        autotune.start_options(options)
    assert autotune.is_live is is_live
    assert ("only steps of the backend cpu" in caplog.text) is not is_live


def test_a_search_uses_the_limits_of_the_machine_that_were_measured_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_speed, "recorded_speed", lambda *_: MachineSpeed())
    model, trace = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "trace"
    write_trace(trace, USUAL, 120)
    question = replace(QUESTION, model=str(model), trace=str(trace), search_s=0.0)
    tuning_search.answer(question)  # measures the machine if nothing has

    def refuse(*_: Any) -> float:
        raise AssertionError("the machine is measured beside the server")

    monkeypatch.setattr(machine_limits, "measure_bandwidth", refuse)
    monkeypatch.setattr(machine_limits, "measure_peak", refuse)
    assert tuning_search.answer(question).num_measured == 120


def test_a_search_that_is_killed_for_its_time_still_judges(
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worse = TuningAnswer(
        num_measured=300, measured_share=0.5, measured_gain=Interval(-0.2, -0.3, -0.1)
    )
    search = tmp_path / "search"
    text = msgspec.json.encode(worse).decode()
    search.write_text(
        f"#!/bin/sh\ncat > /dev/null\necho '{text}'\nprintf '{{\"cut'\nexec sleep 60\n"
    )
    search.chmod(0o700)
    monkeypatch.setattr(live_tuning, "_MAX_SEARCH_S", 1.0)
    monkeypatch.setattr(live_tuning.sys, "executable", str(search))
    trace = tmp_path / "trace"
    tuner = LiveTuner(engine, replace(QUESTION, trace=str(trace), present=TUNED), interval_s=0.05)
    with caplog.at_level(logging.INFO):
        tuner.start(Loop())  # type: ignore[arg-type]
        write_trace(trace, TUNED, 3)
        wait_for(lambda: "Back to --token-budget 512, --max-running 256" in caplog.text)
        tuner.close()
    assert "the search was ended after 1 s" in caplog.text
    assert engine.limits == [(512, 8), (512, 256)]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "--autotune-interval has no effect without --autotune"),
        (
            ("--autotune", "trace", "--objective", "ttft=0.5"),
            "--autotune-interval has no effect without --record-trace trace",
        ),
        (("--autotune", "trace", "--autotune-interval", "0"), "--autotune-interval"),
    ],
)
def test_an_interval_needs_a_server_that_is_tuned_while_it_serves(
    cli: Any, arguments: tuple[str, ...], reason: str
) -> None:
    ran = cli("serve", "smollm2", "--autotune-interval", "30", *arguments)
    assert ran.code == 2
    assert reason in ran.err


def test_searches_run_in_a_process_while_requests_come(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = tmp_path / "trace"
    write_trace(trace, USUAL, 3)
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    question = replace(QUESTION, model=str(model), trace=str(trace))
    tuner = LiveTuner(engine, question, interval_s=0.05)
    with caplog.at_level(logging.INFO):
        tuner.start(Loop())  # type: ignore[arg-type]
        time.sleep(0.2)
        assert "needs at least" not in caplog.text  # no new requests
        with trace.open("a") as file:
            file.write('{"arrival_s": 9, "prompt_tokens": 5, "output_tokens": 2}\n')
        wait_for(lambda: "trace has 4 requests: advice needs at least 100" in caplog.text)
        tuner.close()
