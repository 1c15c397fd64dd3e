"""The paths that a router forwards, and why it refuses batches and stored files."""

from __future__ import annotations

import re
from typing import Final

from twostroke.core.errors import TwostrokeError

# Paths whose answers have no tokens.
PROMPT_ONLY_PATHS: Final = (
    *("/v1/embeddings", "/embeddings", "/api/embed", "/api/embeddings", "/v1/rerank", "/rerank"),
)
# Paths that need no engine.
ENGINELESS_PATHS: Final = (
    *("/v1/messages/count_tokens", "/v1/responses/input_tokens"),
    *("/v1/chat/completions/input_tokens", "/apply-template"),
    *("/tokenize", "/detokenize", "/api/show", "/api/pull"),
)
# Paths of POST requests that the policy routes, and that may be sent again after a loss.
COMPUTED_PATHS: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    "/v1/responses/compact",
    *(
        "/completion",
        "/infill",
        "/api/chat",
        "/api/generate",
        *PROMPT_ONLY_PATHS,
        *ENGINELESS_PATHS,
    ),
)
# Paths of files and batches, which one replica keeps for each tenant.
FILE_PATHS: Final = ("/v1/files", "/v1/uploads", "/v1/batches", "/v1/messages/batches")
# Occurs in a body that names a stored file, which only the tenant's replica has.
FILE_REFERENCE: Final = re.compile(rb'"file_id"\s*:\s*"file-')
_ID: Final = r"[A-Za-z0-9_-]{1,100}"
_STORED: Final = rf"/v1/(?:responses|chat/completions|conversations)/({_ID})"
STORED_PATH: Final = re.compile(rf"{_STORED}(?:/.*)?")
STORED_ID: Final = re.compile(_ID)
# The path under /v1 of stored objects, by the prefix of their ids; others are responses.
_COLLECTIONS: Final = {"chatcmpl-": "chat/completions", "conv_": "conversations"}
_FILES: Final = rf"(?:{'|'.join(FILE_PATHS)})"
# Other paths that neither control a server nor bypass limits, by method.
_HARMLESS: Final = {
    "POST": re.compile(rf"{_STORED}(?:/(?:cancel|items))?|/v1/conversations"),
    "DELETE": re.compile(rf"{_STORED}(?:/items/{_ID})?|{_FILES}/{_ID}"),
    "GET": re.compile(
        rf"{_STORED}(?:/(?:input_items|messages|items(?:/{_ID})?))?|/v1/chat/completions"
        rf"|{_FILES}(?:/{_ID}(?:/(?:content|results))?)?"
        r"|/v1/models(?:/(?!\.\.?(?:/|$))[^/%\\?#;]+)+"  # a model's name may have slashes
        r"|/props|/tokenizer_info|/lora-adapters|/openapi\.json|/api/(?:tags|ps|version)"
    ),
}


def stored_path(id_: str) -> str:
    """Return the path of a stored response, chat completion or conversation, from its id."""
    for prefix, collection in _COLLECTIONS.items():
        if id_.startswith(prefix):
            return f"/v1/{collection}/{id_}"
    return f"/v1/responses/{id_}"


def is_file_path(path: str) -> bool:
    """Return whether a path is about files or batches; a tenant's files are all at one replica."""
    return any(path == start or path.startswith(f"{start}/") for start in FILE_PATHS)


def is_harmless(method: str, path: str) -> bool:
    """Return whether a router that enforces the limits of keys may forward a request.

    False if the request could control a replica, or would be computed without being counted.
    """
    if method == "POST" and path in COMPUTED_PATHS:
        return path != "/api/pull"  # Ollama fetches models
    harmless = _HARMLESS.get("GET" if method == "HEAD" else method)
    return harmless is not None and harmless.fullmatch(path) is not None


class BatchPathError(TwostrokeError):
    """The error for requests about files and batches, which this router does not accept."""

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
