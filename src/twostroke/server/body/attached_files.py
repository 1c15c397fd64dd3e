"""Replaces files that are attached to a request's messages by their text."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import RequestError
from twostroke.core.frozen import Frozen
from twostroke.core.json_io import encode_json

if TYPE_CHECKING:
    from collections.abc import Callable

    # Returns a stored file by its id; raises NoSuchFileError.
    ReadFile = Callable[[str], "AttachedFile"]

# Every body with a file has one of these words; most bodies have none and are not searched.
_MARKS: Final = (b'"file_data"', b'"file_id"', b'"base64"')
_CONVERSATIONS: Final = ("input", "messages", "system", "items")
_INNER_FIELDS: Final = ("content", "output")
_MAX_DEPTH: Final = 16  # of lists and objects around a file: more than any protocol has
_TEXT_ONLY: Final = "Models here read text only."


class AttachedFile(Frozen):
    """A file attached to a request's message: its name, which may be empty, and its content."""

    filename: str
    content: bytes


def has_files(body: bytes) -> bool:
    """Whether a request's body may have attached files, so that they must be replaced by text.

    The check is a fast text search, so a body without files may pass, too.
    """
    return any(mark in body for mark in _MARKS)


def with_file_texts(body: bytes, read_file: ReadFile) -> bytes:
    """Return a request's body with a text part in place of each attached file.

    A body that has no files, or is not valid JSON, is returned unchanged. `read_file` reads a file
    that the client has stored on the server earlier.

    Raises:
        RequestError: the content of a file is not text; `field` is the path of the file.
        NoSuchFileError: no stored file has the id.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return body
    if not isinstance(fields, dict):
        return body
    has_changed = False
    for name in _CONVERSATIONS:
        has_changed |= _replace_all(fields.get(name), name, read_file)
    return encode_json(fields) if has_changed else body


def _replace_all(value: Any, path: str, read_file: ReadFile, depth: int = 0) -> bool:
    """Replace all attached files inside a value of the body by text, in place.

    Returns whether there were any.
    """
    if depth > _MAX_DEPTH:
        return False
    has_changed = False
    if isinstance(value, dict):
        has_changed |= _replace(value, path, read_file)
        for name in _INNER_FIELDS:
            if isinstance(inner := value.get(name), (dict, list)):
                has_changed |= _replace_all(inner, f"{path}.{name}", read_file, depth=depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, (dict, list)):
                has_changed |= _replace_all(item, f"{path}[{index}]", read_file, depth=depth + 1)
    return has_changed


def _replace(part: dict[str, Any], path: str, read_file: ReadFile) -> bool:
    """Replace a message part by a text part, in place, if it is an attached file.

    Returns whether it was.
    """
    match part:
        case {"type": "input_file"}:
            text = _text_of(part, path, read_file)
            kind = "input_text"
        case {"type": "file", "file": dict() as file}:
            text = _text_of(file, f"{path}.file", read_file)
            kind = "text"
        case {"type": "document", "source": dict() as source}:
            return _replace_source(part, source, f"{path}.source", read_file)
        case _:
            return False
    if text is None:
        return False
    part.clear()
    part.update(type=kind, text=text)
    return True


def _replace_source(
    document: dict[str, Any], source: dict[str, Any], path: str, read_file: ReadFile
) -> bool:
    """Replace the source of an Anthropic document block by its text, in place, if it is a file.

    Returns whether it was.
    """
    match source:
        case {"type": "file", "file_id": str() as file_id}:
            file = read_file(file_id)
            text = decode_text(file.content, f"{path}.file_id")
            if document.get("title") is None:
                document["title"] = file.filename
        case {"type": "base64", "data": str() as data}:
            text = decode_text(_decode_base64(data, f"{path}.data"), f"{path}.data")
        case _:
            return False
    source.clear()
    source.update(type="text", media_type="text/plain", data=text)
    return True


def _text_of(file: dict[str, Any], path: str, read_file: ReadFile) -> str | None:
    """Return the name and text of a file that is attached in OpenAI's form.

    Returns None if the part has neither content nor the id of a stored file.
    """
    filename = file.get("filename")
    if isinstance(data := file.get("file_data"), str):
        where = f"{path}.file_data"
        text = decode_text(_decode_base64(data, where), where)
    elif isinstance(file_id := file.get("file_id"), str):
        stored = read_file(file_id)
        text = decode_text(stored.content, f"{path}.file_id")
        filename = filename or stored.filename
    else:
        return None
    text = text if text.endswith("\n") else f"{text}\n"  # another part may follow
    return f"{filename}\n{text}" if isinstance(filename, str) and filename else text


def _decode_base64(data: str, path: str) -> bytes:
    """Decode the content of an attached file from base64, or from a data URL with base64.

    Raises:
        RequestError: the base64 is not valid.
    """
    if data.startswith("data:"):
        _, _, data = data.partition(",")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        reason = "must be base64, as in 'data:text/plain;base64,SGVsbG8='."
        raise RequestError(reason, field=path) from None


def decode_text(content: bytes, path: str) -> str:
    """Decode an attached file's content as UTF-8 text.

    Raises:
        RequestError: the file is not text.
    """
    if content.startswith(b"%PDF"):
        reason = f"is a PDF document. {_TEXT_ONLY} Extract the document's text and send that."
        raise RequestError(reason, field=path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise RequestError(f"is not text in UTF-8. {_TEXT_ONLY}", field=path) from None
    if "\0" in text:
        raise RequestError(f"is not text. {_TEXT_ONLY}", field=path)
    return text
