"""The server's log, as text or JSON, and the access log with a line for each request.

The log never contains the text of a prompt or an answer, and no client can forge a line.
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO

from twostroke.core.message_text import without_passwords
from twostroke.server.http.api_key import OPEN_PATHS
from twostroke.server.http.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.server.http.request_context import ServedRequest

_MAX_PATH_LENGTH: Final = 200
_POLLED_PATHS: Final = (
    *OPEN_PATHS,
    "/metrics",
    "/api/state",
    "/api/plan",
    "/api/load",
)  # by load balancers and dashboards
FIGURES: Final = "figures"  # the attribute of a log record with named values
_access_logger = logging.getLogger("twostroke.access")


class AccessLog:
    """Logs a line for each request: path, status, tokens and times."""

    def observe(self, served_request: ServedRequest) -> None:
        """Log the line of a request that has ended.

        A successful poll, or a request that the batch runner sends again, is logged at level DEBUG.
        """
        is_success = (
            served_request.status < 400 or served_request.endpoint in OPEN_PATHS
        )  # health changes are logged
        is_poll = served_request.endpoint in _POLLED_PATHS and is_success
        is_frequent = is_poll or served_request.is_tried_again
        level = logging.DEBUG if is_frequent else logging.INFO
        if not _access_logger.isEnabledFor(level):
            return
        figures = served_request.figures() | {"path": served_request.path[:_MAX_PATH_LENGTH]}
        for name, value in figures.items():
            if isinstance(value, float):
                figures[name] = round(value, 6)  # seconds, to microseconds
        _access_logger.log(level, "request", extra={FIGURES: figures})

    def close(self) -> None:
        """Do nothing, since every line of the access log is already written."""


class LogFormatter(logging.Formatter):
    """Formats log records as text lines, with figures as name=value, or as lines of JSON."""

    def __init__(self, log_format: str) -> None:
        """Create a formatter; `log_format` is "text" or "json"."""
        super().__init__()
        self._is_json = log_format == "json"

    def format(self, record: logging.LogRecord) -> str:
        """Return the log line of a record.

        A traceback follows a text line, and is the field `trace` of a JSON line.
        """
        time = datetime.fromtimestamp(record.created, UTC)
        fields = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": one_line(without_passwords(record.getMessage())),
        }
        figures: dict[str, Any] = getattr(record, FIGURES, {})
        traceback = (
            without_passwords(self.formatException(record.exc_info)) if record.exc_info else None
        )
        if self._is_json:
            return json.dumps(fields | figures | ({"trace": traceback} if traceback else {}))
        words = [f"{name}={_format_value(value)}" for name, value in figures.items()]
        line = " ".join([fields["time"], fields["level"], fields["message"], *words])
        return f"{line}\n{traceback}" if traceback else line


@contextmanager
def logging_to(stream: TextIO, log_format: str, level: str) -> Iterator[None]:
    """Send the process's log to `stream` during a `with` block.

    Records of at least `level` are written, as `log_format` ("text" or "json"). OpenTelemetry's
    warnings are included, for example that a collector cannot be reached.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogFormatter(log_format))
    loggers = [logging.getLogger(name) for name in ("twostroke", "opentelemetry")]
    saved = [(logger.level, logger.propagate) for logger in loggers]
    for logger, min_level in zip(loggers, (level, "warning"), strict=True):
        logger.addHandler(handler)
        logger.setLevel(min_level.upper())
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (saved_level, propagates) in zip(loggers, saved, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(saved_level)
            logger.propagate = propagates


def _format_value(value: object) -> str:
    """Return a value as text for a log line, in quotes if it has spaces."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    text = str(value)
    is_word = text.isascii() and text.isprintable() and " " not in text
    return text if is_word else json.dumps(text)
