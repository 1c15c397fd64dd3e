"""`twostroke fleet status` for a fleet that a test invents."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from twostroke.cli import fleet
from twostroke.fleet.cluster.choice import Phase
from twostroke.fleet.cluster.manager import FleetStatus, PoolStatus, ReplicaStatus
from twostroke.fleet.cluster.process import ServerState

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


def replicas(label: str, count: int) -> tuple[ReplicaStatus, ...]:
    state = ServerState("http://10.0.0.1:8001", 1, is_ready=True, num_starts=1)
    names = [f"{label}/v/{number}" for number in range(count)]
    return tuple(ReplicaStatus(name, Phase.READY, True, 0, state) for name in names)


def test_it_says_how_many_prefill_replicas_would_be_busy(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = (
        PoolStatus("reader", 1, replicas("reader", 1)),
        PoolStatus("chat", 2, replicas("chat", 2), "reader", 1.84),
    )
    router = ServerState("http://10.0.0.1:8000", 1, is_ready=True)
    status = FleetStatus("shop", router.url, router, pools)

    @contextmanager
    def joined() -> Iterator[Any]:
        yield SimpleNamespace(names=lambda: ["shop"], status=lambda _name: status)

    monkeypatch.setattr(fleet, "_joined_cluster", joined)
    out = cli("fleet", "status").out
    assert "shop: the router answers at http://10.0.0.1:8000." in out
    assert "By the measured rates, chat can use 1.8 replicas of reader; 1 ready." in out
