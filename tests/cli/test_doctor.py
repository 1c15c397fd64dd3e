"""`twostroke doctor`: facts about the machine, and the automatic choices on it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from twostroke.backends import machine_limits as limits
from twostroke.backends.cpu.library import level_reports
from twostroke.cli import doctor
from twostroke.cli.doctor import limit_lines, measure
from twostroke.core import hardware
from twostroke.core.control_groups import CoreLimit, MemoryLimit
from twostroke.core.hardware import MemoryNode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Ran

    Cli = Callable[..., Ran]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurements, which take minutes on a busy machine."""
    monkeypatch.setattr(limits, "measure_peak", lambda *_: (2e9, "float32"))
    monkeypatch.setattr(limits, "measure_bandwidth", lambda *_: 1e9)


def test_every_level_is_shown_with_its_reason(cli: Cli) -> None:
    ran = cli("doctor")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.split("\n")
    for heading in ("Machine", "Instruction-set levels", "What auto means here"):
        assert heading in lines
    for level in level_reports():
        [line] = [line for line in lines if line.startswith(f"  {level:12}")]
        assert line[14:].startswith(("yes (needs ", "no: "))
    assert ran.out.count(": auto takes it") == 1
    assert "GB/s over 100 MB" in ran.out
    assert max(map(len, lines)) <= 100


def test_json_is_for_scripts(cli: Cli) -> None:
    body = json.loads(cli("doctor", "--json", "--threads", "1").out)
    assert list(body) == ["machine", "levels", "measured", "auto", "gpu"]
    assert body["auto"]["num_threads"] == 1
    assert body["levels"][body["auto"]["level"]]["runs"] is True
    assert body["levels"]["portable"] == {"runs": True, "report": "runs (needs nothing)"}
    assert body["measured"]["small_bytes_per_s"] > 1e8
    assert body["measured"]["peak_ops_per_s"] > 1e8
    assert body["machine"]["memory_bytes"] > body["machine"]["memory_free_bytes"] > 0


def test_several_memory_nodes_are_shown_with_their_threads(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [MemoryNode(0, (0, 1, 2))]
    monkeypatch.setattr(doctor, "memory_nodes", lambda: tuple(nodes))
    assert " node" not in cli("doctor").out
    nodes.append(MemoryNode(2, (3,)))
    lines = " ".join(cli("doctor", "--threads", "4").out.split())
    assert "free; on 2 nodes: 3 cores near node 0, 1 core near node 2 system" in lines
    assert "(--threads); 3 on node 0, 1 on node 2, their weights near them context" in lines
    body = json.loads(cli("doctor", "--json", "--threads", "4").out)
    assert body["machine"]["memory_nodes"][1] == {"number": 2, "cores": [3]}
    assert body["auto"]["places"] == [
        {"node": 0, "num_threads": 3},
        {"node": 2, "num_threads": 1},
    ]


def test_a_level_of_the_environment_is_named_as_the_reason(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CPU_LEVEL", "portable")
    auto = json.loads(cli("doctor", "--json").out)["auto"]
    assert (auto["level"], auto["level_reason"]) == ("portable", "TWOSTROKE_CPU_LEVEL")


@pytest.mark.parametrize("count", ["0", "1025"])
def test_impossible_threads_are_refused(cli: Cli, count: str) -> None:
    ran = cli("doctor", "--threads", count)
    assert ran.code == 2
    assert "--threads" in ran.err


def test_a_model_without_ranks_is_refused_under_the_name_that_the_help_shows(cli: Cli) -> None:
    ran = cli("doctor", "smollm2")
    assert ran.code == 2
    assert ran.err == "twostroke: MODEL needs --ranks: only ranks are compared by a model.\n"


def test_little_memory_skips_the_large_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_available", lambda: 10**6)
    measured = measure("portable", 1)
    assert measured["large_bytes_per_s"] is None
    assert "over 1 GB" not in limit_lines(measured)["bandwidth"]


def test_missing_libraries_are_one_sentence(cli: Cli, no_libraries: Path) -> None:
    ran = cli("doctor")
    assert ran.code == 8
    assert str(no_libraries) in ran.err
    assert "unset TWOSTROKE_NATIVE_DIR" in ran.err


def test_limits_are_remembered_unless_they_make_no_sense(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    first = limits.machine("portable", 1, 10**6)
    [path] = (tmp_path / "machine").iterdir()
    limits_body = json.loads(path.read_text())
    path.write_text(json.dumps(limits_body | {"bandwidth": 5.0}))
    assert limits.machine("portable", 1, 10**6).bandwidth > 1e8  # its checksum is another
    del limits_body["checksum"]  # as earlier versions wrote it
    path.write_text(json.dumps(limits_body | {"bandwidth": 5.0}))
    assert limits.machine("portable", 1, 10**6).bandwidth == 5.0
    for bad in (
        "",
        "{}",
        "[]",
        json.dumps(limits_body | {"peak": 0}),
        json.dumps(limits_body | {"peak": "x"}),
    ):
        path.write_text(bad)
        assert limits.machine("portable", 1, 10**6).peak > 1e8
    assert first.peak > 1e8


def test_a_cache_that_cannot_be_written_only_measures_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", "/proc/nowhere")
    assert limits.machine("portable", 1, 10**6).bandwidth > 1e8


def test_limits_of_control_groups_are_shown_with_their_files(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = "/sys/fs/cgroup/system.slice/twostroke.service"
    memory = MemoryLimit(350 * 10**6, 200 * 10**6, f"memory.max of {box}")
    monkeypatch.setattr(hardware, "memory_limits", lambda _: [memory])
    monkeypatch.setattr(hardware, "core_limits", lambda _: [CoreLimit(0.5, f"cpu.max of {box}")])
    output = " ".join(cli("doctor").out.split())
    assert f"350 MB, 200 MB of it free; limited by memory.max of {box} system" in output
    assert f", 1 core; cpu.max of {box} allows 0.5 memory" in output
    body = json.loads(cli("doctor", "--json").out)
    assert body["machine"]["memory_limit"]["source"] == f"memory.max of {box}"
    assert body["machine"]["core_limit"] == {"num_cores": 0.5, "source": f"cpu.max of {box}"}
    assert body["auto"]["num_threads"] == 1
