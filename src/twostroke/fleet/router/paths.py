"""The paths that a router forwards, and why it refuses batches and stored files."""

from __future__ import annotations

import re
from typing import Final

from twostroke.core.errors import TwostrokeError

READ: Final = (  # without an answer of tokens
    *("/v1/embeddings", "/embeddings", "/api/embed", "/api/embeddings", "/v1/rerank", "/rerank"),
)
FREE: Final = (  # without an engine
    *("/v1/messages/count_tokens", "/v1/responses/input_tokens"),
    *("/v1/chat/completions/input_tokens", "/apply-template"),
    *("/tokenize", "/detokenize", "/api/show", "/api/pull"),
)
# Posts that compute: they go where the policy says, and may be tried again.
COMPUTED: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    "/v1/responses/compact",
    *("/completion", "/infill", "/api/chat", "/api/generate", *READ, *FREE),
)
# Paths of things that one replica stores for each tenant.
TENANTS: Final = ("/v1/files", "/v1/uploads", "/v1/batches", "/v1/messages/batches")
# Occurs in a body that names a stored file, which is on the tenant's replica.
FILE_ID: Final = re.compile(rb'"file_id"\s*:\s*"file-')
_ID: Final = r"[A-Za-z0-9_-]{1,100}"
_STORED_PATH: Final = rf"/v1/(?:responses|chat/completions|conversations)/({_ID})"
STORED: Final = re.compile(rf"{_STORED_PATH}(?:/.*)?")
STORED_ID: Final = re.compile(_ID)
# The path of stored things under /v1, by the prefix of their ids.
_COLLECTIONS: Final = {"chatcmpl-": "chat/completions", "conv_": "conversations"}
_KEPT: Final = rf"(?:{'|'.join(TENANTS)})"
_OTHERS: Final = {
    "POST": re.compile(rf"{_STORED_PATH}(?:/(?:cancel|items))?|/v1/conversations"),
    "DELETE": re.compile(rf"{_STORED_PATH}(?:/items/{_ID})?|{_KEPT}/{_ID}"),
    "GET": re.compile(
        rf"{_STORED_PATH}(?:/(?:input_items|messages|items(?:/{_ID})?))?|/v1/chat/completions"
        rf"|{_KEPT}(?:/{_ID}(?:/(?:content|results))?)?"
        r"|/v1/models(?:/(?!\.\.?(?:/|$))[^/%\\?#;]+)+"  # a model's name may have slashes
        r"|/props|/tokenizer_info|/lora-adapters|/openapi\.json|/api/(?:tags|ps|version)"
    ),
}


def stored_path(id_: str) -> str:
    """Return the path of a stored response, chat completion or conversation, from its id."""
    names = (name for start, name in _COLLECTIONS.items() if id_.startswith(start))
    return f"/v1/{next(names, 'responses')}/{id_}"


def is_harmless(method: str, path: str) -> bool:
    """Return whether a request can neither control a replica nor bypass limits."""
    if method == "POST" and path in COMPUTED:
        return path != "/api/pull"  # Ollama fetches models
    others = _OTHERS.get("GET" if method == "HEAD" else method)
    return others is not None and others.fullmatch(path) is not None


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
