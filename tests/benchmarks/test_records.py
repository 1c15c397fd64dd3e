"""What is kept of a measurement, and what BENCHMARKS.md makes of it."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import write_report as bench_report
from benchmarks.common import records
from benchmarks.common.goals import GOALS, Goal, rows_of
from benchmarks.common.records import Entry, Record
from benchmarks.common.texts import FreshPrompts
from benchmarks.common.workload import WORKS, Work

_FACTS = {"date": "2026-01-01", "processor": "CPU (R) 9", "cores": 2, "commit": "abc"}


def _record(ours: list[float], theirs: list[list[float]], **changed_fields) -> Record:
    peers = [Entry("llama.cpp", f"way {i}", runs) for i, runs in enumerate(theirs)]
    entries = [Entry("Twostroke", "", ours), *peers]
    fields = {"row": "decode-1", "model": "smollm2", "unit": "tokens/s", "command": "make it"}
    return Record(name="decode", entries=entries, facts=_FACTS, **(fields | changed_fields))


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
    ((machine, machine_records),) = records.all_records()
    assert machine.startswith("cpu-9-2-cores-")
    assert sorted(record.best("Twostroke").median for record in machine_records) == [2, 3, 4]
    assert _record([3], [[1]]) in machine_records


def test_a_summary_has_both_figures_their_ratio_and_that_of_8_bits():
    goal = Goal("decode-1", "smollm2", 1.5)
    record = _record([20], [[10]])
    record.entries.append(Entry(records.ours_with(8), "", [30]))
    assert record.peers == ["llama.cpp"]
    assert bench_report.summary(goal, record) == "20 tokens/s, llama.cpp 10: **2.00** (–, 3.00)"
    assert bench_report.summary(goal, _record([20], [])) == "20 tokens/s"
    assert bench_report.summary(goal, None) == "–"


def test_every_goal_names_a_row_that_something_measures():
    for goal in GOALS:
        assert goal.row in WORKS or goal.row.partition("-")[0] in {
            "start", "memory", "serve", "overhead",
        }  # fmt: skip


def test_a_model_without_goals_gets_rows_too():
    assert "decode-1" in rows_of("another", list(WORKS))


def test_kept_tokens_stay_and_the_rest_is_fresh():
    prompts, work = FreshPrompts(list(range(1000))), Work("", 2, 40, 8, kept_length=30)
    first, second = prompts.job(work), prompts.job(work)
    assert [prompt[:30] for prompt in first] == [prompt[:30] for prompt in second]
    assert first[0][:30] != first[1][:30]
    assert first[0][30:] != second[0][30:]
    assert {len(prompt) for prompt in first} == {40}


def test_a_damaged_row_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROWS", tmp_path)
    records.keep(_record([1], [[1]]))
    (path,) = tmp_path.glob("*/*.json")
    path.write_text(path.read_text()[:200])
    with pytest.raises(SystemExit, match="is damaged"):
        list(records.all_records())


def test_rows_of_ranks_are_a_section_that_changes_no_other():
    alone = {"cpu": [_record([20], [[10]])]}
    figures = {
        "case": {"title": "tensor 2", "at_least": 0.9},
        "ratio": 0.95, "ratios": [0.9, 1.0], "link": "shared", "collective_share": 0.08,
        "expected": {"ratio": 0.96, "collective_share": 0.07, "waiting_share": 0.06,
                     "moving_share": 0.01},
        "waiting": [0.08, 0.02],
    }  # fmt: skip
    ranks = dataclasses.replace(
        _record([20], [], row="parallel-tensor2-decode-1", others=figures),
        facts={**_FACTS, "date": "2027-01-01"},
        engines=dict.fromkeys(("Twostroke", "Twostroke, tensor 2"), ""),
    )
    both = {"cpu": [*alone["cpu"], ranks], "another": [ranks]}
    assert list(bench_report._speed(both)) == list(bench_report._speed(alone))
    assert not list(bench_report._parallel(alone))
    text = "\n".join(bench_report._parallel(both))
    assert "0.950 (0.90 to 1.00) | 0.9 | 8.0% | 7.0% = 6.0% waiting, 1.0% moving" in text
    assert "8.0%, 2.0%" in text
