"""One batch from its upload to its last file, in a process that may be cut off anywhere.

What a client or the runner has been assured of is reported, so that the next process can be held
to it.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from twostroke.server.batch import files, openai, runner, stored_batches
from twostroke.server.http.limits import RequestLimits
from twostroke.server.storage import Records, RecordsError

if TYPE_CHECKING:
    from pathlib import Path

NUM_LINES = 12
TENANT = "anna"
runner._DISK_PAUSE_S = 0.01  # type: ignore[misc]
_PATIENCE_S = 20


class ReportingRunner(runner.BatchRunner):
    """Reports each line whose result is kept."""

    report: Any = None

    async def _keep(self, batch: Any, line: Any, answer: Any) -> None:
        await super()._keep(batch, line, answer)
        self.report("kept", line.custom_id)


def run(folder: Path, assured: dict[str, str], pipe: int) -> None:
    """Go on from what was `assured` so far, until the batch has ended."""

    def report(word: str, value: str) -> None:
        os.write(pipe, f"{word} {value}\n".encode())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del scope
        body = json.loads((await receive())["body"])
        report("ran", body["prompt"])
        await asyncio.sleep(0.0005 * (int(body["prompt"]) % 3))
        headers = [(b"x-request-id", b"r")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    async def go(records: Records) -> None:
        running = ReportingRunner(
            records, {"openai": openai.FORM}, RequestLimits(), lambda: 4, lambda _: True
        )
        running.report = report
        await running.start(app)
        if "batch" not in assured:
            batch = await retry(partial(begin, records, running))
            report("batch", batch.id)
            assured["batch"] = batch.id
        end_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end_s:
            find = partial(
                stored_batches.find, id_=assured["batch"], tenant=TENANT, protocol="openai"
            )
            result = await records.read(find)
            assert result is not None, "an assured batch is lost"
            if not result.is_open:
                assert (result.status, result.completed) == ("completed", NUM_LINES), result
                report("output", str(result.output_file))
                await running.stop()
                return
            await asyncio.sleep(0.002)
        raise AssertionError(f"the batch does not end: {result}")

    with closing(Records(folder)) as records:
        asyncio.run(go(records))


async def retry(work: Any) -> Any:
    """Return what `work` returns, and try again after an error, as a client does."""
    for _ in range(5):
        try:
            return await work()
        except RecordsError:
            await asyncio.sleep(0.01)
    raise AssertionError("a single fault must not last")


async def begin(records: Records, running: runner.BatchRunner) -> stored_batches.Batch:
    """Upload the lines and run them."""
    with records.files.begin() as file:
        for number in range(NUM_LINES):
            body = {"prompt": str(number)}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps({**line, "body": body}).encode() + b"\n")
        uploaded = files.new_file(files.new_id(), file.num_bytes, "in.jsonl")
        await asyncio.to_thread(file.keep, uploaded.id)
    await records.write(partial(files.insert, file=uploaded, tenant=TENANT))
    batch_request = openai.BatchRequest(uploaded.id, "/v1/completions", "24h")
    batch = openai._new(batch_request, SimpleNamespace(tenant=TENANT, key=None))
    await running.add(batch)
    return batch
