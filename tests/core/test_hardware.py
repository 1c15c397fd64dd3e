"""This machine's memory, cores and memory nodes, as the operating system reports them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from twostroke.core import hardware
from twostroke.core.hardware import MemoryNode, memory_nodes, threads_by_node

if TYPE_CHECKING:
    from pathlib import Path


def test_other_programs_have_a_share_of_all_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used_s, clock_s = iter([10.0, 13.0]), iter([100.0, 103.0])
    with monkeypatch.context() as patch:
        patch.setattr(hardware, "_other_programs_s", lambda: next(used_s))
        patch.setattr(hardware, "time", SimpleNamespace(monotonic=lambda: next(clock_s)))
        patch.setattr(hardware.os, "cpu_count", lambda: 2)
        assert hardware.OtherProgramsLoad().share() == 0.5
    real = hardware.OtherProgramsLoad().share()
    assert real is None or real >= 0


def test_the_share_is_unknown_if_the_system_does_not_report_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "_other_programs_s", lambda: None)
    assert hardware.OtherProgramsLoad().share() is None


def made_up(folder: Path, online: str, **cores: str) -> Path:
    """Return a folder that describes NUMA nodes; `cores` has a list file's text for each node."""
    (folder / "online").write_text(online)
    for node, text in cores.items():
        (folder / node).mkdir()
        (folder / node / "cpulist").write_text(text)
    return folder


def allow(monkeypatch: pytest.MonkeyPatch, *cores: int) -> None:
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: set(cores))


def test_nodes_have_their_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, *range(8))
    folder = made_up(tmp_path, "0-1\n", node0="0-1,4-5\n", node1="2-3,6-7\n")
    assert memory_nodes(folder) == (MemoryNode(0, (0, 1, 4, 5)), MemoryNode(1, (2, 3, 6, 7)))


def test_only_allowed_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made_up(tmp_path, "0-2", node0="0-3", node1="4-7", node2="8-11")
    allow(monkeypatch, 2, 3, 11)
    assert memory_nodes(folder) == (MemoryNode(0, (2, 3)), MemoryNode(2, (11,)))
    allow(monkeypatch, 4, 5)
    assert memory_nodes(folder) == (MemoryNode(1, (4, 5)),)


def test_nodes_without_cores_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, 0, 1, 2, 3)
    folder = made_up(tmp_path, "0,2,10", node0="0-1\n", node2="\n", node10="2-3\n")
    assert memory_nodes(folder) == (MemoryNode(0, (0, 1)), MemoryNode(10, (2, 3)))


@pytest.mark.parametrize("online", ["", "none", "0-", "-1", "1-0", "0-1;", "0x1", "²"])
def test_a_damaged_list_of_nodes_gives_no_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, online: str
) -> None:
    allow(monkeypatch, 0, 1)
    assert memory_nodes(made_up(tmp_path, online, node0="0", node1="1")) == ()


@pytest.mark.parametrize("cores", ["", "x", "3-", "1,,2", "2-5", "123456789"])
def test_a_core_missing_or_on_two_nodes_gives_no_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: str
) -> None:
    allow(monkeypatch, *range(6))
    assert memory_nodes(made_up(tmp_path, "0-1", node0="0-2", node1=cores)) == ()


def test_missing_files_give_no_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, 0, 1)
    assert memory_nodes(tmp_path / "nowhere") == ()
    assert memory_nodes(made_up(tmp_path, "0-1", node0="0")) == ()
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_bytes(b"\xff\xfe")
    assert memory_nodes(tmp_path) == ()


def test_this_machine_reports_each_core_at_most_once() -> None:
    cores = [core for node in memory_nodes() for core in node.cores]
    assert len(cores) == len(set(cores))


def sized(*counts: int) -> list[MemoryNode]:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [
        MemoryNode(number, tuple(range(end - count, end)))
        for number, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]


@pytest.mark.parametrize(
    ("cores", "num_threads", "threads"),
    [
        ((4, 4), 8, {0: 4, 1: 4}),
        ((4, 4), 2, {0: 1, 1: 1}),
        ((5, 3), 2, {0: 1, 1: 1}),
        ((2, 2, 2, 2), 2, {1: 1, 3: 1}),
        ((2, 6), 8, {0: 2, 1: 6}),
        ((2, 6), 4, {0: 1, 1: 3}),
        ((2, 2), 8, {0: 4, 1: 4}),
        ((1, 1), 3, {0: 1, 1: 2}),
        ((60, 4), 2, {}),  # both on one node
        ((4, 4), 1, {}),
        ((8,), 8, {}),
        ((), 4, {}),
    ],
)
def test_threads_are_placed(
    cores: tuple[int, ...], num_threads: int, threads: dict[int, int]
) -> None:
    placed = threads_by_node(sized(*cores), num_threads)
    assert {node.number: count for node, count in placed.items()} == threads
    assert list(placed) == sorted(placed, key=lambda node: node.number)


@pytest.mark.parametrize("cores", [(4, 4), (7, 5), (1, 2, 3), (16, 2, 16, 2), (3, 3, 3, 3)])
def test_each_node_has_its_share_to_less_than_one(cores: tuple[int, ...]) -> None:
    for num_threads in range(1, 4 * sum(cores)):
        placed = threads_by_node(sized(*cores), num_threads)
        if not placed:
            continue
        assert sum(placed.values()) == num_threads
        for node in sized(*cores):
            share = num_threads * len(node.cores) / sum(cores)
            assert abs(placed.get(node, 0) - share) < 1
        if num_threads % sum(cores) == 0:
            times = num_threads // sum(cores)
            assert [count // times for count in placed.values()] == list(cores)
