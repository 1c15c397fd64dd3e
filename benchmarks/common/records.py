"""Stored measurements: one JSON file for each row, model and machine.

`make report` draws BENCHMARKS.md from these files. A new measurement of a row replaces only this
row's file.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.common.report import RESULTS, machine_facts, read, write
from twostroke.backends.cpu.library import choose_level
from twostroke.core.options import ACTIVATION_BITS, AUTO_BITS, DEFAULT_ACTIVATION_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = RESULTS / "rows"
OURS = "Twostroke"
OTHER_BITS = (AUTO_BITS, *(bits for bits in ACTIVATION_BITS if bits != DEFAULT_ACTIVATION_BITS))


def ours_with(bits: int | str) -> str:
    """Return the name of Twostroke with so many bits of activations, other than 15."""
    return f"{OURS}, {'chosen' if bits == AUTO_BITS else f'{bits}-bit'} activations"


def is_ours(engine: str) -> bool:
    """Tell Twostroke, with any bits of activations, from its peers."""
    return engine.partition(",")[0] == OURS


@dataclass(frozen=True, slots=True)
class Entry:
    """One engine's runs of a row, in one way of running it."""

    engine: str
    way: str
    runs: list[float]

    @property
    def median(self) -> float:
        """The figure to quote."""
        return median(self.runs)


@dataclass(frozen=True, slots=True)
class Record:
    """A row: every engine's runs, in `unit`; `lower_is_better` for times and sizes.

    `setting` tells runs of one row apart, such as by instruction-set level; "" is the usual one.
    `failures` has the reason for each engine that could not run it, `others` what else was seen.
    `facts` are the machine's and the date; `command` repeats the row.
    """

    row: str
    name: str
    model: str
    unit: str
    entries: list[Entry]
    command: str
    lower_is_better: bool = False
    setting: str = ""
    disturbed_runs: int = 0
    num_runs: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=machine_facts)

    def best(self, engine: str) -> Entry | None:
        """Return an engine's best way; None if it has no runs."""
        ways = [entry for entry in self.entries if entry.engine == engine]
        choose = min if self.lower_is_better else max
        return choose(ways, key=lambda entry: entry.median, default=None)

    @property
    def peers(self) -> list[str]:
        """The engines beside Twostroke, the best one first."""
        names = {entry.engine: None for entry in self.entries if not is_ours(entry.engine)}
        medians = {name: best.median for name in names if (best := self.best(name))}
        return sorted(medians, key=medians.__getitem__, reverse=not self.lower_is_better)

    def ratio(self, peer: str, engine: str = OURS) -> float | None:
        """Return how many times better Twostroke is than a peer; None without both."""
        ours, theirs = self.best(engine), self.best(peer)
        if ours is None or theirs is None:
            return None
        ratio = ours.median / theirs.median
        return 1 / ratio if self.lower_is_better else ratio


def keep(record: Record) -> None:
    """Write a row over what was measured of it before on a machine like this."""
    parts = filter(None, (record.model, record.row, record.setting))
    path = ROWS / machine_slug(record.facts) / f"{'.'.join(map(_slug, parts))}.json"
    write(path, json.dumps(msgspec.to_builtins(record), indent=1) + "\n")


def all_records() -> Iterator[tuple[str, list[Record]]]:
    """Yield each machine's folder name with its rows."""
    for folder in sorted(path for path in ROWS.glob("*") if path.is_dir()):
        yield folder.name, [read(path, Record) for path in sorted(folder.glob("*.json"))]


def machine_slug(facts: dict[str, Any]) -> str:
    """Return a folder name for a kind of machine: processor, cores, and the best level it has.

    The level is a part of it since processors that lack one may go by the same name.
    """
    return _slug(f"{facts['processor']} {facts['cores']} cores {choose_level(None).level}")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower().replace("(r)", "")).strip("-")
