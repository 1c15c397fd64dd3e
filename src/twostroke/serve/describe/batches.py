"""The descriptions of the routes of files and batches."""

from __future__ import annotations

from typing import Any, Final

from twostroke.core.errors import OverloadedError, RequestError
from twostroke.http import errors
from twostroke.records import RecordsError
from twostroke.serve.batches import files, messages, openai
from twostroke.serve.describe.operation import BODY, HELLO, TEXT, Operation, parameter

_TAG: Final = "OpenAI"
_ANTHROPIC: Final = "Anthropic"
_OFF: Final = (errors.UnknownPathError, RecordsError)
_NAME: Final = {"type": "string", "minLength": 1}
_AFTER: Final = parameter("query", "after", "The id before the page.", **TEXT)
_OF_FILE: Final[dict[str, Any]] = {
    "errors": (RequestError, files.NoSuchFileError, *_OFF),
    "parameters": (parameter("path", "file_id", "Its `id`.", **_NAME),),
}
_OF_BATCH: Final[dict[str, Any]] = {
    "errors": (RequestError, openai.NoSuchBatchError, *_OFF),
    "parameters": (parameter("path", "batch_id", "Its `id`.", **_NAME),),
}
_PLACE: Final = (
    parameter("query", "after_id", "The id before the page.", **TEXT),
    parameter("query", "before_id", "The id after the page.", **TEXT),
)


def _limit(default: int, most: int) -> dict[str, Any]:
    bounds = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return parameter("query", "limit", "The size of a page.", **bounds)


OPERATIONS: Final[dict[tuple[str, str], Operation]] = {
    ("POST", files.PATH): Operation(
        "Upload the input of a batch",
        _TAG,
        "Without `--records` this and the following paths answer 404.",
        answer=files.FileBody,
        errors=(*BODY, *_OFF),
        form={
            "type": "object",
            "properties": {
                "purpose": {"const": files.INPUT},
                "file": {"type": "string", "contentMediaType": "application/octet-stream"},
            },
            "required": ["purpose", "file"],
        },
    ),
    ("GET", files.PATH): Operation(
        "List files, page by page",
        _TAG,
        answer=files.FileList,
        errors=(RequestError, *_OFF),
        parameters=(
            _AFTER,
            _limit(files.MAX_LISTED, files.MAX_LISTED),
            parameter("query", "order", "By time.", enum=["asc", "desc"], default="desc"),
            parameter("query", "purpose", "Only files of this purpose.", **TEXT),
        ),
    ),
    ("GET", files.ONE): Operation("Return a file's facts", _TAG, answer=files.FileBody, **_OF_FILE),
    ("DELETE", files.ONE): Operation("Delete a file", _TAG, answer=files.DeletedFile, **_OF_FILE),
    ("GET", f"{files.ONE}/content"): Operation(
        "Return a file's lines", _TAG, media={"application/jsonl": TEXT}, **_OF_FILE
    ),
    ("POST", openai.PATH): Operation(
        "Run the requests of a file",
        _TAG,
        answer=openai.BatchBody,
        errors=(*BODY, files.NoSuchFileError, OverloadedError, *_OFF),
        examples={
            "day": {
                "input_file_id": "file-0",
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            }
        },
    ),
    ("GET", openai.PATH): Operation(
        "List batches, the newest first",
        _TAG,
        answer=openai.BatchList,
        errors=(RequestError, *_OFF),
        parameters=(_AFTER, _limit(openai.LISTED, openai.MAX_LISTED)),
    ),
    ("GET", openai.ONE): Operation("Return a batch", _TAG, answer=openai.BatchBody, **_OF_BATCH),
    ("POST", f"{openai.ONE}/cancel"): Operation(
        "Stop a batch; the results so far are kept", _TAG, answer=openai.BatchBody, **_OF_BATCH
    ),
    ("POST", messages.PATH): Operation(
        "Answer many conversations, for which nobody waits",
        _ANTHROPIC,
        "Without `--records` this and the following paths answer 404.",
        answer=messages.MessageBatch,
        errors=(*BODY, OverloadedError, *_OFF),
        examples={
            "two": {
                "requests": [
                    {"custom_id": id_, "params": {"max_tokens": 20, "messages": HELLO}}
                    for id_ in ("a", "b")
                ]
            }
        },
    ),
    ("GET", messages.PATH): Operation(
        "List message batches, the newest first",
        _ANTHROPIC,
        answer=messages.MessageBatchList,
        errors=(RequestError, *_OFF),
        parameters=(*_PLACE, _limit(messages.LISTED, messages.MAX_LISTED)),
    ),
    ("GET", messages.ONE): Operation(
        "Return a message batch", _ANTHROPIC, answer=messages.MessageBatch, **_OF_BATCH
    ),
    ("DELETE", messages.ONE): Operation(
        "Delete a message batch that has ended, and its results",
        _ANTHROPIC,
        answer=messages.DeletedMessageBatch,
        **_OF_BATCH,
    ),
    ("POST", f"{messages.ONE}/cancel"): Operation(
        "Stop a message batch; the results so far are kept",
        _ANTHROPIC,
        answer=messages.MessageBatch,
        **_OF_BATCH,
    ),
    ("GET", f"{messages.ONE}/results"): Operation(
        "Return the results of a message batch, a line each",
        _ANTHROPIC,
        media={"application/x-jsonl": TEXT},
        **_OF_BATCH,
    ),
}
