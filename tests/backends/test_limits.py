"""The machine's measured limits, and engines that are faster than these."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.backends import machine_limits as limits_module
from twostroke.backends.machine_limits import MachineLimits
from twostroke.core import hardware
from twostroke.core.control_groups import CoreLimit
from twostroke.core.errors import BackendError
from twostroke.core.hardware import Hardware
from twostroke.engine.counters import PhaseTotals, PrefillDecodeTotals

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

BUSY = Hardware("test", 2, 10**9, bandwidth=100.0, peak=1000.0, peak_kind="x", source="measured")
QUIET = replace(BUSY, bandwidth=500.0, peak=4000.0)


class Machine:
    """Replaces measurements by given values; the first one is of a busy machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, quiet: Hardware = QUIET) -> None:
        self.measured: list[bool] = []
        self._quiet = quiet
        monkeypatch.setattr(limits_module, "machine", self)

    def __call__(self, level: str, threads: int, num_bytes: int, *, remeasure: bool) -> Hardware:
        self.measured.append(remeasure)
        return self._quiet if remeasure else BUSY


def above(limits: MachineLimits, strokes: PrefillDecodeTotals) -> Hardware | None:
    return limits.above(
        bytes_per_s=strokes.max_bytes_per_s, flops_per_s=strokes.max_flops_per_s, may_measure=True
    )


def _decoding(bytes_per_s: int) -> PrefillDecodeTotals:
    return PrefillDecodeTotals(
        PhaseTotals(1, 8, 800, 10, time_s=1.0), PhaseTotals(1, 1, 8, bytes_per_s, time_s=1.0)
    )


def test_speeds_below_the_limits_need_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, limits = Machine(monkeypatch), MachineLimits("portable", 2, 10**6)
    assert machine.measured == []
    assert above(limits, _decoding(90)) == above(limits, _decoding(100)) == BUSY
    assert machine.measured == [False]


def test_a_speed_above_the_limit_measures_the_machine_again_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, limits = Machine(monkeypatch), MachineLimits("portable", 2, 10**6)
    assert above(limits, _decoding(450)) == above(limits, _decoding(450)) == QUIET
    assert machine.measured == [False, True]


def test_no_speed_exceeds_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, limits = Machine(monkeypatch), MachineLimits("portable", 2, 10**6)
    strokes = _decoding(750)
    fastest_limits = above(limits, strokes)
    assert fastest_limits is not None
    assert strokes.decode.mbu(fastest_limits) == 1.0
    assert fastest_limits.peak == QUIET.peak
    assert above(limits, _decoding(250)) == QUIET  # what one answer achieved is not remembered
    assert machine.measured == [False, True]


def test_arithmetic_above_its_peak_measures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, limits = Machine(monkeypatch), MachineLimits("portable", 2, 10**6)
    assert above(limits, PrefillDecodeTotals(PhaseTotals(1, 8, 2000, 10, time_s=1.0))) == QUIET
    assert machine.measured == [False, True]


def test_without_a_native_library_there_are_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Hardware:
        raise BackendError("There is no library.")

    monkeypatch.setattr(limits_module, "machine", refuse)
    assert above(MachineLimits("portable", 2, 10**6), _decoding(1)) is None


def test_threads_beyond_the_usable_cores_do_not_lower_the_limits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    monkeypatch.setattr(hardware, "core_limits", lambda _: [CoreLimit(1.5, "cpu.max")])
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: set(range(4)))
    measured: list[int] = []

    def measure_peak(_: str, num_threads: int) -> tuple[float, str]:
        measured.append(num_threads)
        return 1000.0, "x"

    monkeypatch.setattr(limits_module, "measure_peak", measure_peak)
    monkeypatch.setattr(limits_module, "measure_bandwidth", lambda *_: 100.0)
    limits = [limits_module.machine("portable", threads, 10**6) for threads in (1, 2, 3, 64)]
    assert [limit.num_threads for limit in limits] == [1, 2, 2, 2]
    assert measured == [1, 2]  # the others are read from the cache

    monkeypatch.setattr(hardware, "core_limits", lambda _: [])
    assert limits_module.machine("portable", 64, 10**6).num_threads == 4
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: {3})
    assert limits_module.machine("portable", 64, 10**6).num_threads == 1
