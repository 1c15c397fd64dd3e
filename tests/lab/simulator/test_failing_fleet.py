"""Replicas that fail in a simulation: hand-counted schedules, a plain twin, and invariants."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from support.configs import write_config
from twostroke.backends.interface import BackendFacts
from twostroke.backends.kv_size import CacheSize
from twostroke.core.errors import UsageError
from twostroke.core.options import BatchOptions, CacheOptions
from twostroke.engine.engine import build_scheduler
from twostroke.fleet.router.engine_killers import MAX_LOST_ATTEMPTS
from twostroke.fleet.router.options import RouteOptions
from twostroke.fleet.routing.policy import POLICIES
from twostroke.lab.measure.requests import COMPLETED, FAILED, REFUSED, Objectives
from twostroke.lab.planner import find_device, load_planned_model
from twostroke.lab.planner.roofline import Totals
from twostroke.lab.simulator import (
    RequestArrival,
    SimulationSetup,
    SyntheticWorkload,
    Workload,
    simulate,
)
from twostroke.lab.simulator.availability import play_failures
from twostroke.lab.simulator.failing_fleet import (
    LOST_STREAM,
    NO_REPLICA,
    NOT_VALID,
    QUEUE_FULL,
    TOO_MANY_LOSSES,
    FailingFleet,
)
from twostroke.lab.simulator.failures import ENGINE, REPLICA, SPOT, Failure, RouterTimes
from twostroke.lab.simulator.fleet import START_S
from twostroke.lab.simulator.replica import Clock, SimulatedReplica

AT_ONCE = RouterTimes(detection_s=0.0)


def play(arrivals, failures, times=AT_ONCE, *, num_replicas=1, max_waiting=1 << 20, running=64):
    """Serve requests with steps of a second; return the fleet, with all requests ended."""
    clock = Clock(START_S)
    batch = BatchOptions(
        max_running=running, max_waiting_requests=max_waiting, token_budget=1 << 14
    )
    facts = BackendFacts(
        name="simulated",
        detail="",
        num_threads=1,
        num_pages=4096,
        page_size=16,
        windows=(None,),
        weight_bytes=0,
        cache_bytes=0,
    )
    size = CacheSize(512, 4096, 16, 0)

    def new_replica():
        scheduler = build_scheduler(
            CacheOptions(prefix_cache=False), batch, size=size, facts=facts, clock=clock.read
        )
        return SimulatedReplica(scheduler, seconds_of_steps, clock, 100, 16)

    fleet = FailingFleet(
        new_replica, num_replicas, "round-robin", clock=clock, vocab_size=100, times=times
    )
    fleet.run(Workload("some", tuple(arrivals)), failures)
    assert sorted(fleet.logs) == list(range(len(arrivals)))
    return fleet


def seconds_of_steps(_):
    return Totals(1.0, 1, 1)


def times_of(fleet, number):
    """Return when the first and the last token of a request came, since the start of the load."""
    timings = fleet.logs[number].timings
    return timings.first_token_s - START_S, timings.last_token_s - START_S


def test_the_router_times_have_the_defaults_of_the_router():
    options = RouteOptions(replicas=("http://127.0.0.1:1",))
    times = RouterTimes()
    assert (times.wait_s, times.resume_wait_s) == (options.wait_s, options.resume_wait_s)


def test_a_stream_continues_at_another_replica_after_the_tokens_that_came():
    # Tokens come at 1, 2 and 3; the machine dies at 3.25, and the other one computes from then on.
    fleet = play([RequestArrival(0.0, 4, 6)], [Failure(3.25, 0, REPLICA, 100.0)], num_replicas=2)
    assert times_of(fleet, 0) == (1.0, 6.25)
    assert [pause.seconds for pause in fleet.pauses] == [1.25]
    assert fleet.logs[0].outcome == COMPLETED


def test_a_machine_is_missed_only_after_the_detection():
    fleet = play(
        [RequestArrival(0.0, 4, 6), RequestArrival(3.5, 4, 1), RequestArrival(3.75, 4, 1)],
        [Failure(3.25, 0, REPLICA, 100.0)],
        RouterTimes(detection_s=2.0),
        num_replicas=2,
    )
    # One of the two later requests goes to the dead machine, and is sent again at 5.25.
    assert times_of(fleet, 0) == (1.0, 8.25)
    ends = sorted(times_of(fleet, number)[1] for number in (1, 2))
    assert ends[0] < 5.25 < ends[1]
    assert fleet.pauses[0].seconds == pytest.approx(3.25)


def test_a_request_without_a_token_waits_for_a_replica_and_is_refused_after_that():
    times = RouterTimes(detection_s=0.0, wait_s=5.0, resume_wait_s=60.0)
    arrivals = [RequestArrival(0.0, 4, 9), RequestArrival(2.75, 4, 2), RequestArrival(4.5, 4, 2)]
    fleet = play(arrivals, [Failure(2.5, 0, REPLICA, 6.0)], times)
    # It is back at 8.5; the health check of 9.0 finds it, after the second request gave up at 7.75.
    assert fleet.causes == {1: NO_REPLICA}
    assert fleet.logs[1].outcome == REFUSED
    assert times_of(fleet, 0) == (1.0, 16.0)  # two tokens before, seven from 9 on
    assert times_of(fleet, 2) == (10.0, 11.0)
    assert [pause.seconds for pause in fleet.pauses] == [8.0]


def test_a_stream_ends_with_an_error_after_the_resume_wait():
    arrivals = [RequestArrival(0.0, 4, 9)]
    for resume_wait_s, down_s in ((3.0, 6.0), (0.0, 1.0)):
        times = RouterTimes(detection_s=0.0, resume_wait_s=resume_wait_s)
        fleet = play(arrivals, [Failure(2.5, 0, REPLICA, down_s)], times)
        assert fleet.causes == {0: LOST_STREAM}
        assert fleet.logs[0].outcome == FAILED
        assert fleet.logs[0].num_output == 2
        assert not fleet.pauses


def test_requests_in_a_servers_queue_wait_for_its_next_engine():
    # One runs at a time. The engine dies at 2.5: the running request moves, the queued one stays.
    arrivals = [RequestArrival(0.0, 4, 4), RequestArrival(0.25, 4, 4), RequestArrival(0.5, 4, 1)]
    fleet = play(arrivals, [Failure(2.5, 0, ENGINE, 8.0)], num_replicas=2, running=1)
    assert times_of(fleet, 1)[0] == 1.25  # at the other replica
    assert times_of(fleet, 2)[0] == 11.5  # after the restart at 10.5
    # The stream waits for the second request's end at 4.25, and then gets its two missing tokens.
    assert times_of(fleet, 0) == (1.0, 6.25)


def test_a_spot_machine_drains_after_the_notice():
    arrivals = [RequestArrival(0.0, 4, 3), RequestArrival(0.25, 4, 9), RequestArrival(1.5, 4, 1)]
    fleet = play(arrivals, [Failure(1.0, 0, SPOT, 50.0, notice_s=4.0)], num_replicas=2)
    assert times_of(fleet, 0) == (1.0, 3.0)
    assert times_of(fleet, 2)[0] == 3.25, "the third request goes to the other replica"
    assert not fleet.pauses
    late = play(arrivals, [Failure(1.0, 0, SPOT, 50.0, notice_s=1.5)], num_replicas=2)
    assert [pause.request for pause in late.pauses] == [0]
    assert late.num_failures == 1


def test_a_stream_is_given_up_after_many_losses():
    failures = [Failure(5.25 * n + 1.5, 0, REPLICA, 0.25) for n in range(12)]
    fleet = play([RequestArrival(0.0, 4, 300)], failures)
    assert fleet.causes == {0: TOO_MANY_LOSSES}
    assert len(fleet.pauses) == MAX_LOST_ATTEMPTS - 1


def test_full_queues_and_long_prompts_are_refused():
    arrivals = [RequestArrival(0.0, 4, 4)] * 7 + [RequestArrival(0.0, 600, 4)]
    fleet = play(arrivals, [], num_replicas=2, max_waiting=2, running=1)
    assert Counter(fleet.causes.values()) == {QUEUE_FULL: 3, NOT_VALID: 1}


class Twin:
    """One replica before a router in ticks of 1/32 s, with steps of a second: a plain twin.

    Attributes:
        ends: for each request, why it failed, and the ticks of its first and its last token.
        pauses: requests and ticks.
    """

    TICK = 32
    CHECK = 16

    def __init__(self, arrivals, failures, times):
        self.ends = {}
        self.pauses = []
        self.arrivals = {}
        for number, arrival in enumerate(arrivals):
            self.arrivals.setdefault(self.ticks(arrival.at_s), []).append(number)
        self.outputs = [arrival.num_output for arrival in arrivals]
        self.num_tokens, self.first, self.last = Counter(), {}, {}
        self.losses = Counter()
        self.failures = {self.ticks(failure.at_s): failure for failure in failures}
        self.wait = self.ticks(times.wait_s)
        self.resume_wait = self.ticks(times.resume_wait_s)
        self.detection = self.ticks(times.detection_s)
        self.in_step, self.queued, self.running, self.held = [], [], [], []
        self.waiting = {}  # with the tick at which they give up
        self.step_end = None
        self.is_up = self.is_open = True
        self.is_failing = False
        self.checked = 0
        self.lost_at = self.back_at = self.gone_at = self.open_at = self.close_at = None
        self.now = 0
        self.has_moved = set()

    def ticks(self, seconds):
        ticks = seconds * self.TICK
        assert ticks == int(ticks)
        return int(ticks)

    def run(self):
        while len(self.ends) < len(self.outputs):
            self.finish_step()
            self.change()
            self.give_up()
            for number in self.arrivals.get(self.now, ()):
                self.send(number)
            self.start_step()
            self.now += 1

    def finish_step(self):
        if self.step_end != self.now:
            return
        self.step_end = None
        for number in self.in_step:
            self.num_tokens[number] += 1
            if number in self.has_moved and number in self.last:
                self.pauses.append((number, self.now - self.last[number]))
            self.has_moved.discard(number)
            self.first.setdefault(number, self.now)
            self.last[number] = self.now
            if self.num_tokens[number] == self.outputs[number]:
                self.end(number, "")
                self.running.remove(number)

    def start_step(self):
        if self.step_end is None and self.is_up and (self.running or self.queued):
            self.running += self.queued
            self.queued = []
            self.in_step = list(self.running)
            self.step_end = self.now + self.TICK

    def end(self, number, cause):
        assert number not in self.ends
        self.ends[number] = cause, self.first.get(number, 0), self.last.get(number, 0)

    def send(self, number, give_up=None):
        if not self.is_open:
            wait = self.resume_wait if number in self.first else self.wait
            self.waiting[number] = self.now + wait if give_up is None else give_up
        elif self.is_up:
            self.queued.append(number)
        else:
            self.held.append(number)

    def lose(self, numbers):
        for number in numbers:
            self.losses[number] += 1
            self.has_moved.add(number)
            if self.losses[number] >= MAX_LOST_ATTEMPTS:
                self.end(number, TOO_MANY_LOSSES)
            elif number in self.first and not self.resume_wait:
                self.end(number, LOST_STREAM)
            else:
                self.send(number)

    def give_up(self):
        for number, give_up in list(self.waiting.items()):
            if give_up == self.now:
                del self.waiting[number]
                self.end(number, LOST_STREAM if number in self.first else NO_REPLICA)

    def next_check(self):
        return self.checked + ((self.now - self.checked) // self.CHECK + 1) * self.CHECK

    def change(self):
        failure = self.failures.get(self.now)
        if failure is not None and not self.is_failing:
            self.is_failing = True
            self.failure = failure
            self.gone_at = self.now + self.ticks(failure.notice_s)
            if failure.notice_s:
                self.is_open = False
        if self.gone_at == self.now:
            self.fail()
        if self.lost_at == self.now:
            lost = [*self.running, *self.queued, *self.held]
            self.running, self.queued, self.held = [], [], []
            self.is_open, self.checked = False, self.now
            self.lose(lost)
        if self.close_at == self.now and not self.is_up:
            self.is_open, self.checked = False, self.now
        if self.back_at == self.now:
            self.is_up = True
            self.is_failing = False
            self.queued, self.held = self.held, []
            self.open_at = self.next_check()
        if self.open_at == self.now and not self.is_failing:
            self.is_open = True
            waiting, self.waiting = self.waiting, {}
            for number in waiting:
                self.send(number)

    def fail(self):
        failure, self.is_up, self.step_end = self.failure, False, None
        self.back_at = self.now + self.ticks(failure.down_s)
        if failure.kind == ENGINE:
            lost, self.running = self.running, []
            self.held, self.queued = self.queued, []
            if lost:
                self.is_open, self.checked = False, self.now
                self.lose(lost)
            else:
                self.close_at = self.next_check()
        else:
            down = self.ticks(failure.down_s)
            wait = 0 if failure.notice_s else min(self.detection, down)
            self.lost_at = self.now + wait


@pytest.mark.seeds(20)
def test_one_replica_fails_as_in_a_plain_twin(seed):
    rng = random.Random(seed)
    # Different fractions of a second keep events apart whose order would not be defined.
    times = RouterTimes(
        detection_s=rng.choice((0.0, rng.randint(0, 3) + 7 / 32)),
        wait_s=rng.randint(0, 8) + 5 / 32,
        resume_wait_s=rng.choice((0.0, rng.randint(1, 30) + 5 / 32)),
    )
    arrivals = sorted(
        (
            RequestArrival(rng.randrange(160) / 4, rng.randint(1, 20), rng.randint(1, 12))
            for _ in range(rng.randint(1, 25))
        ),
        key=lambda arrival: arrival.at_s,
    )
    failures = []
    for at in sorted(rng.sample(range(200), rng.randint(1, 12))):
        kind = rng.choice((ENGINE, REPLICA, SPOT))
        notice_s = rng.randint(0, 6) + 9 / 32 if kind == SPOT else 0.0
        failures.append(Failure(at / 4 + 1 / 32, 0, kind, rng.randint(0, 12) + 3 / 32, notice_s))
    fleet = play(arrivals, failures, times)
    twin = Twin(arrivals, failures, times)
    twin.run()
    for number, (cause, first, last) in twin.ends.items():
        assert fleet.causes.get(number, "") == cause, number
        if not cause:
            assert times_of(fleet, number) == (first / 32, last / 32), number
        assert (fleet.logs[number].outcome == COMPLETED) is not bool(cause)
    assert sorted((pause.request, 32 * pause.seconds) for pause in fleet.pauses) == sorted(
        twin.pauses
    )


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    path = write_config(
        tmp_path_factory.mktemp("model") / "config.json", "8B", max_position_embeddings=8192
    )
    batch = BatchOptions(token_budget=2048)
    return SimulationSetup(
        load_planned_model(path), find_device("H100-SXM"), batch=batch, replicas=3
    )


LOAD = SyntheticWorkload(20.0, "gamma", count=100, prompt=400, output=40, spread=1.0, shared=64)


@pytest.mark.parametrize("routing", POLICIES)
def test_without_failures_the_result_is_that_of_a_simulation(setup, routing):
    load, several = LOAD.load(1), replace(setup, routing=routing, overhead_s=0.005)
    plain = simulate(several, load, Objectives(ttft_s=0.1))
    played = play_failures(several, load, ())
    assert [(log.outcome, log.num_cached) for log in played.logs] == [
        (log.outcome, log.num_cached) for log in plain.logs
    ]
    for name in ("ttft", "e2e"):
        times = [[log.latencies[name] for log in logs] for logs in (played.logs, plain.logs)]
        assert times[0] == pytest.approx(times[1], rel=1e-9)
    assert not played.causes
    assert not played.pauses


@pytest.mark.seeds(2)
def test_each_request_ends_once_and_with_all_its_tokens(setup, seed):
    rng = random.Random(seed)
    load = LOAD.load(seed)
    end_s = load.arrivals[-1].at_s
    failures = [
        Failure(
            rng.uniform(0, end_s),
            rng.randrange(3),
            kind,
            rng.uniform(0, 4),
            rng.uniform(0, 2) if kind == SPOT else 0.0,
        )
        for kind in rng.choices((ENGINE, REPLICA, SPOT), k=15)
    ]
    failures.sort(key=lambda failure: failure.at_s)
    routing = rng.choice(list(POLICIES))
    times = RouterTimes(rng.uniform(0, 1), rng.uniform(0, 2), rng.uniform(0, 2))
    several = replace(setup, routing=routing, acceptance=rng.choice((None, 0.7)))
    run = play_failures(several, load, failures, times)
    assert run == play_failures(several, load, failures, times)
    assert len(run.logs) == 100
    for number, (log, arrival) in enumerate(zip(run.logs, load.arrivals, strict=True)):
        assert log.sent_s == pytest.approx(START_S + arrival.at_s)
        assert (log.outcome == COMPLETED) is (number not in run.causes)
        timings = log.timings
        if log.outcome == COMPLETED:
            assert timings.arrival_s < timings.first_token_s <= timings.last_token_s
            assert log.num_output == arrival.num_output
        else:
            assert log.num_output < arrival.num_output
    assert run.num_failures <= 15


def test_failures_that_do_not_exist_are_refused(setup):
    load = LOAD.load(0)
    with pytest.raises(UsageError, match="no 'engine' failure of replica 3"):
        play_failures(setup, load, [Failure(1.0, 3, ENGINE, 1.0)])
    with pytest.raises(UsageError, match="no 'fire' failure"):
        play_failures(setup, load, [Failure(1.0, 0, "fire", 1.0)])
    with pytest.raises(UsageError, match="cannot be combined with failures"):
        play_failures(replace(setup, prefill_replicas=1), load, ())
