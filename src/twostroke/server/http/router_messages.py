"""Messages between a router and a server: the reported load, and lines added to streams.

A router that can continue a stream at another server sends the header `x-twostroke-resume: new`.
Each write of the stream then ends with a line with a record (`generation/stream_records.py`), which
the router removes and keeps. A server that cannot finish the stream ends it with a line that says
so. To continue the stream, the router sends the body of the request followed by all records, each
with a line break, and the header names the length of the body.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - msgspec reads it
from typing import Annotated, Final

from msgspec import UNSET, Meta, UnsetType, field

from twostroke.core.frozen import Frozen

RESUME_HEADER: Final = b"x-twostroke-resume"
NEW_STREAM: Final = b"new"  # the header's value for a stream without records yet
# Its value for a request that the router sends to another server if this one loses it, as a whole.
NO_RECORDS: Final = b"none"
RECORD_MARK: Final = b": twostroke-record "
LOST_MARK: Final = b": twostroke-lost "  # the error's code follows
# A server's states in its reports of health and load: "ok", "draining", or an engine's `Health`.
SERVER_STATES: Final = ("ok", "draining", "stalled", "recovering", "stopped")


class ServerLoad(Frozen, kw_only=True):
    """The response to GET /api/load: a server's facts and load, for a router.

    Work and tokens are totals of all models. Older servers do not send the fields with a default.

    Attributes:
        epoch: changes with each start of the server or its engine.
        numerics: a text for the first model's numerics; servers with equal texts give equal
            answers.
        numerics_by_model: this text for each model that was loaded, by name.
        prompt_tokens, cached_tokens: counts since the start.
        horizon_s: seconds since the last use of the page that was evicted last; pages used later
            are still in the prefix cache. Unloading a model evicts its pages.
        context_length: the context length of the first model.
        prefill_per_decode: the number of prefill engines that a decode engine like this can use,
            once it has been measured.
        keeps_files: whether the server has files and batches.
        trusts_sender: whether the request had a router's key, whose sender may name tenants.
        takes_any_name: whether an unknown model name means the first model.
        coalesces: whether equal requests in flight are computed once.
    """

    status: Annotated[str, Meta(extra_json_schema={"enum": list(SERVER_STATES)})]
    epoch: str
    models: tuple[str, ...]
    version: str
    numerics: str
    numerics_by_model: Mapping[str, str] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    # Seconds are limited so that sums stay finite.
    work_s: Annotated[
        float, Meta(ge=0, le=1e9, description="Seconds that the tokens in the queue take.")
    ]
    prompt_tokens: int
    cached_tokens: int
    horizon_s: Annotated[float, Meta(ge=0, le=1e9)] | None
    context_length: int = 0
    prefill_per_decode: float | None = None
    keeps_files: bool | UnsetType = UNSET
    trusts_sender: bool | UnsetType = UNSET
    takes_any_name: bool | UnsetType = UNSET
    coalesces: bool | UnsetType = UNSET


def split_body(body: bytes, header: str) -> tuple[bytes, list[bytes]]:
    """Return a request's own body, and the records that a router has added.

    `header` is the value of `x-twostroke-resume`; empty if the request has no such header.
    """
    if not (header.isascii() and header.isdecimal()) or int(header[:12]) > len(body):
        return body, []
    length = int(header)
    return body[:length], body[length:].split()
