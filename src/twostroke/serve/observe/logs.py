"""The server's log: lines for people or for programs, and one for each request.

No text of a prompt or an answer is in it, and nothing that a client sends can begin a line.
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO

from twostroke.serve.http.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.serve.observe.exchange import Embedded, Exchange, Generated

_MOST_PATH: Final = 200
_POLLED: Final = ("/health", "/metrics", "/api/state")  # every second, by programs
_FIGURES: Final = "figures"  # the attribute of a record that has them
_access = logging.getLogger("twostroke.access")


class AccessLog:
    """Logs a line for each request: which, how it ended, what it took."""

    def watch(self, exchange: Exchange) -> None:
        """Log an exchange that is over."""
        is_polled = exchange.endpoint in _POLLED and exchange.status < 400
        level = logging.DEBUG if is_polled else logging.INFO
        if _access.isEnabledFor(level):
            _access.log(level, "request", extra={_FIGURES: figures(exchange)})

    def close(self) -> None:
        """Nothing is left."""


def figures(exchange: Exchange) -> dict[str, Any]:
    """Return what is told of an exchange, seconds rounded to microseconds."""
    found: dict[str, Any] = {
        "request_id": exchange.request_id,
        "method": exchange.method,
        "path": exchange.path[:_MOST_PATH],
        "status": exchange.status,
        "duration_s": round(exchange.ended_s - exchange.began_s, 6),
        "client_gone": exchange.is_client_gone,
    }
    if exchange.trace_id:
        found["trace_id"] = exchange.trace_id
    if exchange.error is not None:
        found["error"] = exchange.error
    if exchange.generated is not None:
        found |= _generated(exchange.generated)
    if exchange.embedded is not None:
        found |= _embedded(exchange.embedded)
    return found


def _generated(generated: Generated) -> dict[str, Any]:
    usage, timings = generated.usage, generated.timings
    found: dict[str, Any] = {
        "response_id": generated.response_id,
        "model": generated.model,
        "class": generated.service,
        "stream": generated.is_stream,
        "choices": generated.num_choices,
        "prompt_tokens": generated.num_prompt,
        "cached_tokens": generated.num_cached,
        "completion_tokens": generated.num_tokens,
        "accepted_tokens": usage.accepted_tokens,
        "rejected_tokens": usage.rejected_tokens,
        "finish_reasons": [reason.value for reason in generated.ends],
    }
    seconds = {
        "queue_s": None if timings is None else timings.queue_s,
        "ttft_s": generated.ttft_s,
        "tpot_s": generated.tpot_s,
        "e2e_s": None if timings is None else timings.e2e_s,
    }
    return found | {name: round(s, 6) for name, s in seconds.items() if s is not None}


def _embedded(embedded: Embedded) -> dict[str, Any]:
    return {
        "model": embedded.model,
        "class": embedded.service,
        "texts": embedded.vectors.num_texts,
        "prompt_tokens": embedded.vectors.num_tokens,
        "cached_tokens": embedded.vectors.num_cached,
    }


class TextFormatter(logging.Formatter):
    """A line for people: when, how grave, what, and the figures as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a trace, where there is one, follows in lines of its own."""
        parts = [_when(record), record.levelname.lower(), one_line(record.getMessage())]
        found: dict[str, Any] = getattr(record, _FIGURES, {})
        parts += [f"{name}={_word(value)}" for name, value in found.items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """A JSON object in one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, which is ASCII."""
        told = {
            "time": _when(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": one_line(record.getMessage()),
            **getattr(record, _FIGURES, {}),
        }
        if record.exc_info:
            told["trace"] = self.formatException(record.exc_info)
        return json.dumps(told)


@contextmanager
def logging_to(stream: TextIO, form: str, level: str) -> Iterator[None]:
    """Write the log to `stream`, as "text" or "json", from a level on.

    Warnings of OpenTelemetry, about a collector that cannot be reached, are part of it.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
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


def _when(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _word(value: object) -> str:
    """Return a value without spaces, as far as it is not quoted."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else json.dumps(text)
