"""Checks finished answers against their schemas, where grammars do not hold all of a schema."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from twostroke.engine.structured_output.schema.verify import UncheckedError
from twostroke.server.http.logs import FIGURES

if TYPE_CHECKING:
    from twostroke.engine.structured_output.schema.verify import SchemaViolation, Verifier
    from twostroke.server.observability.metrics import ServerMetrics

_MAX_WAITING: Final = 256  # texts; more are counted as unchecked
_logger = logging.getLogger("twostroke.serve")


class AnswerChecks:
    """Checks answers one at a time, and reports misses in metrics and log."""

    def __init__(self, verifier: Verifier, metrics: ServerMetrics) -> None:
        self._verifier = verifier
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, "twostroke-check")
        self._num_waiting = 0

    async def fault(self, schema: str, text: str) -> SchemaViolation | None:
        """Return the schema rule that a part of an answer breaks; None if it breaks none.

        Raises:
            UncheckedError: the check took too much time or memory, or too many answers wait for
                their check.
        """
        if self._num_waiting >= _MAX_WAITING:
            raise UncheckedError(f"{_MAX_WAITING} other answers wait for their check")
        loop = asyncio.get_running_loop()
        self._num_waiting += 1
        try:
            fault = await loop.run_in_executor(self._thread, self._verifier.fault, schema, text)
        finally:
            self._num_waiting -= 1
        self._metrics.checks.labels("valid" if fault is None else "invalid").inc()
        if fault is not None:
            self._metrics.misses.labels(fault.keyword).inc()
        return fault

    def count_redraw(self) -> None:
        """Count an answer that is generated again."""
        self._metrics.redraws.inc()

    def report(self, fault: SchemaViolation, kind: str, request_id: str) -> None:
        """Log that the final answer breaks its schema."""
        figures = {"request_id": request_id, "part": kind}
        extra = {FIGURES: figures | {"keyword": fault.keyword, "place": fault.place}}
        _logger.warning("An answer breaks its schema.", extra=extra)

    def report_unchecked(self, reason: str, kind: str, request_id: str) -> None:
        """Log and count that an answer could not be checked."""
        self._metrics.checks.labels("unchecked").inc()
        figures = {"request_id": request_id, "part": kind, "why": reason}
        _logger.warning(
            "An answer could not be checked against its schema.", extra={FIGURES: figures}
        )

    def close(self) -> None:
        """Drop the queue."""
        self._thread.shutdown(wait=False, cancel_futures=True)
