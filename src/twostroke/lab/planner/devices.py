"""Devices: how much memory, bandwidth and arithmetic they have, and what an hour costs."""

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
from twostroke.lab.planner.served import on_threads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.core.hardware import Hardware

HERE: Final = "here"  # the name of this machine
_STREAM_BYTES: Final = 1 << 28  # weights for which the bandwidth of this machine is measured
_RATES: Final = {
    "bf16": "bf16_tflops",
    "fp8": "fp8_tflops",
    "int8": "int8_tops",
    "fp4": "fp4_tflops",
}
_EXAMPLE: Final = 'name = "mine", memory_gb = 48, bandwidth_gb_s = 900, bf16_tflops = 180'


class Device(Frozen):
    """A device as its maker describes it.

    `peaks` are dense operations/s (one multiply-add is two) by arithmetic: bf16, fp8, int8, fp4,
    or the only one that this machine's kernels use.
    `memory_bytes` is None where it depends on the machine. `bandwidth` is that of its memory and
    `link` that to other devices, in bytes/s and one direction. `source` says where figures come
    from, `price_source` the price with its date.
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

    def arithmetic(self, wanted: str) -> str:
        """Return the arithmetic that stands for `wanted` here: the first where there is none."""
        return wanted if wanted in self.peaks else next(iter(self.peaks))


class _DeviceRow(Frozen, forbid_unknown_fields=True):
    """A line of devices.csv, or a user's file."""

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
        """Refuse what no device has."""
        if not self.name.strip():
            raise UsageError("must not be empty.", field="name")
        check_range(self, "bandwidth_gb_s", "memory_gb", "link_gb_s", "tdp_w", most=1e9)
        check_range(self, *_RATES.values(), "usd_per_hour", most=1e9)

    def device(self) -> Device:
        """Return the device."""
        rates = {kind: getattr(self, field) for kind, field in _RATES.items()}
        return Device(
            name=self.name,
            memory_bytes=self.memory_gb * 1e9 if self.memory_gb else None,
            bandwidth=self.bandwidth_gb_s * 1e9,
            peaks={kind: rate * 1e12 for kind, rate in rates.items() if rate},
            link=self.link_gb_s * 1e9 if self.link_gb_s else None,
            tdp_w=self.tdp_w,
            usd_per_hour=self.usd_per_hour,
            source=f"datasheet (checked: {self.spec_checked})" if self.spec_checked else "",
            price_source=self.usd_source,
        )


def known_devices() -> dict[str, Device]:
    """Return the devices of the table, by name."""
    text = resources.files("twostroke.lab.planner").joinpath("devices.csv").read_text("utf-8")
    rows = csv.DictReader(text.splitlines())
    given = [{key: value for key, value in row.items() if value} for row in rows]
    devices = [msgspec.convert(row, _DeviceRow, strict=False).device() for row in given]
    return {device.name: device for device in devices}


def find_device(name: str) -> Device:
    """Return the device of the table called `name`, or the one that a TOML file describes.

    Upper and lower case are the same.

    Raises:
        UsageError: there is none, or the file does not describe one.
    """
    if name.endswith(".toml"):
        return _read(Path(name))
    if name == HERE:  # as `this_machine` has it, which has no price
        reason = "cannot be '{value}': describe this machine, with its price, in a file.toml."
        raise UsageError(reason, field="device", value=name)
    known = known_devices()
    found = {key.lower(): device for key, device in known.items()}.get(name.lower())
    if found is None:
        begin = [key for key in known if key.lower().startswith(name.lower())] if name else []
        hint = f" Did you mean {' or '.join(begin)}?" if begin else nearest(name, known)
        raise UsageError(
            f"must be one of {', '.join([HERE, *known])}, or a file.toml such as {_EXAMPLE} (one "
            f"to a line); got '{{value}}'.{hint}",
            field="device",
            value=name,
        )
    return found


def this_machine(num_threads: int | None = None) -> Device:
    """Return this machine, as measured by the kernels that would run.

    `num_threads` is by default the number that an engine takes. Each call measures again, in about
    a second: the first measurement may have been made while the machine was busy. The best
    measurement counts.
    """
    from twostroke.backends.cpu.library import choose_level
    from twostroke.backends.machine_limits import machine
    from twostroke.core.hardware import resolve_num_threads

    level, count = choose_level(None).level, resolve_num_threads(num_threads)
    return device_of(machine(level, count, _STREAM_BYTES, remeasure=True))


def device_of(limits: Hardware) -> Device:
    """Return a measured machine as a device."""
    return Device(
        name=limits.name,
        memory_bytes=limits.memory_bytes,
        bandwidth=limits.bandwidth,
        peaks={limits.peak_kind: limits.peak},
        source=f"measured here ({on_threads(limits.num_threads)})",
    )


def _read(path: Path) -> Device:
    try:
        text = read_small_file(path).decode()
        return msgspec.convert(tomllib.loads(text), _DeviceRow).device()
    except UsageError as error:  # of __post_init__
        keys = [line.partition("=")[0].strip(" \t\"'") for line in text.splitlines()]
        line = keys.index(error.field or "") + 1
        raise UsageError(f"{path.name}, line {line}: {error}") from None
    except (ValueError, RecursionError) as error:  # of TOML, UTF-8 and msgspec
        reason = f"{path.name} does not describe a device: {error}. It needs lines such as "
        raise UsageError(f"{reason}{_EXAMPLE}.") from None
