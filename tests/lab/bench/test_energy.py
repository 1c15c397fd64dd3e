"""Energy counters: zones of RAPL, GPUs of NVML, and counters that begin again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from twostroke.core.errors import UsageError
from twostroke.lab.bench import energy
from twostroke.lab.bench.energy import (
    EnergyMeter,
    EnergyUse,
    RaplCounter,
    energy_counters,
    nvml_counters,
    rapl_counters,
)

if TYPE_CHECKING:
    from pathlib import Path


def make_zone(folder: Path, name: str, microjoules: int = 0, high: int = 1_000_000) -> Path:
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{high}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder


def test_zones_that_contain_others_are_counted_once(tmp_path):
    make_zone(tmp_path / "intel-rapl:0", "package-0")
    make_zone(tmp_path / "intel-rapl:0:0", "core")
    make_zone(tmp_path / "intel-rapl:0:1", "dram")
    make_zone(tmp_path / "intel-rapl:1", "psys")
    make_zone(tmp_path / "intel-rapl-mmio:0", "package-0")
    (tmp_path / "intel-rapl:2").mkdir()  # a zone without files
    counters, _ = rapl_counters(tmp_path)
    assert [counter.part for counter in counters] == ["package-0", "dram of zone 0"]


def test_a_counter_that_begins_again_is_summed(tmp_path):
    zone = make_zone(tmp_path / "intel-rapl:0", "package-0", 900_000)
    counters, _ = rapl_counters(tmp_path)
    meter = EnergyMeter(counters)
    (zone / "energy_uj").write_text("950000")
    assert meter.sample() == pytest.approx({"package-0": 0.05})
    (zone / "energy_uj").write_text("100000")
    assert meter.sample() == pytest.approx({"package-0": 0.2})


def test_zones_that_only_root_may_read_are_named(tmp_path, monkeypatch):
    def refuse(_counter: RaplCounter) -> float:
        raise PermissionError

    make_zone(tmp_path / "intel-rapl:0", "package-0")
    monkeypatch.setattr(RaplCounter, "read_joules", refuse)
    monkeypatch.setattr(energy, "_POWERCAP", tmp_path)
    monkeypatch.setattr(energy, "_load_nvml", lambda: None)
    with pytest.raises(UsageError, match="only root may read"):
        energy_counters(must_count=True)


def test_a_machine_without_counters_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "_POWERCAP", tmp_path / "none")
    monkeypatch.setattr(energy, "_load_nvml", lambda: None)
    assert energy_counters(must_count=False) == []
    with pytest.raises(UsageError, match="cannot be counted here: the system has no energy"):
        energy_counters(must_count=True)


def test_a_counter_that_goes_away_is_counted_until_then(tmp_path):
    zones = [make_zone(tmp_path / f"intel-rapl:{n}", f"package-{n}", 1000) for n in range(2)]
    meter = EnergyMeter(rapl_counters(tmp_path)[0])
    for zone in zones:
        (zone / "energy_uj").write_text("501000")
    meter.sample()
    (zones[0] / "energy_uj").unlink()
    (zones[1] / "energy_uj").write_text("601000")
    assert meter.sample() == pytest.approx({"package-0": 0.5, "package-1": 0.6})


class FakeNvml:
    """NVML with two GPUs, of which the second has no counter."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.millijoules = 1000

    def nvmlInit_v2(self) -> int:  # noqa: N802 - NVML's name
        return self.status

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:  # noqa: N802
        device._obj.value = index + 1
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any, count: Any) -> int:  # noqa: N802
        count._obj.value = self.millijoules
        return 0 if device.value == 1 else 3


def test_gpus_with_a_counter_are_counted():
    library = FakeNvml()
    meter = EnergyMeter(nvml_counters(library))
    library.millijoules = 4500
    assert meter.sample() == pytest.approx({"GPU 0": 3.5})
    assert nvml_counters(FakeNvml(status=9)) == []
    assert nvml_counters(None) == []


def test_power_is_energy_over_time():
    use = EnergyUse({"package-0": 60.0, "dram of zone 0": 40.0}, 20.0)
    assert (use.joules, use.watts) == (100.0, 5.0)
