"""Checks finished answers against JSON schemas whose rules a grammar cannot fully enforce."""

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

_MAX_WAITING_TEXTS: Final = 256  # more texts are counted as unchecked
_logger = logging.getLogger("twostroke.serve")


class AnswerChecks:
    """Checks finished answers against JSON schemas, in one thread; counts and logs violations.

    All requests of the server share one instance.
    """

    def __init__(self, verifier: Verifier, metrics: ServerMetrics) -> None:
        self._verifier = verifier
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, "twostroke-check")
        self._num_waiting = 0

    async def find_violation(self, schema: str, text: str) -> SchemaViolation | None:
        """Check an answer's text against a JSON schema, and return the rule that the text breaks.

        Returns None if the text is valid.

        Raises:
            UncheckedError: the check takes too much time or memory, or too many answers wait
                for a check.
        """
        if self._num_waiting >= _MAX_WAITING_TEXTS:
            raise UncheckedError(f"{_MAX_WAITING_TEXTS} other answers wait for their check")
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

    def count_regeneration(self) -> None:
        """Count, in the metrics, an answer that is generated again as it breaks its schema."""
        self._metrics.redraws.inc()

    def report(self, fault: SchemaViolation, kind: str, request_id: str) -> None:
        """Log the schema rule that an answer still breaks after the last attempt to generate it.

        `kind` is the kind of the content block that breaks its schema, such as "text".
        """
        figures = {
            "request_id": request_id,
            "part": kind,
            "keyword": fault.keyword,
            "place": fault.location,
        }
        _logger.warning("An answer breaks its schema.", extra={FIGURES: figures})

    def report_unchecked(self, reason: str, kind: str, request_id: str) -> None:
        """Log and count an answer that could not be checked against its JSON schema."""
        self._metrics.checks.labels("unchecked").inc()
        figures = {"request_id": request_id, "part": kind, "why": reason}
        _logger.warning(
            "An answer could not be checked against its schema.", extra={FIGURES: figures}
        )

    def close(self) -> None:
        """Drop the checks that wait, and stop the thread of schema checks."""
        self._thread.shutdown(wait=False, cancel_futures=True)
