"""Rank 0 learns who is ready, who failed, who is dead and who is frozen."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from twostroke.core.errors import MemoryLimitError, RanksLostError
from twostroke.parallel.channel import Channel, ChannelClosedError, Kind
from twostroke.parallel.job import Failed, Hello, Ready, Reset, pack
from twostroke.parallel.ranks import BEAT_S, Ranks


class FakeRank:
    """A rank in a thread, which answers as its test wants."""

    def __init__(self, rank):
        ours, theirs = socket.socketpair()
        self.channel, self.own = Channel(ours), Channel(theirs)
        self.beats, self.killed, self.received = True, False, []
        self.own.send(Kind.HELLO, pack(Hello(rank, "1", "here", 1, 10**9, 1)))
        self.own.send(Kind.READY, pack(Ready(1, 2, 3)))
        self.thread = threading.Thread(target=self.live, daemon=True)
        self.thread.start()

    def live(self):
        try:
            while True:
                if self.beats:
                    self.own.beat()
                if message := self.own.receive(BEAT_S / 4):
                    self.received.append(message.kind)
                    if message.kind is Kind.RESET:
                        self.own.send(Kind.FAILED, pack(Failed("", "RanksLostError", lost=True)))
                        self.own.send(Kind.READY, pack(Ready(1, 2, 3)))
        except ChannelClosedError:
            self.own.close()

    def ended(self):
        return None

    def kill(self):
        self.killed = True
        self.channel.close()

    def wait(self):
        self.kill()


class Group:
    """Two fake ranks and what rank 0 knows of them."""

    def __init__(self):
        self.started, self.aborted = [], threading.Event()
        self.ranks = Ranks(3, self, self.aborted.set)

    def __call__(self, rank):
        self.started.append(FakeRank(rank))
        return self.started[-1]

    def close(self):
        pass


@pytest.fixture
def group():
    group = Group()
    yield group
    group.ranks.close()
    assert all(fake.killed for fake in group.started)


def test_ranks_that_live_are_left_alone(group):
    assert sorted(group.ranks.meet()) == [1, 2]
    group.ranks.wait_until_ready()
    time.sleep(1.2)
    assert not group.ranks.lost
    assert not group.aborted.is_set()
    assert Kind.BEAT in group.started[0].received


@pytest.mark.parametrize("how", ["dead", "frozen"])
def test_a_lost_rank_is_noticed_and_started_again(group, how):
    group.ranks.wait_until_ready()
    if how == "dead":
        group.started[1].own.cut()
    else:
        group.started[1].beats = False
    assert group.aborted.wait(5)
    error = group.ranks.cause(5)
    assert isinstance(error, RanksLostError)
    assert str(error).startswith("Rank 2 ")
    with pytest.raises(RanksLostError):
        group.ranks.send(Kind.FRAME)
    assert group.started[1].killed
    assert group.ranks.restart() == [2]
    group.ranks.reset(Reset(""), {2})
    group.ranks.wait_until_ready(5)
    assert not group.ranks.lost
    assert len(group.started) == 3


def test_a_failure_is_told_with_its_rank_and_kind(group):
    group.ranks.wait_until_ready()
    group.started[1].own.send(Kind.FAILED, pack(Failed("for us", "RanksLostError", lost=True)))
    group.started[0].own.send(Kind.FAILED, pack(Failed("No memory.", "MemoryLimitError")))
    error = group.ranks.cause(5)
    assert isinstance(error, MemoryLimitError)
    assert str(error) == "Rank 1: No memory."
    assert group.aborted.is_set()
    group.ranks.reset(Reset(""), set())
    group.ranks.wait_until_ready(5)
    assert str(group.ranks.cause(0)) == "The connection between the ranks broke."
