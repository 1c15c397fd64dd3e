"""Fleets without Ray that scale from zero, and a short form of `make long SUITE=from-zero`."""

from __future__ import annotations

import re
import time
from itertools import count
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from msgspec.structs import replace

from exact.from_zero import campaign, spec_of
from support.local_fleet import KEY, LocalFleet, free_port
from support.tiny import Tiny, write_tiny_gguf
from support.waiting import wait_for
from twostroke.fleet.cluster.spec import FleetSpec

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

_PATIENCE_S = 300.0  # a server starts within seconds, but not on a machine that does much else


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))


def test_a_model_scales_to_zero_and_back_without_a_lost_request() -> None:
    seen, metrics = campaign(3, kinds=("start", "kill", "notice"), num_tokens=20)
    assert seen.wrong == []
    assert seen.ends["whole"] > 5
    assert 'start_waited_requests_total{model="tiny",outcome="refused"} 0.0' in metrics


def test_a_model_that_does_not_start_is_told_in_a_sentence(tmp_path: Path) -> None:
    fleet = LocalFleet(spec_of(tmp_path / "none.gguf", free_port()), tmp_path)
    try:
        wait_for(lambda: fleet.status.router.is_ready, _PATIENCE_S)
        body = {"model": "tiny", "prompt": "Hi"}
        answer = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_not_started"
        assert int(answer.headers["retry-after"]) > 1
        assert "none.gguf" in fleet.status.trouble
    finally:
        fleet.close()


def _disaggregated_spec(folder: Path) -> FleetSpec:
    """Return a fleet of one decode replica, and of prefill replicas from zero to one."""
    model = write_tiny_gguf(folder / "tiny.gguf", Tiny(context_length=1024))
    spec = spec_of(model, free_port())
    (pool,) = spec.models
    options = {**pool.options, "context-length": 1024}
    decode = replace(
        pool,
        replicas=1,
        min_replicas=1,
        max_replicas=1,
        prefill="reader",
        options={**options, "disaggregate": "always"},
    )
    prefill = replace(
        pool,
        name="reader",
        max_replicas=1,
        scale_down_after=15,
        peer_port=free_port(),
        options=options,
    )
    return FleetSpec(models=(decode, prefill), router=spec.router)


def test_prefill_replicas_come_with_the_work_and_go_without(tmp_path: Path) -> None:
    fleet = LocalFleet(_disaggregated_spec(tmp_path), tmp_path)

    def ask(number: int) -> str:
        prompt = f"{number} " + "and then " * 60
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=60)
        text: str = answer.json()["choices"][0]["text"]
        return text

    def prefill_engines() -> list[dict[str, Any]]:
        (state,) = fleet.replicas("tiny/").values()
        headers = {"authorization": f"Bearer {KEY}"}
        body = httpx.get(f"{state.url}/api/state", headers=headers).json()
        engines: list[dict[str, Any]] = body["handover"]["borrower"]["peers"]
        return engines

    numbers = count(1)

    def prefills_remotely() -> bool:
        """Whether the prefill engine is up; prompts come meanwhile, so that it has work."""
        ask(next(numbers))
        time.sleep(0.2)
        return [each["state"] for each in prefill_engines()] == ["up"]

    try:
        wait_for(lambda: fleet.status.is_up, _PATIENCE_S)
        assert not fleet.replicas("reader/"), "there is no work"
        text = ask(0)  # by the decode engine alone
        wait_for(lambda: bool(fleet.replicas("reader/")), _PATIENCE_S)
        wait_for(prefills_remotely, _PATIENCE_S)
        ask(next(numbers))
        (state,) = fleet.replicas("tiny/").values()
        metrics = httpx.get(f"{state.url}/metrics", headers={"authorization": f"Bearer {KEY}"})
        assert re.search(r'handover_transfers_total\{outcome="done"\} [1-9]', metrics.text)
        assert ask(0) == text
        wait_for(lambda: not fleet.replicas("reader/"), _PATIENCE_S)
        wait_for(lambda: not prefill_engines(), _PATIENCE_S)
        assert ask(0) == text
    finally:
        fleet.close()
