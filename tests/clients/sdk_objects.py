"""Objects that the tests of SDKs name, which are stored on the server under test first."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from typing import Any

ROOT_URL, MODEL = os.environ["ROOT_URL"], os.environ["MODEL"]
PART = b"Example data"  # as the tests send it
_HELLO = [{"role": "user", "content": "Hi"}]
_WAIT_S = 60


def stored_path(path: str, method: str) -> str:
    """Return a path in which each name of an object is the id of one that was just stored."""
    path, mark, query = path.partition("?")
    parts = path.split("/")
    if "conv_123" in parts:
        conversation = call("/v1/conversations", {"items": _HELLO})["id"]
        [item] = call(f"/v1/conversations/{conversation}/items")["data"]
        ids = {"conv_123": conversation, "msg_abc": item["id"]}
        parts = [ids.get(part, part) for part in parts]
    else:
        parts = [_stored(part, path, method) for part in parts]
    return "/".join(parts) + mark + query


def stored_fields(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request in which each name of an object is the id of a stored one."""
    replaced = dict(fields)
    if "previous_response_id" in fields:
        replaced["previous_response_id"] = _response()
    if fields.get("input_file_id") == "input_file_id":
        replaced["input_file_id"] = upload_file("batch", _batch_lines(1))["id"]
    if fields.get("part_ids"):
        upload = path.partition("?")[0].split("/")[-2]
        form = multipart({"data": PART})
        part = call(f"/v1/uploads/{upload}/parts", data=form[0], content_type=form[1])
        replaced["part_ids"] = [part["id"]]
        replaced.pop("md5", None)  # which is no digest
    return replaced


def _stored(name: str, path: str, method: str) -> str:
    """Return the id of an object that was just stored, if `name` stands for one."""
    if name == "completion_id":
        return _chat_completion()
    if name in {"resp_677efb5139a88190b512bc3fef8e535d", "resp_123", "response_id"}:
        return _response()
    if name == "upload_abc123":
        body = {"filename": "a", "purpose": "user_data", "mime_type": "a/b", "bytes": len(PART)}
        return str(call("/v1/uploads", body)["id"])
    if name == "file_id":
        return str(upload_file("user_data", PART)["id"])
    if name == "batch_id":
        file = upload_file("batch", _batch_lines(300))["id"]
        batch = {"input_file_id": file, "endpoint": "/v1/chat/completions"}
        return str(call("/v1/batches", {**batch, "completion_window": "24h"})["id"])
    if name == "message_batch_id":
        is_over = path.endswith("/results") or method.upper() == "DELETE"
        return _message_batch(is_over=is_over)
    return name


def _chat_completion() -> str:
    # The SDK's type of a stored message knows no other role.
    messages = [{"role": "assistant", "content": "Hi"}]
    body = {"model": MODEL, "store": True, "messages": messages, "max_tokens": 2}
    return str(call("/v1/chat/completions", body)["id"])


def _response() -> str:
    """Store a response in the background, so that it can be cancelled, and wait for its end."""
    body = {"model": MODEL, "background": True, "input": "Hi", "max_output_tokens": 2}
    response = call("/v1/responses", body)
    deadline_s = time.monotonic() + _WAIT_S
    while response["status"] in {"queued", "in_progress"} and time.monotonic() < deadline_s:
        time.sleep(0.02)
        response = call(f"/v1/responses/{response['id']}")
    return str(response["id"])


def _message_batch(*, is_over: bool) -> str:
    params = {"model": MODEL, "max_tokens": 1 if is_over else 300, "messages": _HELLO}
    batch = call("/v1/messages/batches", {"requests": [{"custom_id": "a", "params": params}]})
    path, deadline_s = f"/v1/messages/batches/{batch['id']}", time.monotonic() + _WAIT_S
    while is_over and batch["processing_status"] != "ended" and time.monotonic() < deadline_s:
        time.sleep(0.02)
        batch = call(path)
    return str(batch["id"])


def _batch_lines(num_tokens: int) -> bytes:
    body = {"model": MODEL, "messages": _HELLO, "max_tokens": num_tokens}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode()


def upload_file(purpose: str, content: bytes) -> Any:
    """Store a file."""
    data, content_type = multipart({"file": content}, {"purpose": purpose})
    return call("/v1/files", data=data, content_type=content_type)


def multipart(files: dict[str, bytes], fields: dict[str, str] | None = None) -> tuple[bytes, str]:
    """Return a form, and its Content-Type."""
    boundary = b"boundary-of-the-tests"
    parts = b""
    for name, content in files.items():
        head = f'Content-Disposition: form-data; name="{name}"; filename="a.txt"'
        parts += b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, head.encode(), content)
    for name, value in (fields or {}).items():
        head = f'Content-Disposition: form-data; name="{name}"'
        parts += b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, head.encode(), value.encode())
    return parts + b"--%b--\r\n" % boundary, f"multipart/form-data; boundary={boundary.decode()}"


def call(
    path: str,
    body: Any = None,
    *,
    data: bytes | None = None,
    content_type: str = "application/json",
) -> Any:
    """Return the JSON answer to a request of the server under test."""
    content = json.dumps(body).encode() if body is not None else data
    headers = {"content-type": content_type}
    request = urllib.request.Request(f"{ROOT_URL}{path}", content, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)
