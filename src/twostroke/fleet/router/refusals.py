"""Why a router refuses requests that a server would take."""

from __future__ import annotations

from typing import Final

from twostroke.core.errors import TwostrokeError


class BatchPathError(TwostrokeError):
    """Files and batches are not taken here."""

    http_status = 400
    code = "no_batches_here"


NO_BACKGROUND: Final = (
    "is not supported by a router that keeps accounts, which learns what an answer uses from the "
    "answer: leave it out."
)
NO_RECORDS: Final = (
    "No server of this router keeps files or batches: start `twostroke serve` with --records DIR."
)
NO_BATCHES: Final = (
    "This router keeps accounts, and takes no files and batches, whose lines a replica would run "
    "past the limits of their key: send the lines themselves, as `twostroke batch --url` does."
)
