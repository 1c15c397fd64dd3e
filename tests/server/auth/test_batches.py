"""Batches belong to the API key that created them: its limits pause them, its usage counts them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from support.keys import add, keyed_server
from support.waiting import wait_for
from twostroke.server.auth.usage import amounts
from twostroke.server.batch import queueing
from twostroke.server.http.api_key import KeyLimits
from twostroke.server.storage import open_database

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from support.servers import LiveServer

URL = "/v1/completions"


def begin(server: LiveServer, num_lines: int, **fields: Any) -> str:
    """Start a batch and return its id."""
    body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True, **fields}
    line = {"method": "POST", "url": URL, "body": body}
    text = "\n".join(json.dumps({"custom_id": f"n{n}", **line}) for n in range(num_lines))
    files = {"file": ("in.jsonl", text.encode())}
    file = server.http.post("/v1/files", data={"purpose": "batch"}, files=files).json()
    payload = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
    batch: str = server.http.post("/v1/batches", json=payload).json()["id"]
    return batch


def counts(server: LiveServer, batch: str) -> tuple[str, int, int]:
    body = server.http.get(f"/v1/batches/{batch}").json()
    numbers = body["request_counts"]
    return body["status"], numbers["completed"], numbers["failed"]


def test_limits_pause_lines_and_fail_none(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    limits = KeyLimits(parallel=2, tokens_per_minute=6000, requests_per_minute=6000)
    key, text = add(folder, limits=limits)
    with keyed_server(folder, tmp_path) as server:
        server.http.headers["x-api-key"] = text
        batch = begin(server, 12)
        wait_for(lambda: counts(server, batch) == ("completed", 12, 0))
    with open_database(folder) as db:
        [amount] = amounts(db, "0000", "9999")
    assert (amount.owner.key, amount.owner.tenant, amount.owner.is_batch) == (key.id, "anna", True)
    assert (amount.requests, amount.output) == (12, 36)


def test_paused_batch_leaves_room_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    endless = SimpleNamespace(uniform=lambda _low, _high: 10_000.0)
    monkeypatch.setattr(queueing, "random", endless)  # the pause outlasts the test
    folder = tmp_path / "records"
    _, slow = add(folder, "slow", "anna", limits=KeyLimits(requests_per_minute=1))
    _, fast = add(folder, "fast", "ben")
    with keyed_server(folder, tmp_path) as server:
        server.http.headers["x-api-key"] = slow
        first = begin(server, 600)
        wait_for(lambda: counts(server, first)[1] == 1 and "pauses for" in caplog.text)
        server.http.headers["x-api-key"] = fast
        second = begin(server, 4)
        wait_for(lambda: counts(server, second) == ("completed", 4, 0))
        server.http.headers["x-api-key"] = slow
        assert counts(server, first) == ("in_progress", 1, 0)
        assert server.http.post(f"/v1/batches/{first}/cancel").status_code == 200
        wait_for(lambda: counts(server, first)[0] == "cancelled")


def test_lines_that_are_cut_off_do_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    _, text = add(folder)
    with keyed_server(folder, tmp_path) as server:
        server.http.headers["x-api-key"] = text
        server.backend.gate.clear()
        batch = begin(server, 4)
        wait_for(lambda: server.num_busy == 4)
        assert server.http.post(f"/v1/batches/{batch}/cancel").status_code == 200
        wait_for(lambda: counts(server, batch)[0] == "cancelled")
        server.backend.gate.set()
        wait_for(lambda: server.num_busy == 0)
    with open_database(folder) as db:
        assert amounts(db, "0000", "9999") == []
