"""What a machine has free, as a container sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from twostroke.core import machine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(64)))
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("max 100000", 64), ("", 64)],
)
def test_a_quota_bounds_the_cores(cgroup: Path, quota: str, cores: int) -> None:
    (cgroup / "cpu.max").write_text(quota)
    assert machine.num_cores() == cores


def test_without_a_control_group_every_allowed_core_counts(cgroup: Path) -> None:
    assert machine.num_cores() == 64


def test_files_read_lately_do_not_count_as_taken_memory(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("1000000\n")
    (cgroup / "memory.current").write_text("900000\n")
    assert machine.memory_available() == 100_000
    (cgroup / "memory.stat").write_text("anon 300000\ninactive_file 500000\n")
    assert machine.memory_available() == 600_000
    assert machine.memory_total() == 1_000_000


def test_no_limit_is_no_bound(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("900000\n")
    assert machine.memory_available() > 1_000_000


def test_what_other_programs_take_is_a_share_of_all_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used_s, clock_s = iter([10.0, 13.0]), iter([100.0, 103.0])
    with monkeypatch.context() as patch:
        patch.setattr(machine, "_others_s", lambda: next(used_s))
        patch.setattr(machine.time, "monotonic", lambda: next(clock_s))
        patch.setattr(machine.os, "cpu_count", lambda: 2)
        assert machine.OthersWatch().share() == 0.5
    real = machine.OthersWatch().share()
    assert real is None or real >= 0


def test_what_the_system_does_not_say_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_others_s", lambda: None)
    assert machine.OthersWatch().share() is None
