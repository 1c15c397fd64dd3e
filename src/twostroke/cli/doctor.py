"""`twostroke doctor`: what this machine can do, and what "auto" means here and why."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import click

from twostroke.core.hardware import (
    MemoryNode,
    memory_available,
    memory_nodes,
    memory_total,
    num_cores,
    place_threads,
    processor_name,
    resolve_num_threads,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_SMALL_BYTES: Final = 100 * 10**6  # a small model's weights, which large caches can hold
_LARGE_BYTES: Final = 10**9  # what streams from memory on every machine
_LABEL_WIDTH: Final = 12


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--threads", type=click.IntRange(1, 1024), help="Measure with so many [default: one a core]."
)
def command(as_json: bool, threads: int | None) -> None:
    """Measure this machine and show what Twostroke would choose on it."""
    from twostroke.backends.cpu.library import choose_level, level_reports
    from twostroke.core import env

    choice = choose_level(None)
    machine, levels = Machine.here(), level_reports()
    num_threads = resolve_num_threads(threads)
    placed = place_threads(machine.memory_nodes, num_threads)
    places = tuple(Place(node.number, count) for node, count in placed.items())
    auto = Auto("cpu", choice.level, choice.reason, num_threads, places, str(env.cache_dir()))
    if as_json:
        result = {
            "machine": asdict(machine),
            "levels": {
                name: {"runs": _runs(report), "report": report} for name, report in levels.items()
            },
            "measured": asdict(Measured.now(auto.level, auto.num_threads)),
            "auto": asdict(auto),
        }
        click.echo(json.dumps(result, ensure_ascii=False))
        return
    _show("Machine", machine.lines())
    _show("Instruction-set levels", _level_lines(levels, auto.level))
    _show("What auto means here", auto.lines(given=threads is not None))
    if sys.stderr.isatty():
        click.echo("Measuring…\r", nl=False, err=True)
    measured = Measured.now(auto.level, auto.num_threads)
    _show(f"Limits of {auto.level} with {auto.num_threads} threads", measured.lines())


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and its system. Sizes are in bytes; nodes are those with cores for us."""

    processor: str
    num_cores: int
    memory_nodes: tuple[MemoryNode, ...]
    memory_bytes: int
    memory_free_bytes: int
    system: str
    python: str

    @classmethod
    def here(cls) -> Machine:
        """Return this one."""
        system = f"{platform.system()} {platform.release()} {platform.machine()}"
        python = platform.python_version()
        memory = memory_total(), memory_available()
        return cls(processor_name(), num_cores(), memory_nodes(), *memory, system, python)

    def lines(self) -> dict[str, str]:
        """Return what a person reads."""
        total, free = self.memory_bytes / 1e9, self.memory_free_bytes / 1e9
        memory = f"{total:.1f} GB, {free:.1f} GB of it free"
        if len(self.memory_nodes) > 1:
            nodes = [
                f"{len(node.cores)} cores near node {node.number}" for node in self.memory_nodes
            ]
            memory += f"; on {len(nodes)} nodes: {', '.join(nodes)}"
        return {
            "processor": f"{self.processor}, {self.num_cores} cores",
            "memory": memory,
            "system": f"{self.system}, Python {self.python}",
        }


@dataclass(frozen=True, slots=True)
class Place:
    """How many threads keep to the cores of a memory node."""

    node: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Auto:
    """What is chosen where nothing is asked for. Without places, threads run on any node."""

    backend: str
    level: str
    level_reason: str
    num_threads: int
    places: tuple[Place, ...]
    cache_dir: str

    def lines(self, *, given: bool) -> dict[str, str]:
        """Return what a person reads; `given` says that the number of threads was an option."""
        reason = self.level_reason.partition(";")[0]  # the levels above it have said why not
        threads = "as --threads says" if given else "one a core, or TWOSTROKE_NUM_THREADS"
        places = [f"{place.num_threads} on node {place.node}" for place in self.places]
        placed = f"; {', '.join(places)}, their weights near them" if places else ""
        return {
            "backend": f"{self.backend}: our own kernels (--backend)",
            "level": f"{self.level}: {reason} (--level, TWOSTROKE_CPU_LEVEL)",
            "threads": f"{self.num_threads}: {threads} (--threads){placed}",
            "context": "the model's own (--context-length)",
            "KV memory": "8 whole contexts, within half of the free memory (--kv-memory)",
            "KV format": "f16: keys and values in two bytes each (--kv-format)",
            "cache": f"{self.cache_dir} (TWOSTROKE_CACHE)",
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """The limits that speeds are shown beside.

    Bandwidths are for a small stream and for one that no cache holds (None where memory is too
    short for it).
    """

    small_bytes_per_s: float
    large_bytes_per_s: float | None
    peak_ops_per_s: float
    peak_kind: str

    @classmethod
    def now(cls, level: str, num_threads: int) -> Measured:
        """Measure, which takes some seconds."""
        from twostroke.engine.limits import machine

        small = machine(level, num_threads, _SMALL_BYTES, again=True)
        if memory_available() < 2 * _LARGE_BYTES:
            return cls(small.bandwidth, None, small.peak, small.peak_kind)
        large = machine(level, num_threads, _LARGE_BYTES, again=True)
        peak = max(small.peak, large.peak)
        return cls(small.bandwidth, large.bandwidth, peak, small.peak_kind)

    def lines(self) -> dict[str, str]:
        """Return what a person reads."""
        bandwidth = f"{self.small_bytes_per_s / 1e9:.1f} GB/s over 100 MB"
        if self.large_bytes_per_s is not None:
            bandwidth += f", {self.large_bytes_per_s / 1e9:.1f} GB/s over 1 GB"
        return {
            "bandwidth": bandwidth,
            "peak": f"{self.peak_ops_per_s / 1e12:.2f} T operations/s, {self.peak_kind}",
        }


def _level_lines(reports: Mapping[str, str], chosen: str) -> dict[str, str]:
    lines = {}
    for name, report in reports.items():
        runs = f"yes {report.removeprefix('runs ')}" if _runs(report) else f"no: {report}"
        lines[name] = f"{runs}: auto takes it" if name == chosen else runs
    return lines


def _runs(report: str) -> bool:
    return report.startswith("runs")


def _show(heading: str, lines: Mapping[str, str]) -> None:
    """Print a heading and what stands under it, folded to the terminal's width."""
    width = min(shutil.get_terminal_size().columns, 100)
    click.secho(heading, bold=True)
    for name, text in lines.items():
        click.echo(
            textwrap.fill(
                text,
                width,
                initial_indent=f"  {name:{_LABEL_WIDTH}}",
                subsequent_indent=" " * (_LABEL_WIDTH + 2),
                break_on_hyphens=False,
            )
        )
