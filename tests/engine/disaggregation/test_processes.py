"""Prefill and decode engines in separate processes transfer KV pages."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

from benchmarks.common.servers import free_port
from support.disaggregated_tokens import Case, compare
from support.disaggregation import decode, options, view
from support.disaggregation_kills import campaign
from support.tiny import Tiny, tiny_of, write_tiny_gguf
from support.waiting import until, wait_for
from twostroke import SamplingParams
from twostroke.core.distributed_options import DisaggregationOptions
from twostroke.engine.process import supervisor
from twostroke.engine.process.remote import RemoteEngine
from twostroke.engine.status import Health

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("family", "how"), [("llama", ("f16", "127.0.0.1", "ngram")), ("gemma2", ("int8", "127.0.0.2"))]
)
def test_answers_are_those_of_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, how: tuple[str, ...]
) -> None:
    monkeypatch.setenv("TWOSTROKE_PEER_SECRET", "a secret of the tests")
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_of(family))
    result = compare(Case(str(path), *how), 40, 1, tmp_path)
    assert not result.different
    assert result.transfers["done"] >= 20


def test_a_prefill_engine_that_reads_prompts_between_its_deaths_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "BACK_OFF_S", (0.0, 0.01))  # three deaths in a row are too many
    path = write_tiny_gguf(tmp_path / "m.gguf", Tiny(context_length=512))
    address = f"127.0.0.1:{free_port()}"
    prefill_options = options(DisaggregationOptions("prefill", address))

    async def run() -> None:
        with (
            RemoteEngine.start(str(path), prefill_options, "warning", lambda *_: None) as engine,
            decode(path, address) as llm,
        ):
            engine.attach(lambda: None)
            prompts = ([number, *range(3, 200)] for number in range(3, 200))
            for num_read in range(1, 5):
                while view(llm).decode_side.transfers.get("done", 0) < num_read:
                    prompt = next(prompts)
                    await asyncio.to_thread(llm.generate, [prompt], SamplingParams(max_tokens=1))
                await asyncio.sleep(1.2)  # two pulses, which tell of the pages
                pid = engine.supervisor.pid
                os.kill(pid, signal.SIGKILL)
                await until(
                    lambda pid=pid: engine.supervisor.pid != pid and engine.health is Health.READY
                )
                await asyncio.to_thread(
                    wait_for, lambda: view(llm).decode_side.peers[0].state == "up"
                )

    asyncio.run(run())


def test_a_killed_prefill_engine_costs_no_request(tmp_path: Path) -> None:
    faults = [("prefill", "kill engine")]
    counts, wrong = asyncio.run(campaign(tmp_path, faults, 1, together=2, most_tokens=1000))
    assert not wrong
    assert counts["answered"] == 2
