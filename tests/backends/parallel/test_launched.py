"""Ranks that a launcher starts, here on two hosts: the same tokens, and clear refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest

from benchmarks.common import namespaces
from twostroke.backends.division import LauncherEnv, division_warning, read_launcher_env
from twostroke.backends.parallel import launcher
from twostroke.backends.parallel.connection import connect_to_rank0
from twostroke.backends.parallel.launcher import (
    RemoteRanks,
    assigned_rank,
    describe_command,
)
from twostroke.backends.parallel.links.link_type import LINK_TYPES
from twostroke.backends.parallel.rank_messages import RECEIVED_BY_RANKS, RankArrival
from twostroke.core import env
from twostroke.core.distributed_options import ParallelOptions
from twostroke.core.errors import BackendError, RanksLostError, UsageError

TIMEOUT_S = 120
NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
OTHERS = ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*NAMES, *OTHERS, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


def connect(ranks):
    """Connect to rank 0 as another rank does."""
    return connect_to_rank0(("127.0.0.1", ranks.port), b"", RECEIVED_BY_RANKS, 5)


def set_variables(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_variables_of_launchers_are_read(monkeypatch):
    assert read_launcher_env() is None
    set_variables(
        monkeypatch, SLURM_PROCID="0", SLURM_NTASKS="2"
    )  # in a batch script, without srun
    assert read_launcher_env() is None
    set_variables(monkeypatch, SLURM_STEP_ID="0", SLURM_PROCID="1", MASTER_ADDR="10.0.0.1")
    assert read_launcher_env() == LauncherEnv(1, 2, "10.0.0.1", 29500)
    monkeypatch.delenv("MASTER_ADDR")
    set_variables(monkeypatch, PMI_RANK="1", PMI_SIZE="2")
    assert read_launcher_env() == LauncherEnv(1, 2, None, 29500)
    set_variables(monkeypatch, RANK="2", WORLD_SIZE="4", MASTER_ADDR="10.0.0.1", MASTER_PORT="123")
    assert read_launcher_env() == LauncherEnv(2, 4, "10.0.0.1", 123)
    set_variables(monkeypatch, TORCHELASTIC_RUN_ID="x")  # torchrun has taken that port
    assert read_launcher_env() == LauncherEnv(2, 4, "10.0.0.1", 124)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"RANK": "1"}, "has not set WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK must be less than WORLD_SIZE \(2\), got 2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE must be a number from 1 to .*, got '0'"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE must be a number .*, got 'two'"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a number"),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "has started 3 processes, .* over 2"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "Set MASTER_ADDR"),
    ],
)
def test_wrong_variables_are_refused(monkeypatch, variables, reason):
    set_variables(monkeypatch, **variables)
    with pytest.raises(UsageError, match=reason):
        assigned_rank(2)


def test_a_division_that_is_hardly_meant_so_gets_a_warning(monkeypatch):
    for variables, warns in (
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
        ({"RANK": "5"}, False),  # nobody needs it
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
    ):
        set_variables(monkeypatch, **variables)
        assert ("add --tensor-parallel 2" in (division_warning(1) or "")) == warns


def test_an_empty_secret_is_refused(monkeypatch):
    set_variables(monkeypatch, TWOSTROKE_RANK_SECRET=" ")
    with pytest.raises(UsageError, match="TWOSTROKE_RANK_SECRET is empty"):
        env.rank_secret()


def test_a_rank_that_was_asked_for_something_else_is_reported(caplog):
    command = describe_command("smollm2", ParallelOptions(tensor=2, shares=(3, 2)))
    assert command == "smollm2, tensor 2, shares (3, 2)"
    for other, reports in ((command, False), ("", False), ("qwen, pipeline 2", True)):
        ranks = RemoteRanks("127.0.0.1", 0, b"", 2, command)
        with closing(ranks), closing(connect(ranks)) as connection:
            connection.send(RankArrival(1, 2, other))
            ranks(1).kill()
        output = (
            "Rank 1 was started with 'qwen, pipeline 2', but follows rank 0, which has 'smollm2,"
        )
        assert (output in caplog.text) == reports


def test_a_rank_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(launcher, "ARRIVAL_TIMEOUT_S", 0.3)
    ranks = RemoteRanks("127.0.0.1", 0, b"", 2)
    with pytest.raises(RanksLostError, match=r"Rank 1 did not come to 127.0.0.1:\d+ within"):
        ranks(1)
    ranks.close()


def test_a_rank_of_another_version_is_named(monkeypatch, caplog):
    monkeypatch.setattr(launcher, "ARRIVAL_TIMEOUT_S", 2.0)
    ranks = RemoteRanks("127.0.0.1", 0, b"", 2)
    with closing(ranks), closing(connect(ranks)) as connection:
        connection.send_frame(b'\x01\x00\x00\x00\x20\x00\x00\x00{"rank": 1}')  # of version 1
        with pytest.raises(RanksLostError):
            ranks(1)
    assert "install the same version on all machines" in caplog.text


def test_a_stray_rank_ends_the_others_only_before_they_run(caplog):
    ranks = RemoteRanks("127.0.0.1", 0, b"", 2)
    with closing(ranks):

        def come(num_ranks):
            connection = connect(ranks)
            connection.send(RankArrival(1, num_ranks))
            return connection

        with closing(come(3)), pytest.raises(BackendError, match="came as rank 1 of 3"):
            ranks(1)
        for num_strays in (0, 2):
            strays = [come(3) for _ in range(num_strays)]
            with closing(come(2)):
                ranks(1).kill()
            for stray in strays:
                stray.close()
    assert "came as rank 1 of 3, but rank 0 is one of 2" in caplog.text


def test_an_impossible_address_of_rank_0_is_refused_at_once():
    with pytest.raises(BackendError, match=r"cannot be at 'a\.\.b'"):
        connect_to_rank0(("a..b", 29500), b"", RECEIVED_BY_RANKS, 60)


@pytest.mark.model
@pytest.mark.skipif(LINK_TYPES["ucx"].obstacle() is not None, reason="needs libucx-cu12")
def test_two_hosts_give_the_same_tokens_through_all_faults():
    if why_not := namespaces.obstacle():
        pytest.skip(why_not)
    command = [sys.executable, "-m", "twostroke", "generate", "smollm2", "-p", "Tell a story."]
    command += ["--temperature", "0", "--max-tokens", "400", "--quiet"]
    alone = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with namespaces.two_hosts(num_pairs=2) as hosts:
        zero, rank_one = ranks = [start(command, rank, hosts) for rank in (0, 1)]
        try:
            text = read(zero, 1)
            for pair, words in ((1, "Nothing arrives over the link"), (0, "Rank 1 ")):
                hosts.cut(pair)
                assert words in zero.stderr.readline()
                hosts.mend(pair)
                text += read(zero, 40)  # some of them were there before
            lost = subprocess.run(
                ["pgrep", "-P", str(rank_one.pid)], capture_output=True, check=True
            )
            os.kill(int(lost.stdout), signal.SIGKILL)
            rest, errors = zero.communicate(timeout=TIMEOUT_S)
            assert "Rank 1 " in errors
            assert text + rest == alone, errors
            assert rank_one.wait(TIMEOUT_S) == 0
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()


def read(process, count):
    """Returns at least `count` characters of what a process has written."""
    text = ""
    while len(text) < count and (output := os.read(process.stdout.fileno(), 4096)):
        text += output.decode()
    return text


def start(command, rank, hosts):
    """Starts a rank on its host, as torchrun would; the link has interfaces of its own."""
    env = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": 29500}
    settings = [f"{name}={value}" for name, value in env.items()]
    settings += ["UCX_TLS=tcp,self", f"UCX_NET_DEVICES={hosts.interface(rank, 1)}"]
    settings += [f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}"]
    return subprocess.Popen(
        hosts.command(rank, ["env", *settings, *command, "--tensor-parallel", "2"]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
