"""Batching policies: when waiting requests start."""

from __future__ import annotations

import pytest

from support.fake_model import FakeModel
from support.invariants import check_scheduler
from support.requests import make_request
from twostroke.core.errors import UsageError
from twostroke.core.options import BatchOptions
from twostroke.core.request import FinishReason
from twostroke.engine.kv_cache import PagePool
from twostroke.engine.scheduler import Batched, Continuous, Scheduler, SchedulerConfig, make_policy


class Bench:
    """A scheduler with a clock that is set by hand."""

    def __init__(self, policy, num_pages=64, max_running=8):
        self.now_s = 100.0
        pool = PagePool(num_pages, 4)
        self.model = FakeModel(num_pages, 4)
        config = SchedulerConfig(64, max_running=max_running, token_budget=64)
        self.scheduler = Scheduler(config, pool, None, policy, lambda: self.now_s)

    def add(self, *ids, max_tokens=2, **options):
        """Add requests; return the last one."""
        for request_id in ids:
            request = make_request(request_id, max_tokens=max_tokens, **options)
            request.arrival_s = 0.0
            self.scheduler.add(request)
        return request

    def step(self):
        """Run a step; return the ids of the requests in it."""
        plan = self.scheduler.plan()
        if plan is None:
            return []
        self.scheduler.commit(plan, self.model.run(plan))
        check_scheduler(self.scheduler)
        return [slice_.request.id for slice_ in plan.slices]


def test_continuous_lets_requests_join_at_any_step():
    bench = Bench(Continuous())
    assert bench.scheduler.wait_s is None
    bench.add("a")
    assert bench.scheduler.wait_s == 0
    assert bench.step() == ["a"]
    bench.add("b")
    assert bench.step() == ["a", "b"]
    assert bench.step() == ["b"]
    assert bench.step() == []


def test_dynamic_starts_a_full_batch_at_once_and_lets_nobody_join():
    bench = Bench(Batched(2, 10.0))
    bench.add("a")
    assert bench.step() == []
    bench.add("b", "c")
    assert bench.step() == ["a", "b"]
    bench.add("d")
    assert bench.step() == ["a", "b"]
    assert bench.step() == ["c", "d"]


def test_dynamic_starts_an_incomplete_batch_after_the_first_has_waited():
    bench = Bench(Batched(3, 10.0))
    bench.add("a")
    bench.now_s += 6
    bench.add("b")
    assert bench.step() == []
    assert bench.scheduler.wait_s == pytest.approx(4.0)
    bench.now_s += 4
    assert bench.scheduler.wait_s == 0
    assert bench.step() == ["a", "b"]


def test_static_starts_only_full_batches():
    bench = Bench(Batched(2))
    bench.add("a")
    bench.now_s += 1e6
    assert bench.step() == []
    assert bench.scheduler.wait_s is None
    bench.add("b", "c")
    assert bench.step() == ["a", "b"]
    assert bench.step() == ["a", "b"]
    assert bench.step() == []


@pytest.mark.parametrize("policy", [Batched(3), Batched(3, 1e6)])
def test_flush_starts_what_is_left_in_batches(policy):
    bench = Bench(policy)
    bench.add("a", "b", "c", "d", max_tokens=1)
    bench.scheduler.flush()
    assert bench.step() == ["a", "b", "c"]
    assert bench.step() == ["d"]
    bench.add("e")
    assert bench.step() == [], "the flush was for those who waited then"


def test_flush_of_an_empty_queue_is_forgotten():
    bench = Bench(Batched(2))
    bench.scheduler.flush()
    bench.add("a")
    assert bench.step() == []


def test_a_batch_takes_the_most_urgent():
    bench = Bench(Batched(2))
    first = bench.add("a")
    bench.add("b", priority=5)
    bench.scheduler.finish(first, FinishReason.CANCEL)
    bench.add("c", priority=1)
    assert bench.step() == ["c", "b"]


def test_preempted_request_rejoins_its_batch():
    bench = Bench(Batched(3), num_pages=6)
    bench.add("a", "b", "c", max_tokens=10)
    bench.add("d", "e", "f", max_tokens=1)
    ids = set()
    while bench.scheduler.stats().num_waiting > 3 or len(ids) < 3:
        ids |= set(bench.step())
    for _ in range(100):
        ran = bench.step()
        if "d" in ran:
            break
        assert set(ran) <= {"a", "b", "c"}
    assert bench.scheduler.stats().num_preemptions > 0
    assert not {"a", "b", "c"} & set(ran)


def test_batch_that_cannot_run_together_is_refused():
    with pytest.raises(UsageError, match="max_running"):
        Bench(Batched(9))


def test_policies_are_made_by_name():
    options = {"batch_size": 4, "max_wait_s": 0.5}
    assert make_policy(BatchOptions("continuous", **options)) == Continuous()
    assert make_policy(BatchOptions("dynamic", **options)) == Batched(4, 0.5)
    assert make_policy(BatchOptions("static", **options)) == Batched(4)
    waits = BatchOptions("static", fill_timeout_s=2.0, **options)
    assert make_policy(waits) == Batched(4, 2.0)
