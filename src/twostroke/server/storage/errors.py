"""The error of records that cannot be read or written."""

from __future__ import annotations

from twostroke.core.errors import TwostrokeError


class RecordsError(TwostrokeError):
    """The database or a file cannot be read or written; the message has its path."""

    http_status = 503
    code = "records_unavailable"
