"""Step plans become arrays: values that stay between steps are updated, and quickly."""

from __future__ import annotations

import time

import numpy as np

from support.cpu import greedy_request
from twostroke.backends.cpu.page_tables import PageTables
from twostroke.backends.cpu.steps import StepArrays
from twostroke.core.draft_tree import ROOT, DraftBranch
from twostroke.core.request import NO_PAGE
from twostroke.core.step import Slice, StepPlan


def make_request(num_tokens, *pages):
    request = greedy_request(list(range(num_tokens)), logprobs=None)
    request.pages = [list(group) for group in pages]
    return request


def rows_of(tables, requests):
    return tables.rows(requests, np.array([16 * len(request.pages[0]) for request in requests]))


def test_pages_are_copied_as_they_grow():
    tables, request = PageTables(1, 16, 8), make_request(5, [7, 3])
    row = rows_of(tables, [request])[0]
    request.pages[0].append(5)
    assert rows_of(tables, [request])[0] == row
    assert tables.array[row, 0, :3].tolist() == [7, 3, 5]


def test_pages_after_a_preemption_replace_all():
    tables, request = PageTables(1, 16, 8), make_request(5, [7, 3])
    row = rows_of(tables, [request])[0]
    request.pages = [[4, 3, 9]]
    request.num_moves += 1
    assert rows_of(tables, [request])[0] == row
    assert tables.array[row, 0, :3].tolist() == [4, 3, 9]


def test_each_cache_group_has_its_part_of_a_row():
    tables, requests = PageTables(2, 16, 4), [make_request(5, [7, 3], [1, 2]) for _ in range(20)]
    rows = rows_of(tables, requests)
    requests[-1].pages = [[7, 3, 9], [NO_PAGE, 2, 8]]
    assert rows_of(tables, [requests[-1]])[0] == rows[-1]
    flat = tables.array.ravel()  # what the library reads
    assert tables.address == flat.ctypes.data
    parts = [flat[(rows[-1] * 2 + group) * tables.stride :][:3] for group in range(2)]
    assert [parts[0].tolist(), parts[1][1:].tolist()] == [[7, 3, 9], [2, 8]]


def test_a_row_is_used_again_only_after_its_request_is_forgotten():
    tables = PageTables(1, 16, 4)
    requests = [make_request(1, [i]) for i in range(40)]
    rows = rows_of(tables, requests)
    assert len(set(rows)) == 40
    tables.forget(requests[3])
    tables.forget(requests[3])
    assert rows_of(tables, [make_request(1, [99])]) == [rows[3]]


def test_where_rows_are_limited_those_who_are_not_in_the_step_lose_theirs():
    tables = PageTables(1, 16, 8)
    tables.limit(20)
    tables.note_changes()
    requests = [make_request(40, [3 * i, 3 * i + 1, 3 * i + 2]) for i in range(30)]
    for step in (requests[:20], requests[15:30], requests[:12]):
        rows = rows_of(tables, step)
        assert len(set(rows.tolist())) == len(step)
        changed = dict(tables.take_changes().tolist())
        flat = tables.array.reshape(-1)
        assert all(flat[index] == page for index, page in changed.items())
        for row, request in zip(rows, step, strict=True):
            assert tables.array[row, 0, :3].tolist() == request.pages[0]
    branch = DraftBranch(0, ROOT, 40, 2, ((90,),), 1, (), is_copied=False)
    branch_rows = [tables.branch(i, rows[0], branch) for i in range(8)]
    assert not {*branch_rows} & {*rows.tolist()}
    assert len(tables.array) == 20
    rows = rows_of(tables, requests[10:30])  # the branches' rows are free again
    assert len(set(rows.tolist())) == 20


def test_generated_rows_come_first_if_they_are_computed_differently():
    steps = StepArrays(1, 16, 8, one_arithmetic=False)
    old, new = make_request(4, [0]), make_request(3, [1])
    old.tokens += [50, 51]
    plan = StepPlan((Slice(new, 0, 3, True), Slice(old, 2, 4, True)))
    sampled = steps.fill(plan)
    record = steps.record
    assert (record.num_rows, record.num_generated, record.num_slices) == (7, 2, 3)
    assert steps._tokens[:7].tolist() == [50, 51, 0, 1, 2, 2, 3]
    assert steps._slices[:3, :3].tolist() == [[0, 2, 4], [2, 3, 0], [5, 2, 2]]
    assert steps._sampled[:2].tolist() == [1, 4]
    assert [part.request for part in sampled] == [old, new]
    steps._results["token"][:2] = [10, 20]
    assert steps.results(plan, sampled)[0] == [20, 10]


def test_drafts_are_rows_after_the_newest_token_and_all_are_drawn():
    steps = StepArrays(1, 16, 8, one_arithmetic=False)
    old, new = make_request(4, [0]), make_request(3, [1])
    old.tokens += [50, 51]
    plan = StepPlan((Slice(new, 0, 3, True), Slice(old, 5, 1, True, (60, 61))))
    sampled = steps.fill(plan)
    record = steps.record
    assert (record.num_rows, record.num_generated, record.num_sampled) == (6, 3, 4)
    assert steps._tokens[:6].tolist() == [51, 60, 61, 0, 1, 2]
    assert steps._slices[:2, :3].tolist() == [[0, 3, 5], [3, 3, 0]]
    assert steps._sampled[:4].tolist() == [0, 1, 2, 5]
    assert steps._samples["counter"].tolist() == [2, 3, 4, 0]
    steps._results["token"][:4] = [10, 11, 12, 20]
    assert steps.results(plan, sampled)[0] == [20, 10, 11, 12]


def test_each_branch_is_a_run_of_rows_with_its_own_table():
    steps = StepArrays(1, 16, 8, one_arithmetic=False)
    new, old = make_request(3, [1]), make_request(20, [5, 6])
    old.tokens += [50]
    # 60, 61; beside 61 stands 62; beside 60 stands 63. Positions begin at 20, pages hold 16.
    second_branch = DraftBranch(2, 0, 22, 1, ((7,),), 1, (0, 1), is_copied=True)
    first = DraftBranch(3, ROOT, 21, 1, ((8,),), 1, (0,), is_copied=True)
    tree = Slice(old, 20, 1, True, (60, 61, 62, 63), (second_branch, first))
    plan = StepPlan((Slice(new, 0, 3, True), tree))
    sampled = steps.fill(plan)
    record = steps.record
    assert (record.num_rows, record.num_generated, record.num_sampled) == (8, 5, 6)
    assert steps._tokens[:8].tolist() == [50, 60, 61, 62, 63, 0, 1, 2]
    runs = steps._slices[: record.num_slices]
    assert runs[:, :3].tolist() == [[0, 3, 20], [3, 1, 22], [4, 1, 21], [5, 3, 0]]
    tables = [steps.tables.array[row, 0, :2].tolist() for row in runs[:3, 3]]
    assert tables == [[5, 6], [5, 7], [5, 8]]
    assert record.num_stores == 3
    page_tables = runs[:, 3].tolist()
    assert (
        steps._stores.tolist()
        == [[0, page_tables[1]], [0, page_tables[2]], [1, page_tables[1]]][: record.num_stores]
    )
    assert steps._copies.tolist() == [[6, 7], [6, 8]]
    assert steps._samples["counter"].tolist() == [1, 2, 3, 3, 2, 0]
    steps._results["token"][:6] = [10, 11, 12, 13, 14, 20]
    assert steps.results(plan, sampled)[0] == [20, 10, 11, 12, 13, 14]
    steps.fill(StepPlan((Slice(new, 0, 3, True),)))
    assert (record.num_slices, record.num_stores, record.num_copies) == (1, 0, 0)


def test_flattening_many_requests_takes_well_under_a_millisecond():
    steps = StepArrays(1, 16, 8, one_arithmetic=True)
    requests = [make_request(20, [i, i + 1]) for i in range(256)]
    plan = StepPlan(tuple(Slice(request, 19, 1, True) for request in requests))
    times = []
    for _ in range(50):
        started = time.perf_counter()
        sampled = steps.fill(plan)
        steps.results(plan, sampled)
        times.append(time.perf_counter() - started)
    assert min(times) < 1e-3
    assert np.all(steps._sampled[:256] == np.arange(256))


def test_tables_follow_requests_that_arrive_end_grow_and_are_preempted():
    rng, tables = np.random.default_rng(8), PageTables(2, 16, 64)
    alive, page = [], 0
    for _ in range(300):
        if rng.random() < 0.2:
            alive.append(make_request(5, [page], [page + 1]))
            page += 2
        if alive and rng.random() < 0.1:
            tables.forget(alive.pop(int(rng.integers(len(alive)))))
        for request in alive:
            if rng.random() < 0.1:
                request.pages = [[page], [page + 1]]
                request.num_moves += 1
                page += 2
            num_new = int(rng.choice([0, 0, 0, 1, 2]))
            for pages in request.pages:
                pages.extend(range(page, page + num_new))
            page += num_new
        reached = np.array([rng.integers(len(request.pages[0]) + 1) for request in alive], np.int32)
        rows = tables.rows(list(alive), 16 * reached)
        for row, request, count in zip(rows, alive, reached, strict=True):
            for part, pages in zip(tables.array[row], request.pages, strict=True):
                assert part[:count].tolist() == pages[:count]


def test_states_of_all_rows_are_in_the_order_of_the_plan():
    steps = StepArrays(1, 16, 8, one_arithmetic=False, tapped_width=1, returns_tapped=True)
    old, new = make_request(4, [0]), make_request(3, [1])
    old.tokens += [50, 51]
    plan = StepPlan((Slice(new, 0, 3, True), Slice(old, 2, 4, True, (60, 61))))
    steps.fill(plan)
    steps._tapped[:9, 0] = steps._tokens[:9]
    states = steps.row_states(plan)
    assert states is not None
    assert states[:, 0].tolist() == [0, 1, 2, 2, 3, 50, 51, 60, 61]
