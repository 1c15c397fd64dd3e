"""The energy that this machine's processors and GPUs take, from the counters of the system.

Processors are counted by RAPL (Linux's powercap), GPUs by NVIDIA's NVML. The counters are of the
whole machine: they include the client, other programs, and idle power.
"""

from __future__ import annotations

import ctypes
import math
from ctypes.util import find_library
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_POWERCAP: Final = Path("/sys/class/powercap")
# Zones of RAPL that do not contain each other. `psys`, the whole platform, contains the packages.
_COUNTED_ZONES: Final = ("package", "dram")
_NVML_OK: Final = 0
_JOULES_PER_MICROJOULE: Final = 1e-6
_JOULES_PER_MILLIJOULE: Final = 1e-3


class EnergyUse(Frozen):
    """The energy that a machine took during a run.

    Attributes:
        joules_by_part: energy by part of the machine, such as "package-0" or "GPU 0".
        seconds: how long it was counted.
    """

    joules_by_part: dict[str, float]
    seconds: float

    @property
    def joules(self) -> float:
        """The energy of all parts."""
        return sum(self.joules_by_part.values())

    @property
    def watts(self) -> float:
        """The mean power of all parts."""
        return self.joules / self.seconds if self.seconds else 0.0


class EnergyCounter(Protocol):
    """Counts the energy of one part of the machine.

    Attributes:
        part: the name of the part.
        wrap_joules: the count at which the counter begins again from 0; infinite if it never does.
    """

    part: str
    wrap_joules: float

    def read_joules(self) -> float:
        """Return the count.

        Raises:
            OSError: the counter cannot be read.
        """


class RaplCounter:
    """A zone of RAPL, such as a processor's package; its counter is in a folder of powercap."""

    def __init__(self, folder: Path) -> None:
        """Read the zone's name and range; raise OSError if the folder has none."""
        self._file = folder / "energy_uj"
        package = "" if folder.name.count(":") == 1 else f" of zone {folder.name.split(':')[1]}"
        self.part = (folder / "name").read_text().strip() + package
        self.wrap_joules = (
            int((folder / "max_energy_range_uj").read_text()) * _JOULES_PER_MICROJOULE
        )

    def read_joules(self) -> float:
        """Return the zone's count; only root may read it on most systems."""
        return int(self._file.read_text()) * _JOULES_PER_MICROJOULE


class NvmlCounter:
    """The energy counter of one GPU, which counts since its driver was loaded."""

    wrap_joules = math.inf

    def __init__(self, library: Any, index: int) -> None:
        """Open GPU number `index`; raise OSError if it has no counter (older than Volta)."""
        self._library = library
        self._device = ctypes.c_void_p()
        self.part = f"GPU {index}"
        _check(library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self._device)))
        self.read_joules()

    def read_joules(self) -> float:
        """Return the GPU's count."""
        millijoules = ctypes.c_ulonglong()
        _check(
            self._library.nvmlDeviceGetTotalEnergyConsumption(
                self._device, ctypes.byref(millijoules)
            )
        )
        return millijoules.value * _JOULES_PER_MILLIJOULE


class EnergyMeter:
    """Sums the energy of several counters, even if they wrap around between two samples."""

    def __init__(self, counters: Sequence[EnergyCounter]) -> None:
        """Begin to count; the counters must be readable."""
        self._counters = counters
        self._last = [counter.read_joules() for counter in counters]
        self._sums = [0.0] * len(counters)

    def sample(self) -> dict[str, float]:
        """Return the energy since the meter was created, by part of the machine.

        `sample` must be called before a counter has wrapped around twice; RAPL's counters wrap
        after minutes to hours.
        """
        for index, counter in enumerate(self._counters):
            try:
                count = counter.read_joules()
            except OSError:  # it has gone away, and is counted until then
                continue
            difference = count - self._last[index]
            if difference < 0 and math.isfinite(counter.wrap_joules):
                difference += counter.wrap_joules
            self._sums[index] += max(difference, 0.0)
            self._last[index] = count
        parts = [counter.part for counter in self._counters]
        return dict(zip(parts, self._sums, strict=True))


def energy_counters(*, must_count: bool) -> list[EnergyCounter]:
    """Return the counters of this machine that can be read.

    Raises:
        UsageError: `must_count` is set, and no counter can be read; the message says why.
    """
    processor_counters, reason = rapl_counters(_POWERCAP)
    counters: list[EnergyCounter] = [*processor_counters, *nvml_counters(_load_nvml())]
    if must_count and not counters:
        raise UsageError(f"cannot be counted here: {reason}, and no GPU counts it.", field="energy")
    return counters


def rapl_counters(powercap: Path) -> tuple[list[RaplCounter], str]:
    """Return (the readable zones in the folder of powercap, why there are none)."""
    counters = []
    reason = "the system has no energy counters of its processors (RAPL)"
    for folder in sorted(powercap.glob("intel-rapl:*")):  # AMD's zones have this name, too
        try:
            counter = RaplCounter(folder)
            if counter.part.startswith(_COUNTED_ZONES):
                counter.read_joules()
                counters.append(counter)
        except PermissionError:
            reason = (
                "only root may read the energy counters of the processors (let others read "
                "energy_uj below /sys/class/powercap)"
            )
        except (OSError, ValueError):  # a zone that is not complete
            continue
    return counters, reason


def nvml_counters(library: Any) -> list[NvmlCounter]:
    """Return the GPUs that count their energy; `library` is NVML, or None."""
    if library is None or library.nvmlInit_v2() != _NVML_OK:
        return []
    num_gpus = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(num_gpus)) != _NVML_OK:
        return []
    counters = []
    for index in range(num_gpus.value):
        try:
            counters.append(NvmlCounter(library, index))
        except OSError:
            continue
    return counters


def _load_nvml() -> Any:
    name = find_library("nvidia-ml") or "libnvidia-ml.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _check(status: int) -> None:
    if status != _NVML_OK:
        raise OSError(f"NVML reports error {status}")
