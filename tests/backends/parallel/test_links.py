"""Links between hosts: what is gathered and sent arrives, and no fault lets a rank wait forever."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from benchmarks.common import namespaces
from twostroke.backends.cpu.library import choose_level
from twostroke.backends.parallel.links import host_link
from twostroke.backends.parallel.links import rendezvous as meeting
from twostroke.backends.parallel.links.link_type import LINK_TYPES, choose_link_type, open_link
from twostroke.core.errors import BackendError, RanksLostError, UsageError

USABLE = [kind for kind in ("ucx", "gloo") if LINK_TYPES[kind].obstacle() is None]
LOOPBACK = "127.0.0.1"
TIMEOUT_S = 60

needs_link = pytest.mark.skipif(not USABLE, reason="needs libucx-cu12 or torch")


@contextmanager
def joined(kind, num_ranks):
    """Links of ranks that are threads."""
    level = choose_level(None).level
    links = [open_link(kind, rank, num_ranks, level, LOOPBACK) for rank in range(num_ranks)]
    try:
        join(links)
        yield links
    finally:
        for link in links:
            link.close()


def join(links):
    text = links[0].renew()
    together([lambda link=link: link.join(text) for link in links])


def together(functions):
    """Call functions at the same time; returns their results, or raises an error of one."""
    results, errors = [None] * len(functions), []

    def call(i):
        try:
            results[i] = functions[i]()
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results


def gather(link, team, rank_values, sizes):
    """Returns what the team's members have, in one array; None if the link broke."""
    record = link.record
    everything = np.zeros(sum(sizes), np.uint8)
    failed = record.all_gather(
        record.context,
        (ctypes.c_int32 * len(team))(*team),
        len(team),
        rank_values.ctypes.data,
        everything.ctypes.data,
        (ctypes.c_int64 * len(team))(*sizes),
    )
    return None if failed else everything


@needs_link
@pytest.mark.parametrize("kind", USABLE)
def test_values_of_all_sizes_arrive(kind):
    rng = np.random.default_rng(1)
    with joined(kind, 3) as links:
        assert all(link.progress() % 2 == 0 for link in links)
        for team in ((0, 1, 2), (2, 0), (1, 2), (0, 1, 2)):
            for max_size in (1, 40, 9000, 300_000):
                sizes = [int(size) for size in rng.integers(0, max_size + 1, len(team))]
                rank_values = [rng.integers(0, 256, size, np.uint8) for size in sizes]
                gathered = together(
                    [
                        partial(gather, links[rank], team, rank_values[i], sizes)
                        for i, rank in enumerate(team)
                    ]
                )
                for each in gathered:
                    np.testing.assert_array_equal(each, np.concatenate(rank_values))


@needs_link
@pytest.mark.parametrize("kind", USABLE)
def test_what_is_sent_arrives_in_order(kind):
    data = np.random.default_rng(2).integers(0, 256, (5, 70_000), np.uint8)
    received = np.zeros_like(data)

    def send(record):
        return [record.send(record.context, 1, row.ctypes.data, row.nbytes) for row in data]

    def receive(record):
        return [record.receive(record.context, 0, row.ctypes.data, row.nbytes) for row in received]

    with joined(kind, 2) as links:
        results = together([lambda: send(links[0].record), lambda: receive(links[1].record)])
    assert results == [[0] * 5, [0] * 5]
    np.testing.assert_array_equal(received, data)


@needs_link
@pytest.mark.parametrize("kind", USABLE)
def test_an_abort_while_ranks_connect_is_not_undone(kind, monkeypatch):
    monkeypatch.setattr(host_link, "_CONNECT_S", 2.0 * TIMEOUT_S)
    level = choose_level(None).level
    links = [open_link(kind, rank, 2, level, LOOPBACK) for rank in range(2)]
    engine = links[1]._engine
    connect = engine.connect

    def aborted(parts):
        links[1].abort()
        connect(parts)

    monkeypatch.setattr(engine, "connect", aborted)
    try:
        with pytest.raises(RanksLostError):
            join(links)
    finally:
        for link in links:
            link.close()


@needs_link
@pytest.mark.parametrize("kind", USABLE)
def test_an_abort_ends_all_waits_and_ranks_can_join_again(kind):
    rank_values, sizes = np.ones(100, np.uint8), [100, 100, 100]
    with joined(kind, 3) as links:
        timer = threading.Timer(0.2, links[2].abort)  # which takes no part in the gather
        timer.start()
        waits = [
            lambda link=link: gather(link, (0, 1, 2), rank_values, sizes) for link in links[:2]
        ]
        assert together(waits) == [None, None]
        assert gather(links[0], (0, 1), rank_values, sizes[:2]) is None
        join(links)
        waits = [lambda link=link: gather(link, (0, 1, 2), rank_values, sizes) for link in links]
        assert all(each.all() for each in together(waits))


@needs_link
@pytest.mark.parametrize("kind", USABLE)
@pytest.mark.parametrize("fault", ["killed", "unplugged"])
def test_waits_end_when_another_host_is_gone(kind, fault):
    if why_not := namespaces.obstacle():
        pytest.skip(why_not)
    if (kind, fault) == ("gloo", "unplugged"):
        pytest.skip("Gloo waits on; rank 0 ends, by heartbeats, the process that does")
    with namespaces.two_hosts() as hosts:
        ranks = [start_rank(kind, rank, hosts) for rank in (0, 1)]
        try:
            print(ranks[0].stdout.readline(), end="", file=ranks[1].stdin, flush=True)
            assert [rank.stdout.readline() for rank in ranks] == ["gathers\n"] * 2
            if fault == "killed":
                ranks[1].send_signal(signal.SIGKILL)
                waiting = ranks[:1]
            else:
                hosts.cut()
                waiting = ranks
            for rank in waiting:
                output, errors = rank.communicate(timeout=TIMEOUT_S)
                assert output == "failed\n", errors
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()


def start_rank(kind, rank, hosts):
    """Starts a rank that gathers until that fails."""
    script = """
import sys, numpy as np
from test_links import gather
from twostroke.backends.cpu.library import choose_level
from twostroke.backends.parallel.links.link_type import open_link
kind, rank, host = sys.argv[1], int(sys.argv[2]), sys.argv[3]
link = open_link(kind, rank, 2, choose_level(None).level, host)
if rank == 0:
    text = link.renew()
    print(text, flush=True)
else:
    text = sys.stdin.readline().strip()
link.join(text)
own = np.zeros(8192, np.uint8)
print("gathers", flush=True)
while gather(link, (0, 1), own, (8192, 8192)) is not None:
    pass
print("failed", flush=True)
link.close()
"""
    folders = ":".join(path for path in sys.path if path)
    command = ["env", "UCX_TLS=tcp,self", f"PYTHONPATH={folders}:{__file__.rpartition('/')[0]}"]
    command += [sys.executable, "-c", script, kind, str(rank), hosts.addresses[0]]
    return subprocess.Popen(
        hosts.command(rank, command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@needs_link
def test_a_missing_rank_is_named(monkeypatch):
    monkeypatch.setattr(meeting, "_TIMEOUT_S", 0.3)
    link = open_link(USABLE[0], 0, 3, choose_level(None).level, LOOPBACK)
    text = link.renew()
    with pytest.raises(RanksLostError, match="ranks 1, 2"):
        link.join(text)
    link.close()


def test_a_kind_that_is_not_there_says_why():
    with pytest.raises(UsageError, match="must be one of ucx, gloo"):
        choose_link_type("udp")
    if LINK_TYPES["gloo"].obstacle() is not None:
        with pytest.raises(BackendError, match="gloo: PyTorch is not installed"):
            choose_link_type("gloo")
