"""The messages that a server sends to systemd."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from server.test_run import served_process
from twostroke.core import env
from twostroke.engine.status import Health
from twostroke.server.http.model_names import ModelNames
from twostroke.server.http.watchdog import Watchdog
from twostroke.server.observability.health import HealthReports

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Yield the socket of a fake systemd, whose watchdog has an interval of 90 ms."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "90000")
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        yield listener


def heard(listener: socket.socket) -> list[bytes]:
    """Return the messages that have arrived."""
    listener.setblocking(False)
    results = []
    try:
        while True:
            results.append(listener.recv(1000))
    except BlockingIOError:
        return results


def feed_for(health: Health, seconds: float) -> None:
    async def run() -> None:
        engine: Any = SimpleNamespace(health=health)
        reports = HealthReports(engine, ModelNames(("tiny",)), lambda: False, None)
        watchdog = Watchdog(lambda: reports.is_well)
        watchdog.begin()
        await asyncio.sleep(seconds)
        watchdog.end()

    asyncio.run(run())


@pytest.mark.parametrize("health", [Health.READY, Health.RECOVERING])
def test_a_server_that_gets_on_feeds_the_watchdog(health: Health, systemd: socket.socket) -> None:
    feed_for(health, 0.3)
    ready, *fed = heard(systemd)
    assert ready == b"READY=1"
    assert len(fed) >= 3
    assert set(fed) == {b"WATCHDOG=1"}


@pytest.mark.parametrize("health", [Health.STALLED, Health.STOPPED])
def test_an_engine_that_hangs_lets_it_starve(health: Health, systemd: socket.socket) -> None:
    feed_for(health, 0.3)
    assert heard(systemd) == [b"READY=1"]


def test_without_a_watchdog_nobody_is_fed(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_PID", "1")  # it is another process's
    assert env.watchdog_s() is None
    feed_for(Health.READY, 0.2)
    assert heard(systemd) == [b"READY=1"]


def test_a_socket_that_is_gone_is_said_and_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "none"))
    feed_for(Health.READY, 0.0)
    assert "systemd cannot be told READY=1: No such file" in caplog.text


def test_a_watchdog_without_systemd_sends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    feed_for(Health.READY, 0.0)
    assert not caplog.text


def test_a_server_tells_its_life(systemd: socket.socket, tmp_path: Path) -> None:
    with served_process(tmp_path, "5") as (process, _):
        assert systemd.recv(1000) == b"READY=1"
        assert systemd.recv(1000) == b"WATCHDOG=1"
        os.kill(process.pid, signal.SIGTERM)
        process.wait(120)
    assert b"STOPPING=1" in heard(systemd)
