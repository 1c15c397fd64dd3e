"""The OpenAPI descriptions of the routes of files, uploads and batches."""

from __future__ import annotations

from typing import Any, Final

from twostroke.core.errors import OverloadedError, RequestError
from twostroke.server.batch import files, messages, openai, uploads
from twostroke.server.http import errors
from twostroke.server.openapi.operation import BODY, HELLO, TEXT, RouteDescription, parameter
from twostroke.server.storage import RecordsError

_TAG: Final = "OpenAI"
_ANTHROPIC: Final = "Anthropic"
_OFF: Final = (errors.UnknownPathError, RecordsError)
_NAME: Final = {"type": "string", "minLength": 1}
_AFTER: Final = parameter("query", "after", "The id before the first id to return.", **TEXT)
_ANTHROPIC_VERSION: Final = parameter(
    "header", "anthropic-version", "Asks for responses in Anthropic's form.", **TEXT
)
_FILE_FIELDS: Final[dict[str, Any]] = {
    "errors": (RequestError, files.NoSuchFileError, *_OFF),
    "parameters": (parameter("path", "file_id", "Its `id`.", **_NAME), _ANTHROPIC_VERSION),
}
_IN_ANTHROPICS_FORM: Final = (
    "Requests with the header `anthropic-version` get responses in Anthropic's form."
)
_METADATA: Final = {
    "type": "object",
    "properties": {"type": {"const": "file"}},
    "required": ["id", "type", "created_at", "filename", "mime_type", "size_bytes"],
}
_METADATA_LIST: Final = {
    "type": "object",
    "properties": {"data": {"type": "array", "items": _METADATA}},
    "required": ["data", "has_more", "first_id", "last_id"],
}
_FILE: Final = {"type": "string", "contentMediaType": "application/octet-stream"}
_EXPIRY: Final = {
    "type": "integer",
    "minimum": files.MIN_EXPIRY_S,
    "maximum": files.MAX_EXPIRY_S,
}
_UPLOAD_FIELDS: Final[dict[str, Any]] = {
    "errors": (RequestError, uploads.NoSuchUploadError, *_OFF),
    "parameters": (parameter("path", "upload_id", "Its `id`.", **_NAME),),
}
_BATCH_FIELDS: Final[dict[str, Any]] = {
    "errors": (RequestError, openai.NoSuchBatchError, *_OFF),
    "parameters": (parameter("path", "batch_id", "Its `id`.", **_NAME),),
}
_CURSORS: Final = (
    parameter("query", "after_id", "The id before the first id to return.", **TEXT),
    parameter("query", "before_id", "The id after the last id to return.", **TEXT),
)


def _limit(default: int, maximum: int) -> dict[str, Any]:
    """Describe the query parameter `limit` of a list endpoint, for the OpenAPI document."""
    bounds = {"type": "integer", "minimum": 1, "maximum": maximum, "default": default}
    return parameter("query", "limit", "The maximum number of items to return.", **bounds)


OPERATIONS: Final[dict[tuple[str, str], RouteDescription]] = {
    ("POST", files.PATH): RouteDescription(
        "Upload a file",
        _TAG,
        f"Without `--records` this and the following paths answer 404. {_IN_ANTHROPICS_FORM}",
        answer=files.FileBody,
        media={"application/json": _METADATA},
        errors=(*BODY, *_OFF),
        parameters=(_ANTHROPIC_VERSION,),
        form={
            "type": "object",
            "properties": {
                "purpose": {"enum": list(files.PURPOSES)},
                "file": _FILE,
                "expires_after[anchor]": {"const": "created_at"},
                "expires_after[seconds]": _EXPIRY,
            },
            "required": ["purpose", "file"],
        },
    ),
    ("GET", files.PATH): RouteDescription(
        "List files",
        _TAG,
        f"{_IN_ANTHROPICS_FORM} Their pages have the fields of Anthropic's lists: `limit`, "
        "`after_id`, `before_id`, `page` and `ids`.",
        answer=files.FileList,
        media={"application/json": _METADATA_LIST},
        errors=(RequestError, *_OFF),
        parameters=(
            _AFTER,
            _limit(files.MAX_LISTED, files.MAX_LISTED),
            parameter("query", "order", "By time.", enum=["asc", "desc"], default="desc"),
            parameter("query", "purpose", "Only files of this purpose.", **TEXT),
            _ANTHROPIC_VERSION,
        ),
    ),
    ("GET", files.FILE_PATH): RouteDescription(
        "Return a file's metadata",
        _TAG,
        _IN_ANTHROPICS_FORM,
        answer=files.FileBody,
        media={"application/json": _METADATA},
        **_FILE_FIELDS,
    ),
    ("DELETE", files.FILE_PATH): RouteDescription(
        "Delete a file",
        _TAG,
        _IN_ANTHROPICS_FORM,
        answer=files.DeletedFile,
        media={"application/json": {"type": "object", "required": ["id", "type"]}},
        **_FILE_FIELDS,
    ),
    ("GET", f"{files.FILE_PATH}/content"): RouteDescription(
        "Return a file's content",
        _TAG,
        media={"application/jsonl": TEXT, "application/octet-stream": TEXT},
        **_FILE_FIELDS,
    ),
    ("POST", uploads.PATH): RouteDescription(
        "Begin an upload of a file in parts",
        _TAG,
        "The parts can be sent within an hour.",
        answer=uploads.UploadBody,
        errors=(*BODY, *_OFF),
        examples={
            "begin": {
                "filename": "notes.txt",
                "purpose": "user_data",
                "bytes": 12,
                "mime_type": "text/plain",
            }
        },
        leads_to=(
            ("GET", uploads.UPLOAD_PATH),
            ("POST", uploads.PARTS_PATH),
            ("POST", uploads.COMPLETE_PATH),
            ("POST", uploads.CANCEL_PATH),
        ),
    ),
    ("GET", uploads.UPLOAD_PATH): RouteDescription(
        "Return an upload", _TAG, answer=uploads.UploadBody, **_UPLOAD_FIELDS
    ),
    ("POST", uploads.PARTS_PATH): RouteDescription(
        "Send a part of a file",
        _TAG,
        f"A part has at most {uploads.MAX_PART_BYTES >> 20} MiB.",
        answer=uploads.UploadPartBody,
        errors=(*BODY, uploads.NoSuchUploadError, *_OFF),
        parameters=_UPLOAD_FIELDS["parameters"],
        form={"type": "object", "properties": {"data": _FILE}, "required": ["data"]},
    ),
    ("POST", uploads.COMPLETE_PATH): RouteDescription(
        "Join the parts of an upload into a file",
        _TAG,
        answer=uploads.UploadBody,
        errors=(*BODY, uploads.NoSuchUploadError, *_OFF),
        parameters=_UPLOAD_FIELDS["parameters"],
        examples={"complete": {"part_ids": ["part_0"]}},
    ),
    ("POST", uploads.CANCEL_PATH): RouteDescription(
        "Cancel an upload, and delete its parts", _TAG, answer=uploads.UploadBody, **_UPLOAD_FIELDS
    ),
    ("POST", openai.PATH): RouteDescription(
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
    ("GET", openai.PATH): RouteDescription(
        "List batches, the newest first",
        _TAG,
        answer=openai.BatchList,
        errors=(RequestError, *_OFF),
        parameters=(_AFTER, _limit(openai.DEFAULT_LISTED, openai.MAX_LISTED)),
    ),
    ("GET", openai.BATCH_PATH): RouteDescription(
        "Return a batch", _TAG, answer=openai.BatchBody, **_BATCH_FIELDS
    ),
    ("POST", f"{openai.BATCH_PATH}/cancel"): RouteDescription(
        "Stop a batch; the results so far are kept", _TAG, answer=openai.BatchBody, **_BATCH_FIELDS
    ),
    ("POST", messages.PATH): RouteDescription(
        "Answer many conversations in the background",
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
    ("GET", messages.PATH): RouteDescription(
        "List message batches, the newest first",
        _ANTHROPIC,
        answer=messages.MessageBatchList,
        errors=(RequestError, *_OFF),
        parameters=(*_CURSORS, _limit(messages.DEFAULT_LISTED, messages.MAX_LISTED)),
    ),
    ("GET", messages.BATCH_PATH): RouteDescription(
        "Return a message batch", _ANTHROPIC, answer=messages.MessageBatch, **_BATCH_FIELDS
    ),
    ("DELETE", messages.BATCH_PATH): RouteDescription(
        "Delete a message batch that has ended, and its results",
        _ANTHROPIC,
        answer=messages.DeletedMessageBatch,
        **_BATCH_FIELDS,
    ),
    ("POST", f"{messages.BATCH_PATH}/cancel"): RouteDescription(
        "Stop a message batch; the results so far are kept",
        _ANTHROPIC,
        answer=messages.MessageBatch,
        **_BATCH_FIELDS,
    ),
    ("GET", f"{messages.BATCH_PATH}/results"): RouteDescription(
        "Return the results of a message batch, a line each",
        _ANTHROPIC,
        media={"application/x-jsonl": TEXT},
        **_BATCH_FIELDS,
    ),
}
