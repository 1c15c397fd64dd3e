"""Reads the chat templates of a Hugging Face folder, with transformers' order of precedence."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.errors import ModelFormatError
from twostroke.core.files import is_there, open_regular_file, read_at_most

if TYPE_CHECKING:
    from pathlib import Path

_MAX_BYTES: Final = 1024 * 1024
_SUFFIX: Final = ".jinja"
_FILE: Final = f"chat_template{_SUFFIX}"
# Folders with further templates, whose names are their file names: the name that transformers uses,
# and an older name.
FOLDERS: Final = ("additional_chat_templates", "chat_templates")


def read_chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates of a Hugging Face folder by name.

    If there is only one template, its name is "default". chat_template.jinja replaces all templates
    in `config` (tokenizer_config.json). If a folder has neither, chat_template.json is read, a file
    of older image models.
    """
    templates = dict(_in_files(folder))
    if "default" in templates:
        return templates
    return dict(_in_value(config.get("chat_template")) or _in_processor(folder)) | templates


def _in_files(folder: Path) -> list[tuple[str, str]]:
    """Return the names and texts of the chat templates that have their own files."""
    templates = [("default", _text(folder / _FILE))] if is_there(folder / _FILE) else []
    for inner in FOLDERS:
        files = sorted((folder / inner).glob(f"*{_SUFFIX}"))
        templates += [(file.stem, _text(file)) for file in files if file.is_file()]
    return templates


def _in_value(value: object) -> list[tuple[str, str]]:
    """Return the names and texts of chat templates in a configuration: a text, list or object."""
    if isinstance(value, str):
        return [("default", value)]
    if isinstance(value, list):
        pairs = [
            (entry.get("name"), entry.get("template")) for entry in value if isinstance(entry, dict)
        ]
    else:
        pairs = list(value.items()) if isinstance(value, dict) else []
    return [(name, text) for name, text in pairs if isinstance(name, str) and isinstance(text, str)]


def _in_processor(folder: Path) -> list[tuple[str, str]]:
    """Return the names and texts of chat templates in chat_template.json; empty if unreadable."""
    file = folder / "chat_template.json"
    try:
        value = json.loads(_text(file)) if is_there(file) else None
    except (ValueError, RecursionError):
        return []
    return _in_value(value.get("chat_template")) if isinstance(value, dict) else []


def _text(file: Path) -> str:
    """Return a chat template's text, cut at `_MAX_BYTES`.

    A longer template cannot be compiled. Raises ModelFormatError if the file cannot be read.
    """
    try:
        with open_regular_file(file) as opened:
            return read_at_most(opened, _MAX_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ModelFormatError(f"{file.name} cannot be read: {error.strerror}.") from None
