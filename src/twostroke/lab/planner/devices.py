"""Devices that plans know: memory, bandwidth, arithmetic peaks and price per hour."""

from __future__ import annotations

import csv
import tomllib
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from twostroke.core.errors import UsageError, nearest
from twostroke.core.files import read_small_file
from twostroke.core.frozen import Frozen, check_range
from twostroke.lab.planner.served import thread_count_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.core.hardware import Hardware

THIS_MACHINE: Final = "here"  # the device name that stands for this machine
_MEASURED_WEIGHT_BYTES: Final = 1 << 28  # weights whose reading measures the memory bandwidth
_PEAK_FIELDS: Final = {
    "bf16": "bf16_tflops",
    "fp8": "fp8_tflops",
    "int8": "int8_tops",
    "fp4": "fp4_tflops",
}
_EXAMPLE_FILE: Final = 'name = "mine", memory_gb = 48, bandwidth_gb_s = 900, bf16_tflops = 180'


class Device(Frozen):
    """A device with its data sheet's figures, or with figures measured on this machine.

    Attributes:
        name: its name in the table, in a user's file, or of this machine's processor.
        memory_bytes: size of its memory; None if unknown.
        bandwidth: of its memory, in bytes per second.
        peaks: dense operations per second (a multiply-add counts as two) by arithmetic: bf16, fp8,
            int8, fp4. This machine has one entry: the arithmetic of its kernels.
        link: bandwidth to other devices, in bytes per second and one direction; None if unknown.
        tdp_w: thermal design power in watts.
        usd_per_hour: price; None if unknown.
        source: where the figures come from.
        price_source: where the price comes from, with its date.
    """

    name: str
    memory_bytes: float | None
    bandwidth: float
    peaks: Mapping[str, float]
    link: float | None = None
    tdp_w: float | None = None
    usd_per_hour: float | None = None
    source: str = ""
    price_source: str = ""

    def arithmetic(self, preferred: str) -> str:
        """Return the preferred arithmetic (such as fp8) if the device has it.

        Otherwise return the first arithmetic of its `peaks`.
        """
        return preferred if preferred in self.peaks else next(iter(self.peaks))


class _DeviceRow(Frozen, forbid_unknown_fields=True):
    """One row of the device table (devices.csv), or a user's device file."""

    name: str
    bandwidth_gb_s: float
    bf16_tflops: float
    memory_gb: float | None = None
    fp8_tflops: float | None = None
    int8_tops: float | None = None
    fp4_tflops: float | None = None
    tdp_w: float | None = None
    link_gb_s: float | None = None
    usd_per_hour: float | None = None
    usd_source: str = ""
    spec_checked: str = ""

    def __post_init__(self) -> None:
        """Raise UsageError if a value of the device's row is out of range."""
        if not self.name.strip():
            raise UsageError("must not be empty.", field="name")
        check_range(self, "bandwidth_gb_s", "memory_gb", "link_gb_s", "tdp_w", high=1e9)
        check_range(self, *_PEAK_FIELDS.values(), "usd_per_hour", high=1e9)

    def device(self) -> Device:
        """Return the device that this row describes, in bytes, operations and seconds."""
        rates = {arithmetic: getattr(self, field) for arithmetic, field in _PEAK_FIELDS.items()}
        return Device(
            name=self.name,
            memory_bytes=self.memory_gb * 1e9 if self.memory_gb else None,
            bandwidth=self.bandwidth_gb_s * 1e9,
            peaks={arithmetic: rate * 1e12 for arithmetic, rate in rates.items() if rate},
            link=self.link_gb_s * 1e9 if self.link_gb_s else None,
            tdp_w=self.tdp_w,
            usd_per_hour=self.usd_per_hour,
            source=f"datasheet (checked: {self.spec_checked})" if self.spec_checked else "",
            price_source=self.usd_source,
        )


def known_devices() -> dict[str, Device]:
    """Return the devices of the planner's table (devices.csv), by name."""
    text = resources.files("twostroke.lab.planner").joinpath("devices.csv").read_text("utf-8")
    rows = csv.DictReader(text.splitlines())
    given_values = [{key: value for key, value in row.items() if value} for row in rows]
    devices = [msgspec.convert(row, _DeviceRow, strict=False).device() for row in given_values]
    return {device.name: device for device in devices}


def find_device(name: str) -> Device:
    """Return the device of the table called `name`, or the device that a TOML file describes.

    Upper and lower case of the name do not matter.

    Raises:
        UsageError: no device has this name, or the file does not describe a device.
        ModelFormatError: the file cannot be read.
    """
    if name.endswith(".toml"):
        return _read_device_file(Path(name))
    if name == THIS_MACHINE:  # `this_machine` measures it; it has no price
        reason = "cannot be '{value}': describe this machine, with its price, in a file.toml."
        raise UsageError(reason, field="device", value=name)
    devices = known_devices()
    by_lower_name = {key.lower(): device for key, device in devices.items()}
    if name.lower() in by_lower_name:
        return by_lower_name[name.lower()]
    matches = [key for key in devices if key.lower().startswith(name.lower())] if name else []
    hint = f" Did you mean {' or '.join(matches)}?" if matches else nearest(name, devices)
    raise UsageError(
        f"must be one of {', '.join([THIS_MACHINE, *devices])}, or a file.toml such as "
        f"{_EXAMPLE_FILE} (each on its own line); got '{{value}}'.{hint}",
        field="device",
        value=name,
    )


def this_machine(num_threads: int | None = None, *, remeasure: bool = True) -> Device:
    """Measure this machine with the kernels that would run, and return it as a device.

    `num_threads` defaults to the number that an engine uses. Each call measures again, which takes
    about a second, because an earlier measurement may have been disturbed by other load. The best
    of all measurements counts. Without `remeasure`, earlier measurements are used if there are any.
    """
    from twostroke.backends.cpu.library import choose_level
    from twostroke.backends.machine_limits import machine
    from twostroke.core.hardware import resolve_num_threads

    level, count = choose_level(None).level, resolve_num_threads(num_threads)
    return device_of(machine(level, count, _MEASURED_WEIGHT_BYTES, remeasure=remeasure))


def device_of(limits: Hardware) -> Device:
    """Return a machine as a device for plans, given its measured limits."""
    return Device(
        name=limits.name,
        memory_bytes=limits.memory_bytes,
        bandwidth=limits.bandwidth,
        peaks={limits.peak_kind: limits.peak},
        source=f"measured here ({thread_count_text(limits.num_threads)})",
    )


def _read_device_file(path: Path) -> Device:
    try:
        text = read_small_file(path).decode()
        return msgspec.convert(tomllib.loads(text), _DeviceRow).device()
    except UsageError as error:  # of __post_init__
        keys = [line.partition("=")[0].strip(" \t\"'") for line in text.splitlines()]
        line = keys.index(error.field or "") + 1
        raise UsageError(f"{path.name}, line {line}: {error}") from None
    except (ValueError, RecursionError) as error:  # of TOML, UTF-8 and msgspec
        reason = f"{path.name} does not describe a device: {error}. It needs lines such as "
        raise UsageError(f"{reason}{_EXAMPLE_FILE}.") from None
