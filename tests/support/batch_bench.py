"""A batch runner whose requests a stand-in for the server answers."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

from twostroke.server.batch import files, messages, openai, stored_batches
from twostroke.server.batch.runner import BatchRunner
from twostroke.server.batch.stored_batches import Batch
from twostroke.server.http.error_forms import error_form
from twostroke.server.http.errors import to_response
from twostroke.server.http.limits import RequestLimits
from twostroke.server.http.request_context import STATE_KEY, ServedRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.core.errors import TwostrokeError
    from twostroke.server.storage import Records

FORMS = {openai.PROTOCOL: openai.FORM, messages.PROTOCOL: messages.FORM}
URLS = {openai.PROTOCOL: "/v1/completions", messages.PROTOCOL: "/v1/messages"}
DAY_S = 86_400.0


class App:
    """Answers batch requests, or fails as `fail` says for a line and the number of attempts."""

    def __init__(self, fail: Callable[[str, int], TwostrokeError | None] | None = None) -> None:
        self.sent: dict[str, int] = {}
        self.fail = fail or (lambda _id, _times: None)
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        served_request = ServedRequest("r", error_form(scope), "POST", scope["path"])
        scope["state"] = {STATE_KEY: served_request}
        id_ = json.loads((await receive())["body"])["id"]
        self.sent[id_] = times = self.sent.get(id_, 0) + 1
        await asyncio.sleep(0.005)
        await self.is_open.wait()
        if (error := self.fail(id_, times)) is not None:
            response = to_response(error, scope)
            response.headers["x-request-id"] = "r"
            await response(scope, receive, send)
            return
        headers = [(b"x-request-id", b"r")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})


class Bench:
    """A batch runner over the records in a folder, with one batch."""

    def __init__(
        self,
        records: Records,
        app: App,
        may_run: Callable[[str], bool] = lambda _tenant: True,
        num_together: int = 8,
    ) -> None:
        self.records, self.app = records, app
        self.runner = BatchRunner(records, FORMS, RequestLimits(), lambda: num_together, may_run)

    async def begin(self, num_lines: int, protocol: str = openai.PROTOCOL) -> Batch:
        """Run a batch whose requests have their line's index as `custom_id`."""
        await self.runner.start(self.app)
        return await self.add(num_lines, protocol)

    async def add(
        self, num_lines: int, protocol: str = openai.PROTOCOL, id_: str = "b", tenant: str = "anna"
    ) -> Batch:
        with self.records.files.begin() as file:
            for i in range(num_lines):
                line = {"custom_id": f"{i}", "method": "POST", "url": URLS[protocol]}
                file.write(json.dumps({**line, "body": {"id": f"{i}"}}).encode() + b"\n")
            body = files.new_file(files.new_id(), file.num_bytes, "in.jsonl")
            file.keep(body.id)
        now_s = time.time()
        batch = Batch(
            id=id_,
            tenant=tenant,
            protocol=protocol,
            endpoint=URLS[protocol],
            input_file=body.id,
            window="24h",
            expires_at=now_s + DAY_S,
            since={"validating": now_s},
        )
        await self.runner.add(batch, body)
        return batch

    async def read_batch(self) -> Batch:
        batch = await self.records.read(
            lambda db: stored_batches.find(db, "b", "anna", self.protocol)
        )
        assert batch is not None
        return batch

    protocol = openai.PROTOCOL

    async def finished_batch(self) -> Batch:
        for _ in range(2000):
            if not (batch := await self.read_batch()).is_open:
                return batch
            await asyncio.sleep(0.005)
        raise AssertionError(batch)

    def lines(self, file: str | None) -> dict[str, Any]:
        text = self.records.files.path(str(file)).read_text()
        return {line["custom_id"]: line for line in map(json.loads, text.splitlines())}
