"""`doctor --ranks`: each mismatch of the ranks is one sentence, and the link is measured."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
from msgspec.structs import replace

from twostroke.backends.parallel.check import interface_of, mismatches
from twostroke.backends.parallel.links.link_type import LINK_TYPES
from twostroke.backends.parallel.rank_messages import RankReport

TIMEOUT_S = 120
REPORT = RankReport(
    rank=0,
    host="a",
    address="10.0.0.1",
    interface="eth0",
    version="1",
    level="avx2",
    one_arithmetic=True,
    num_cores=2,
    memory_bytes=10**9,
    model_id="x",
    model_error=None,
    obstacles={},
)


def test_each_mismatch_is_a_sentence_with_rank_and_host():
    same = replace(REPORT, rank=1, host="b", level="avx512", memory_bytes=5)
    assert mismatches([REPORT, same]) == []
    for change, sentence in (
        ({"version": "2"}, "Rank 1 on b has twostroke 2, rank 0 has 1."),
        ({"model_id": "y"}, "Rank 1 on b has another file of the model than rank 0 on a."),
        ({"model_error": "No."}, "Rank 1 on b cannot open the model: No."),
        (
            {"level": "amx", "one_arithmetic": False},
            (
                "Rank 1 on b computes prompts otherwise (level amx) than rank 0 (level avx2): set "
                "--level to one that both have."
            ),
        ),
    ):
        assert mismatches([REPORT, replace(same, **change)]) == [sentence]


def test_interfaces_are_named_by_addresses_of_ipv4_only():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("::1") == "?"


@pytest.mark.skipif(LINK_TYPES["ucx"].obstacle() is not None, reason="needs libucx-cu12")
def test_the_command_compares_and_measures(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "twostroke", "doctor", "--ranks", "--json", str(tmp_path)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    body = json.loads(outputs[0][0])
    assert [rank["interface"] for rank in body["ranks"]] == ["lo", "lo"]
    assert [sentence.split(" on ")[0] for sentence in body["mismatches"]] == ["Rank 0", "Rank 1"]
    assert all(str(tmp_path) in sentence for sentence in body["mismatches"])
    assert body["link"].startswith("UCX")
    assert body["times"][0]["latency_s"] > 0
    assert [rank.returncode for rank in ranks] == [1, 0], outputs
    assert outputs[1][0] == ""
