"""The watchdog gives up an engine process after silence, or if a step takes far too long."""

from __future__ import annotations

import pytest

from twostroke.engine.process.supervisor import ProgressWatchdog
from twostroke.engine.status import StepProgress


def pulses(
    watch: ProgressWatchdog, seconds: float, *, step_s: float = 0.0, steps: int = 0
) -> str | None:
    """Let time pass with heartbeats; return the first fault that the watchdog finds."""
    begin = watch._last_check_s
    for tick in range(int(seconds * 4)):
        now = begin + (tick + 1) / 4
        if fault := watch.fault(now):
            return fault
        watch.on_message(now, StepProgress(steps, step_s and step_s + tick / 4))
    return None


def test_an_idle_engine_with_a_pulse_is_fine() -> None:
    assert pulses(ProgressWatchdog(0.1, 0.0), 60) is None


def test_silence_is_a_fault_after_five_seconds() -> None:
    watch = ProgressWatchdog(0.1, 0.0)
    faults = [watch.fault(tick / 4) for tick in range(40)]
    first = next(tick for tick, fault in enumerate(faults) if fault)
    assert 5 < first / 4 <= 5.5
    assert "said nothing for 5." in str(faults[first])


def test_a_process_that_waits_for_a_processor_has_more_time() -> None:
    watch = ProgressWatchdog(0.1, 0.0)
    faults = [watch.fault(tick / 4, is_starved=True) for tick in range(200)]
    first = next(tick for tick, fault in enumerate(faults) if fault)
    assert 30 < first / 4 <= 30.5


def test_a_process_that_waits_for_a_processor_is_checked_as_often_as_others() -> None:
    watch = ProgressWatchdog(0.1, 0.0)
    assert watch.next_check_s(1.0) == watch.next_check_s(20.0) == 0.25


def test_a_process_is_late_after_half_of_its_limit() -> None:
    watch = ProgressWatchdog(0.1, 0.0)
    assert [watch.is_late(now_s) for now_s in (2.4, 2.6)] == [False, True]
    watch.on_message(3.0, StepProgress(1, 2.6))
    assert watch.is_late(3.0)
    watch.on_message(3.1, StepProgress(2, 0.0))
    assert not watch.is_late(3.1)


@pytest.mark.parametrize("message_s", [number / 16 for number in range(8)])
def test_the_interval_between_two_checks_does_not_add_to_the_limit(message_s: float) -> None:
    watch = ProgressWatchdog(0.1, 0.0)
    watch.on_message(message_s)
    now_s = message_s
    for _ in range(100):
        now_s += watch.next_check_s(now_s)
        if watch.fault(now_s):
            break
    assert 5.0 < now_s - message_s < 5.02


def test_a_step_grows_older_while_the_engine_is_silent() -> None:
    watch = ProgressWatchdog(0.1, 0.0)
    watch.on_message(1.0, StepProgress(7, 0.5))
    assert watch.progress_at(1.25) == StepProgress(7, 0.5)
    assert watch.progress_at(4.0) == StepProgress(7, 3.5)
    watch.on_message(5.0, StepProgress(8, 0.0))
    assert watch.progress_at(5.25) == StepProgress(8, 0.0)
    assert watch.progress_at(9.0) == StepProgress(8, 4.0)


def test_a_step_that_does_not_end_is_a_fault() -> None:
    fault = pulses(ProgressWatchdog(0.1, 0.0), 60, step_s=0.1)
    assert fault is not None
    assert "one of its steps has run for 5." in fault


@pytest.mark.parametrize(("longest_s", "limit_s"), [(0.1, 5.0), (2.0, 20.0)])
def test_large_models_have_longer_steps(longest_s: float, limit_s: float) -> None:
    assert ProgressWatchdog(longest_s, 0.0).limit_s == limit_s


def test_a_step_may_take_twice_the_longest_so_far() -> None:
    watch = ProgressWatchdog(0.1, 0.0)
    watch.on_message(0.5, StepProgress(1, 4.0))
    watch.on_message(1.0, StepProgress(2, 0.0))
    assert watch.limit_s == 8.0


def test_replacing_ranks_may_take_long() -> None:
    watch = ProgressWatchdog(0.1, 0.0)
    for tick in range(400):
        assert watch.fault(tick / 4) is None
        watch.on_message(tick / 4, StepProgress(3, 100.0, is_recovering=True))


def test_a_server_that_did_not_run_itself_does_not_blame_the_engine() -> None:
    watch = ProgressWatchdog(0.1, 0.0)
    assert watch.fault(0.25) is None
    assert watch.fault(100.0) is None
    assert pulses(watch, 10) is None


def test_a_pause_of_all_processes_is_no_long_step() -> None:
    watch = ProgressWatchdog(0.1, 0.0)
    assert pulses(watch, 1, step_s=0.1, steps=1) is None
    assert watch.fault(9.0) is None  # both were stopped at 1.0
    watch.on_message(9.01, StepProgress(1, 8.9))
    assert watch.fault(9.25) is None
    fault = pulses(watch, 60, step_s=9.2, steps=1)
    assert fault is not None
    assert watch._last_check_s < 14.5
