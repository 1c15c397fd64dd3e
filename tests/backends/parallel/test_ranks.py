"""Rank 0 learns who is ready, who failed, who is dead and who is frozen."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from support.waiting import wait_for
from twostroke.backends.parallel import ranks as module
from twostroke.backends.parallel.connection import open_connection
from twostroke.backends.parallel.rank_messages import (
    Rank0Heartbeat,
    RankFailed,
    RankHeartbeat,
    RankHello,
    RankLeaves,
    RankReady,
    Reset,
    version,
)
from twostroke.backends.parallel.ranks import HEARTBEAT_INTERVAL_S, Ranks
from twostroke.core.errors import BackendError, MemoryLimitError, RanksLostError
from twostroke.core.transport.frames import ConnectionLostError


class FakeRank:
    """A rank in a thread, which answers as its test wants."""

    def __init__(self, rank, number, loads):
        ours, theirs = socket.socketpair()
        self.connection, self.rank_end = open_connection(ours), open_connection(theirs)
        self.beats, self.killed, self.received = True, False, []
        self.waits, self.progress = False, 0
        self.ends_after_s = 0.0
        self.rank_end.send(RankHello(rank, number, "here", 1, 10**9, 1))
        if loads:
            self.rank_end.send(RankReady(1, 2, 3))
        self.thread = threading.Thread(target=self.live, daemon=True)
        self.thread.start()

    def live(self):
        try:
            while True:
                if self.beats:
                    self.rank_end.try_send(RankHeartbeat(self.waits, self.progress))
                if message := self.rank_end.receive(HEARTBEAT_INTERVAL_S / 4):
                    self.received.append(message)
                    if isinstance(message, Reset) and self.beats:
                        self.rank_end.send(RankFailed("", "RanksLostError", lost=True))
                        self.rank_end.send(RankReady(1, 2, 3))
        except ConnectionLostError:
            self.rank_end.close()

    local_pid = None

    def exit_reason(self):
        return None

    def kill(self):
        self.killed = True
        self.connection.close()

    def wait(self, timeout_s):
        self.waited_s = timeout_s
        time.sleep(min(timeout_s, self.ends_after_s))
        self.kill()


class Group:
    """Two fake ranks and what rank 0 knows of them."""

    def __init__(self):
        self.started, self.aborted = [], threading.Event()
        self.own_progress = 0
        self.version, self.loads = version(), True
        self.ranks = Ranks(3, self, self)  # it is their link, too

    def __call__(self, rank):
        self.started.append(FakeRank(rank, self.version, self.loads))
        return self.started[-1]

    def abort(self):
        self.aborted.set()

    def progress(self):
        return self.own_progress

    def close(self):
        pass


@pytest.fixture
def group():
    group = Group()
    yield group
    group.ranks.close()
    assert all(fake.killed for fake in group.started)


def test_ranks_that_live_are_left_alone(group):
    assert sorted(group.ranks.wait_for_hellos()) == [1, 2]
    group.ranks.wait_until_ready()
    time.sleep(1.2)
    assert not group.ranks.lost
    assert not group.aborted.is_set()
    assert Rank0Heartbeat() in group.started[0].received


@pytest.mark.parametrize("how", ["dead", "frozen"])
def test_a_lost_rank_is_noticed_and_started_again(group, how):
    group.ranks.wait_until_ready()
    if how == "dead":
        group.started[1].rank_end.cut()
    else:
        group.started[1].beats = False
    assert group.aborted.wait(20)
    error = group.ranks.cause(5)
    assert isinstance(error, RanksLostError)
    assert str(error).startswith("Rank 2 ")
    with pytest.raises(RanksLostError):
        group.ranks.send(b"a step")
    assert group.started[1].killed
    assert group.ranks.restart() == [2]
    group.ranks.reset(Reset(""), {2})
    group.ranks.wait_until_ready(5)
    assert not group.ranks.lost
    assert len(group.started) == 3


def test_a_silent_rank_that_waits_for_a_processor_has_more_time(group, monkeypatch):
    class Monitor:
        is_starved = True

        def __init__(self, pid):
            pass

        def start(self):
            pass

    monkeypatch.setattr(module, "StarvationMonitor", Monitor)
    group.ranks.wait_until_ready()
    group.started[1].local_pid = os.getpid()
    group.started[1].beats = False
    assert not group.aborted.wait(4)  # twice the timeout
    Monitor.is_starved = False
    assert group.aborted.wait(20)
    assert str(group.ranks.cause(5)).startswith("Rank 2 has not responded")


def test_a_rank_that_freezes_before_it_begins_again_is_noticed_as_soon(group):
    group.ranks.wait_until_ready()
    group.started[1].beats = False
    group.ranks.reset(Reset(""), set())
    assert group.aborted.wait(20)  # not as late as one that loads
    with pytest.raises(RanksLostError, match="Rank 2 has not responded"):
        group.ranks.wait_until_ready()


def test_a_link_that_moves_nothing_is_given_up_only_if_all_wait(group):
    group.ranks.wait_until_ready()
    rank_one, two = group.started
    group.own_progress = rank_one.progress = two.progress = 5
    rank_one.waits, two.waits = True, False  # it computes
    assert not group.aborted.wait(1.3)
    two.waits = True
    for progress in range(7, 27, 2):  # a large message is on its way
        two.progress = progress
        assert not group.aborted.wait(0.15)
    assert group.aborted.wait(20)
    assert str(group.ranks.cause(5)).startswith("Nothing arrives over the link")
    assert not group.ranks.lost
    group.ranks.reset(Reset(""), set())
    assert str(group.ranks.cause(0)) == "The connection between the ranks broke."


def test_a_failure_is_told_with_its_rank_and_kind(group):
    group.ranks.wait_until_ready()
    group.started[1].rank_end.send(RankFailed("for us", "RanksLostError", lost=True))
    group.started[0].rank_end.send(RankFailed("No memory.", "MemoryLimitError"))
    error = group.ranks.cause(5)
    assert isinstance(error, MemoryLimitError)
    assert str(error) == "Rank 1: No memory."
    assert group.aborted.is_set()
    group.ranks.reset(Reset(""), set())
    group.ranks.wait_until_ready(5)
    assert str(group.ranks.cause(0)) == "The connection between the ranks broke."


def test_a_rank_that_cannot_load_says_why_before_it_ends(group):
    group.ranks.wait_until_ready()
    group.ranks.reset(Reset(""), {1})
    group.started[0].rank_end.send(RankFailed("Another file.", "BackendError"))
    group.started[0].rank_end.cut()
    wait_for(lambda: group.ranks.lost)
    with pytest.raises(BackendError, match=r"Rank 1: Another file\."):
        group.ranks.wait_until_ready(5)


def test_why_a_rank_that_ended_could_not_load_is_the_cause(group):
    group.ranks.wait_until_ready()
    group.ranks.reset(Reset(""), {1})
    group.started[0].rank_end.send(RankFailed("Another file.", "BackendError"))
    group.started[0].rank_end.cut()
    wait_for(lambda: group.ranks.lost)
    assert str(group.ranks.cause(5)) == "Rank 1: Another file."
    group.started[1].rank_end.cut()
    wait_for(lambda: len(group.ranks.lost) == 2)
    assert isinstance(group.ranks.cause(5), RanksLostError)


def test_ranks_that_have_not_loaded_are_started_again_with_a_lost_one(group):
    group.ranks.wait_until_ready()
    group.loads = False
    for number in (0, 1):
        group.started[number].rank_end.cut()
        wait_for(lambda number=number: group.started[number].killed)
    assert group.ranks.restart() == [1, 2]
    group.started[2].rank_end.cut()
    wait_for(lambda: group.ranks.lost)
    group.loads = True
    assert group.ranks.restart() == [1, 2]
    group.ranks.wait_until_ready(5)


def test_what_a_replaced_rank_did_is_no_fault_of_the_new_one(group):
    group.ranks.wait_until_ready()
    old = group.started[0]
    old.rank_end.cut()
    wait_for(lambda: group.ranks.lost)
    assert group.ranks.restart() == [1]
    group.ranks._read_messages(1, old, 0.0)  # the thread looks at it late
    group.ranks.wait_until_ready(5)
    assert not group.ranks.lost
    assert not group.started[2].killed


def test_a_rank_that_was_ended_by_ctrl_c_is_not_waited_for(group):
    group.ranks.wait_until_ready()
    group.started[1].rank_end.send(RankLeaves())
    wait_for(lambda: group.ranks.lost)
    with pytest.raises(BackendError, match=r"Rank 2 was ended by Ctrl-C\. It is not started again"):
        group.ranks.restart()


def test_ranks_that_do_not_end_share_one_time_limit(group, monkeypatch):
    monkeypatch.setattr(module, "_END_TIMEOUT_S", 0.3)
    group.ranks.wait_until_ready()
    for rank in group.started:
        rank.ends_after_s = 60.0
    group.ranks.close()
    first, second = (rank.waited_s for rank in group.started)
    assert 0.2 < first <= 0.3
    assert second < 0.1


def test_nobody_waits_for_ranks_that_are_given_up(group):
    group.ranks.wait_until_ready()
    group.loads = False
    group.started[0].rank_end.cut()
    wait_for(lambda: group.ranks.lost)
    group.ranks.restart()
    threading.Timer(0.2, group.ranks.give_up).start()
    with pytest.raises(BackendError, match="The engine closes"):
        group.ranks.wait_until_ready()


def test_a_restarted_rank_of_another_version_is_refused(group):
    group.ranks.wait_until_ready()
    group.version = "2"
    group.started[0].rank_end.cut()
    wait_for(lambda: group.ranks.lost)
    with pytest.raises(BackendError, match="Rank 1 on here has twostroke 2"):
        group.ranks.restart()
