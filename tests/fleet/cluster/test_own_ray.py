"""What becomes of a cluster that does not start."""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from support.waiting import wait_for
from twostroke.core.errors import BackendError
from twostroke.fleet.cluster import own_ray

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cluster_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for all files of clusters, and for a program in place of Ray's."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nsleep 300 &\necho $! > {tmp_path}/child\nwait\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(own_ray.env, "use_ray_token", lambda _: None)
    return tmp_path


def child_of(cluster_folder: Path) -> str | None:
    """Return when a process of the cluster began; None if there is none."""
    with suppress(OSError, ValueError):
        return own_ray._start_ticks(int((cluster_folder / "child").read_text()))
    return None


def test_nothing_stays_of_a_cluster_whose_start_is_interrupted(
    cluster_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = time.sleep

    def interrupt(seconds: float) -> None:
        sleep(seconds)
        if child_of(cluster_folder):
            raise KeyboardInterrupt

    monkeypatch.setattr(own_ray.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        own_ray.OwnRay().start()
    monkeypatch.undo()
    wait_for(lambda: child_of(cluster_folder) is None)
    assert not list(cluster_folder.glob("twostroke-ray-*"))


def test_nothing_stays_of_a_cluster_that_does_not_start(
    cluster_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_ray, "_START_TIMEOUT_S", 0.5)
    with pytest.raises(BackendError, match="Ray does not start"):
        own_ray.OwnRay().start()
    wait_for(lambda: child_of(cluster_folder) is None)
    assert not list(cluster_folder.glob("twostroke-ray-*"))
