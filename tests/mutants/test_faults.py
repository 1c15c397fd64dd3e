"""Every planted fault still finds the one place that it changes."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_fault_is_in_its_file_once() -> None:
    faults = tomllib.loads((ROOT / "tests" / "mutants" / "faults.toml").read_text())["fault"]
    lost = [
        f"{fault['title']}: {count} times in {fault['file']}"
        for fault in faults
        if (count := (ROOT / fault["file"]).read_text().count(fault["old"])) != 1
    ]
    assert not lost


def test_each_fault_names_tests_that_exist() -> None:
    faults = tomllib.loads((ROOT / "tests" / "mutants" / "faults.toml").read_text())["fault"]
    named = {path.partition("::")[0] for fault in faults for path in fault["tests"].split()}
    assert not [path for path in sorted(named) if not (ROOT / path).exists()]
