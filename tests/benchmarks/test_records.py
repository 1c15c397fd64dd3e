"""What is kept of a measurement, and what BENCHMARKS.md makes of it."""

from __future__ import annotations

import pytest

import bench_report
import records
from goals import GOALS, Goal, rows_of
from plots import Bar, draw_bars
from records import Entry, Record
from texts import FreshPrompts
from workload import WORKS, Work

_FACTS = {"date": "2026-01-01", "processor": "CPU (R) 9", "cores": 2, "commit": "abc"}


def _record(ours: list[float], theirs: list[list[float]], **more) -> Record:
    peers = [Entry("llama.cpp", f"way {i}", runs) for i, runs in enumerate(theirs)]
    entries = [Entry("Twostroke", "", ours), *peers]
    fields = {"row": "decode-1", "model": "smollm2", "unit": "tokens/s", "command": "make it"}
    return Record(name="decode", entries=entries, facts=_FACTS, **(fields | more))


def test_the_ratio_is_to_the_better_of_a_peers_ways():
    assert _record([30, 10, 20], [[5], [10, 4, 40]]).ratio("llama.cpp") == pytest.approx(2)


def test_of_times_and_sizes_the_lower_one_is_better():
    record = _record([0.5], [[2.0], [1.0]], lower_is_better=True, unit="s")
    assert record.best("llama.cpp").way == "way 1"
    assert record.ratio("llama.cpp") == pytest.approx(2)


def test_a_row_replaces_itself_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROWS", tmp_path)
    records.keep(_record([1], [[1]]))
    records.keep(_record([2], [[1]], row="decode-8"))
    records.keep(_record([3], [[1]]))
    records.keep(_record([4], [[1]], setting="avx2"))
    ((machine, kept),) = records.all_records()
    assert machine.startswith("cpu-9-2-cores-")
    assert sorted(record.best("Twostroke").median for record in kept) == [2, 3, 4]
    assert _record([3], [[1]]) in kept


def test_a_goal_is_reached_only_when_all_its_parts_are():
    goal = Goal("decode-1", "smollm2", 1.5, mbu=0.85)
    reached = _record([20], [[10]], others={"mbu": 0.9})
    for record, word in (
        (reached, "yes"),
        (_record([20], [[10]], others={"mbu": 0.5}), "no"),
        (_record([10], [[10]], others={"mbu": 0.9}), "no"),
        (_record([20], [], others={"mbu": 0.9}), "not measured"),
    ):
        assert bench_report._goal_cells(goal, record)[6] == word


def test_a_row_that_was_not_measured_says_how_to_measure_it():
    cells = bench_report._goal_cells(Goal("decode-8", "smollm2", 3), None)
    assert cells[0] == "decode, 8 streams together"
    assert 'make bench-peers BENCH_ARGS="--models smollm2 --only decode-8"' in cells[2]


def test_every_goal_names_a_row_that_something_measures():
    for goal in GOALS:
        assert goal.row in WORKS or goal.row.partition("-")[0] in {
            "start", "memory", "serve", "overhead",
        }  # fmt: skip


def test_a_model_without_goals_gets_rows_too():
    assert "decode-1" in rows_of("another", list(WORKS))


def test_a_plot_has_the_names_of_its_rows(tmp_path):
    path = tmp_path / "bars.svg"
    draw_bars(path, "a < b", [Bar("one & two", 2.0, 1.5), Bar("three", 0.2, 3.0)])
    drawn = path.read_text()
    assert "a &lt; b" in drawn
    assert "one &amp; two" in drawn


def test_kept_tokens_stay_and_the_rest_is_fresh():
    prompts, work = FreshPrompts(list(range(1000))), Work("", 2, 40, 8, kept_length=30)
    first, second = prompts.job(work), prompts.job(work)
    assert [prompt[:30] for prompt in first] == [prompt[:30] for prompt in second]
    assert first[0][:30] != first[1][:30]
    assert first[0][30:] != second[0][30:]
    assert {len(prompt) for prompt in first} == {40}


def test_our_other_bits_are_no_peers_and_have_columns_of_their_own():
    others = {"mbu": 0.5, "with_bits": {"8": {"mbu": 0.7}}}
    record = _record([20], [[10]], others=others)
    record.entries.append(Entry(records.ours_with(8), "", [30]))
    assert record.peers == ["llama.cpp"]
    goal = Goal("decode-1", "smollm2", 1.5, mbu=0.85)
    cells = bench_report._goal_cells(goal, record)
    assert cells[4:] == ("2.00, 50% of the bandwidth", "1.5 x, 85% of the bandwidth", "no")
    assert bench_report._bits_cell(goal, record, 8) == "3.00, 70% of the bandwidth"
    assert not bench_report._bits_cell(goal, record, 15)


def test_a_row_that_cannot_be_kept_leaves_the_old_one_and_a_damaged_one_is_named(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(records, "ROWS", tmp_path)
    records.keep(_record([1], [[1]]))
    (path,) = tmp_path.glob("*/*.json")
    old = path.read_text()
    blocked = path.with_name(path.name + ".part")
    blocked.symlink_to("/dev/full")
    with pytest.raises(SystemExit, match="cannot be written: No space left"):
        records.keep(_record([2], [[1]]))
    assert path.read_text() == old
    assert not blocked.is_symlink()
    path.write_text(old[:200])
    with pytest.raises(SystemExit, match="is damaged"):
        list(records.all_records())
