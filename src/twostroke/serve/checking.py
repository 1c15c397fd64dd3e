"""Checks finished answers against their schemas, where grammars do not hold all of a schema."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from twostroke.core.request import FinishReason
from twostroke.http.logs import FIGURES
from twostroke.schema.verify import UncheckedError
from twostroke.serve.events import BlockKind, Closed, ContentBlock, Ended

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.http.served import ServedRequest
    from twostroke.schema.verify import Verifier
    from twostroke.serve.dialect import Reply
    from twostroke.serve.events import Event, EventReader
    from twostroke.serve.job import Encoded
    from twostroke.serve.observe.metrics import Metrics

_MAX_WAITING: Final = 256  # texts; more are counted as unchecked
_logger = logging.getLogger("twostroke.serve")


class AnswerChecks:
    """Checks answers one at a time, after they were sent, and reports misses in metrics and log."""

    def __init__(self, verifier: Verifier, metrics: Metrics) -> None:
        self._verifier = verifier
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, "twostroke-check")
        self._places = threading.Semaphore(_MAX_WAITING)

    def reader(self, reply: Reply, encoded: Encoded, served: ServedRequest) -> EventReader:
        """Return a reader of a job's outputs, which has them checked if the grammar is weaker."""
        if not encoded.gaps:
            return reply.reader()
        job = reply.job
        calls = job.tools.functions if job.tools is not None else ()
        schemas = {one.name: json.dumps(one.schema) for one in calls}
        form = job.params.constraint
        text = form.text if form is not None and form.notation == "json_schema" else None
        return reply.reader(Watch(self, schemas, text, served.request_id))

    def submit(self, schema: str, block: ContentBlock, request_id: str) -> None:
        """Check a block of an answer soon."""
        if self._places.acquire(blocking=False):
            self._thread.submit(self._check, schema, block, request_id)
        else:
            self._metrics.checks.labels("unchecked").inc()

    def close(self) -> None:
        """Drop the queue."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check(self, schema: str, block: ContentBlock, request_id: str) -> None:
        figures = {"request_id": request_id, "part": block.kind.value}
        try:
            fault = self._verifier.fault(schema, block.text)
        except UncheckedError as error:
            self._metrics.checks.labels("unchecked").inc()
            extra = {FIGURES: figures | {"why": str(error)}}
            _logger.warning("An answer could not be checked against its schema.", extra=extra)
            return
        finally:
            self._places.release()
        self._metrics.checks.labels("valid" if fault is None else "invalid").inc()
        if fault is not None:
            self._metrics.misses.labels(fault.keyword).inc()
            extra = {FIGURES: figures | {"keyword": fault.keyword, "place": fault.place}}
            _logger.warning("An answer does not keep to its schema.", extra=extra)


class Watch:
    """Collects the blocks of a job's answers, and has them checked when an answer ends.

    `calls` are the schemas of arguments by the function's name, `text` the schema of the text. An
    answer that was cut, by its limit or by a stop string, is not checked.
    """

    def __init__(
        self, checks: AnswerChecks, calls: dict[str, str], text: str | None, request_id: str
    ) -> None:
        self._checks = checks
        self._calls = calls
        self._text = text
        self._request_id = request_id
        self._blocks: dict[int, list[ContentBlock]] = {}  # by choice

    def take(self, events: Iterable[Event]) -> None:
        """Take the next events of the job."""
        for event in events:
            if isinstance(event, Closed):
                self._blocks.setdefault(event.block.choice, []).append(event.block)
            elif isinstance(event, Ended):
                blocks = self._blocks.pop(event.choice, [])
                if event.reason is FinishReason.STOP and not isinstance(event.stop, str):
                    self._end(blocks)

    def _end(self, blocks: list[ContentBlock]) -> None:
        has_calls = any(block.kind is BlockKind.CALL for block in blocks)
        for block in blocks:
            if block.kind is BlockKind.CALL:
                schema = self._calls.get(block.name)
            else:
                is_form = block.kind is BlockKind.TEXT and not has_calls
                schema = self._text if is_form else None
            if schema is not None:
                self._checks.submit(schema, block, self._request_id)
