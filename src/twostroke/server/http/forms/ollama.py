"""The form of errors in Ollama's protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from twostroke.core.errors import ModelNotFoundError, TwostrokeError
from twostroke.core.json_io import encode_json
from twostroke.server.http.errors import one_line, to_message
from twostroke.server.http.request_context import ErrorForm

if TYPE_CHECKING:
    from twostroke.core.errors import Naming


class OllamaErrorBody(msgspec.Struct, frozen=True):
    """Ollama's error object, as a response body or as the last line of a stream."""

    error: str


def _body(error: TwostrokeError, _request_id: str, naming: Naming) -> bytes:
    message = to_message(error, naming)
    if isinstance(error, ModelNotFoundError) and "name" in error.facts:
        # Clients search for these words.
        reason = "model '{name}' not found: this server has {served} (others: `twostroke pull`)"
        message = one_line(reason.format(**error.facts))
    return encode_json(OllamaErrorBody(message))


OLLAMA: Final = ErrorForm(
    status=lambda error: error.http_status, body=_body, struct=OllamaErrorBody
)
