"""Receives the bodies of requests that store things, and decodes long ones in a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from twostroke.server.http.limits import body_of

if TYPE_CHECKING:
    from starlette.requests import Request

    from twostroke.server.body.decode import BodyDecoder
    from twostroke.server.http.fair_queue import Readers
    from twostroke.server.http.ignored import Ignored
    from twostroke.server.http.limits import RequestLimits

T = TypeVar("T", bound=msgspec.Struct)

# Longer bodies are decoded, rendered and tokenized in a thread, so that other streams do not wait;
# for shorter ones the hand-over would take longer than the work.
LARGE_BODY_BYTES: Final = 16 * 1024


async def receive_fields(
    request: Request, decoder: BodyDecoder[T], limits: RequestLimits, readers: Readers
) -> tuple[T, list[Ignored]]:
    """Return the fields of a request's body, as `decoder` does; long bodies take turns.

    Raises:
        TwostrokeError: as `body_of` and `BodyDecoder.decode`, and if the client left.
    """
    async with body_of(request, limits) as body:
        if len(body) <= LARGE_BODY_BYTES:
            return decoder.decode(body)
        return await readers.run_for(request, decoder.decode, body)
