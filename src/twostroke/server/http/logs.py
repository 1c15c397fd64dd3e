"""The server's log: lines for people or for programs, and one for each request.

It has no text of a prompt or an answer, and nothing that a client sends can begin a line.
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO

from twostroke.server.http.api_key import OPEN_PATHS
from twostroke.server.http.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.server.http.request_context import ServedRequest

_MAX_PATH_LENGTH: Final = 200
_POLLED: Final = (*OPEN_PATHS, "/metrics", "/api/state", "/api/plan", "/api/load")  # by programs
FIGURES: Final = "figures"  # the attribute of a record that has them
_access = logging.getLogger("twostroke.access")


class AccessLog:
    """Logs a line for each request: its path, its status, its tokens and times."""

    def observe(self, served: ServedRequest) -> None:
        """Log a served request that is over, with seconds rounded to microseconds."""
        is_fine = served.status < 400 or served.endpoint in OPEN_PATHS  # whose changes are logged
        is_polled = served.endpoint in _POLLED and is_fine
        is_often = is_polled or served.is_tried_again
        level = logging.DEBUG if is_often else logging.INFO
        if not _access.isEnabledFor(level):
            return
        figures = served.figures() | {"path": served.path[:_MAX_PATH_LENGTH]}
        for name, value in figures.items():
            if isinstance(value, float):
                figures[name] = round(value, 6)
        _access.log(level, "request", extra={FIGURES: figures})

    def close(self) -> None:
        """Do nothing: every line is written."""


class LogFormatter(logging.Formatter):
    """A line of text for people, with figures as name=value, or a JSON object in one line."""

    def __init__(self, form: str) -> None:
        """Write `form`: "text" or "json"."""
        super().__init__()
        self._is_json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a traceback follows a line of text, and is a field of JSON."""
        at = datetime.fromtimestamp(record.created, UTC)
        found = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": one_line(record.getMessage()),
        }
        figures: dict[str, Any] = getattr(record, FIGURES, {})
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if self._is_json:
            return json.dumps(found | figures | ({"trace": trace} if trace else {}))
        words = [f"{name}={_word(value)}" for name, value in figures.items()]
        line = " ".join([found["time"], found["level"], found["message"], *words])
        return f"{line}\n{trace}" if trace else line


@contextmanager
def logging_to(stream: TextIO, form: str, level: str) -> Iterator[None]:
    """Write the log to `stream`, as "text" or "json", from a level on.

    It includes OpenTelemetry's warnings, such as those about a collector that cannot be reached.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogFormatter(form))
    loggers = [logging.getLogger(name) for name in ("twostroke", "opentelemetry")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger, least in zip(loggers, (level, "warning"), strict=True):
        logger.addHandler(handler)
        logger.setLevel(least.upper())
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (old, propagates) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(old)
            logger.propagate = propagates


def _word(value: object) -> str:
    """Return a value without spaces, or in quotes."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else json.dumps(text)
