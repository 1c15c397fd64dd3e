"""Ranks meet rank 0 with their secret, and errors say what to set."""

from __future__ import annotations

from contextlib import closing

import pytest

from twostroke.backends.parallel.connection import connect_to_rank0, listen_for_ranks
from twostroke.backends.parallel.rank_messages import RECEIVED_BY_RANKS, RankReady
from twostroke.core.errors import PortInUseError
from twostroke.core.transport.frames import ConnectionLostError


def test_a_rank_needs_the_secret_and_a_rank_0_that_listens(caplog):
    with closing(listen_for_ranks("127.0.0.1", 0, b"secret", RECEIVED_BY_RANKS)) as listener:
        address = "127.0.0.1", listener.port
        with pytest.raises(PortInUseError, match=f"127.0.0.1:{listener.port}"):
            listen_for_ranks(*address, b"secret", RECEIVED_BY_RANKS)
        for _ in range(2):
            with pytest.raises(ConnectionLostError, match="has another secret"):
                connect_to_rank0(address, b"another", RECEIVED_BY_RANKS, 5)
        first_end = connect_to_rank0(address, b"secret", RECEIVED_BY_RANKS, 5)
        with closing(first_end), closing(listener.accept(5)) as other:
            first_end.send(RankReady(1, 2, 3))
            assert other.receive(5) == RankReady(1, 2, 3)
            other.send_bytes(b"a step")
            assert first_end.receive(5) == b"a step"
        reason = "A process at 127.0.0.1 was refused among the ranks: it does not know their secret"
        assert caplog.text.count(reason) == 1  # for both
    with pytest.raises(ConnectionLostError, match="Rank 0 does not answer"):
        connect_to_rank0(address, b"secret", RECEIVED_BY_RANKS, 0)
    with pytest.raises(ConnectionLostError, match="Rank 0 does not answer"):  # without a wait
        connect_to_rank0(address, b"secret", RECEIVED_BY_RANKS, 60, has_listened=True)
