"""Outputs reach the caller in order and once, however a request ends."""

from __future__ import annotations

import asyncio
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from support.engines import tiny_client
from twostroke.core.options import BatchOptions
from twostroke.core.request import FinishReason, Request
from twostroke.core.sampling import SamplingParams
from twostroke.engine.output import Mailbox
from twostroke.engine.output_processor import OutputProcessor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from twostroke.engine.client import Client
    from twostroke.engine.output import Output

_PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def test_nothing_comes_after_the_last_output_of_a_cancelled_choice(tmp_path: Path) -> None:
    with tiny_client(tmp_path) as (client, _):
        seen: list[Output] = []
        cancelling: list[Thread] = []

        def put(output: Output) -> None:
            """Cancel during delivery, and wait for the cancellation to overtake the output."""
            if not cancelling:
                cancelling.append(Thread(target=client.loop.cancel, args=[["mine"]]))
                cancelling[0].start()
                cancelling[0].join(timeout=0.2)
            seen.append(output)

        client.loop.submit([_choice(client, "mine", Mailbox(put))])
        _wait_until_idle(client)
        cancelling[0].join()
        reasons = [output.finish_reason for output in seen]
        assert reasons == [None] * (len(seen) - 1) + [FinishReason.CANCEL]
        assert sum(len(output.token_ids) for output in seen) == seen[-1].usage.completion_tokens  # type: ignore[union-attr]


def test_an_interrupted_submission_queues_nothing(tmp_path: Path) -> None:
    with tiny_client(tmp_path) as (client, backend):

        def choices() -> Iterator[OutputProcessor]:
            yield _choice(client, "first", Mailbox(print))
            raise KeyboardInterrupt

        backend.gate.clear()
        with pytest.raises(KeyboardInterrupt):
            client.loop.submit(choices())
        stats = client.loop.snapshot().scheduler
        assert stats.num_waiting + stats.num_running == 0


def test_iterating_after_the_end_yields_nothing(tmp_path: Path) -> None:
    async def read(client: Client) -> None:
        generation = client.generate_many_async([[5]], _PARAMS)
        async for _ in generation:
            break
        rest = [output async for output in generation]
        assert rest[-1].finish_reason is FinishReason.LENGTH
        async with asyncio.timeout(5):
            assert [output async for output in generation] == []

    with tiny_client(tmp_path) as (client, _):
        asyncio.run(read(client))


def test_draining_starts_a_batch_that_waits_to_be_full(tmp_path: Path) -> None:
    batch = BatchOptions(policy="static", batch_size=4)
    with tiny_client(tmp_path, batch=batch) as (client, _):
        generation = client.generate([5], _PARAMS)
        client.loop.close(drain_s=10)
        assert generation.wait()[0].finish_reason is FinishReason.LENGTH


def _choice(client: Client, name: str, mailbox: Mailbox) -> OutputProcessor:
    request = Request(name, [5, 6], num_prompt=2, params=_PARAMS, seed=0)
    return OutputProcessor(request, 0, mailbox, client.card.tokenizer)


def _wait_until_idle(client: Client) -> None:
    """Wait until no request runs."""
    client.generate([5], SamplingParams(max_tokens=40, ignore_eos=True)).wait()
    while client.loop.snapshot().scheduler.num_running:
        pass
