"""Chat templates in each place of a Hugging Face folder, as transformers reads them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from twostroke.model.tokenizer.template_files import read_chat_templates

if TYPE_CHECKING:
    from pathlib import Path

NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
PROCESSOR = "chat_template.json"


@pytest.mark.parametrize(
    ("config", "files", "templates"),
    [
        (None, {}, {}),
        ("D", {}, {"default": "D"}),
        (NAMED, {}, {"default": "D", "tool_use": "T"}),
        ({"default": "D", "tool_use": "T"}, {}, {"default": "D", "tool_use": "T"}),
        ([{"name": "x"}, 3, {"template": "y"}], {}, {}),
        (NAMED, {"chat_template.jinja": "J"}, {"default": "J"}),
        (
            "D",
            {"chat_template.jinja": "J", "additional_chat_templates/tool_use.jinja": "U"},
            {"default": "J", "tool_use": "U"},
        ),
        ("D", {"chat_templates/tool_use.jinja": "U"}, {"default": "D", "tool_use": "U"}),
        (None, {PROCESSOR: json.dumps({"chat_template": "P"})}, {"default": "P"}),
        ("D", {PROCESSOR: json.dumps({"chat_template": "P"})}, {"default": "D"}),
        (None, {PROCESSOR: "{broken"}, {}),
    ],
)
def test_templates_are_found_by_name(
    tmp_path: Path, config: Any, files: dict[str, str], templates: dict[str, str]
) -> None:
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert read_chat_templates(tmp_path, {"chat_template": config}) == templates


def test_a_template_that_is_not_utf8_is_read_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"caf\xe9")
    assert read_chat_templates(tmp_path, {}) == {"default": "caf\ufffd"}
