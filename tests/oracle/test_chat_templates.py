"""Chat templates rendered here and by transformers: ours, and the published ones at hand.

`LLAMA_CPP` may name a source tree of llama.cpp, whose `models/templates` holds published ones.
"""

from __future__ import annotations

import copy
import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from support.chats import TEMPLATES, TOOL_CHATS, TOOLS
from support.tiny import write_tiny_folder
from support.tokenizer_texts import CHATS
from twostroke.core.errors import TwostrokeError
from twostroke.engine.chat.conversation import Chat
from twostroke.engine.chat.template import ChatTemplate
from twostroke.model.tokenizer import from_tokenizer_json

_FOLDER = Path(os.environ.get("LLAMA_CPP", "llama.cpp")) / "models/templates"
_PUBLISHED = {path.name: path for path in sorted(_FOLDER.glob("*.jinja"))}
# transformers cannot write what `map` gives as JSON; here it is a list.
_THEIRS_FAILS = "llama-cpp-deepseek-r1.jinja"
_NOW = datetime(2026, 2, 3, 4, 5)
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class _Specials:
    named_texts = _NAMED
    additional_texts = ()

    def special_texts(self) -> list[str]:
        turns = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|eot_id|>", "[INST]"]
        return [*_NAMED.values(), *turns, "[/INST]", "<|user|>", "<|end|>", "<start_of_turn>"]


class _Clock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return _NOW


@pytest.mark.parametrize("name", TEMPLATES)
def test_our_templates_are_rendered_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _num_equal(TEMPLATES[name], monkeypatch) >= 8


@pytest.mark.skipif(not _PUBLISHED, reason="LLAMA_CPP names no source tree of llama.cpp")
def test_published_templates_are_rendered_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {name: path.read_text("utf-8") for name, path in _PUBLISHED.items()}
    sources.pop(_THEIRS_FAILS, None)
    counts = {name: _num_equal(source, monkeypatch) for name, source in sources.items()}
    print(sum(counts.values()), "renderings of", len(counts), "templates are equal")
    assert sum(counts.values()) > 20 * len(counts)


def _num_equal(source: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Assert that each chat renders alike, or is refused by both; return how many render."""
    ours = ChatTemplate(source, _Specials(), now=lambda: _NOW)
    count = 0
    for messages in (*CHATS, *TOOL_CHATS):
        for tools in (None, TOOLS):
            for prompted in (True, False):
                expected = _theirs(source, messages, tools, prompted, monkeypatch)
                try:
                    rendered = ours.render(
                        messages, tools=tools, add_generation_prompt=prompted
                    ).text
                except TwostrokeError:
                    rendered = None
                assert rendered == expected
                count += rendered is not None
    return count


def _theirs(
    source: str, messages: Any, tools: Any, prompted: bool, monkeypatch: pytest.MonkeyPatch
) -> str | None:
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template_utils, "datetime", _Clock)
    try:
        (text,), _ = chat_template_utils.render_jinja_template(
            [copy.deepcopy(messages)],
            tools=tools,
            chat_template=source,
            add_generation_prompt=prompted,
            **_NAMED,
        )
    except Exception:  # noqa: BLE001 - a template fails in any way
        return None
    return str(text)


_SIDE_FILES: list[tuple[Any, dict[str, str]]] = [
    ("C{{ messages[0].content }}", {}),
    ([{"name": "default", "template": "C"}, {"name": "tool_use", "template": "T{{ tools }}"}], {}),
    ("C", {"chat_template.jinja": "J"}),
    (
        [{"name": "default", "template": "C"}, {"name": "tool_use", "template": "T"}],
        {"chat_template.jinja": "J"},
    ),
    (
        "C",
        {"chat_template.jinja": "J", "additional_chat_templates/tool_use.jinja": "U{{ tools }}"},
    ),
]


@pytest.mark.parametrize(("config", "files"), _SIDE_FILES)
def test_templates_of_side_files_are_the_same(
    tmp_path: Path, config: Any, files: dict[str, str]
) -> None:
    import transformers

    folder = write_tiny_folder(tmp_path / "tiny")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": config}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Chat(from_tokenizer_json(folder))
    for tools in ([], TOOLS):
        rendered = theirs.apply_chat_template(
            CHATS[0], tools=tools or None, tokenize=False, add_generation_prompt=False
        )
        assert (
            ours._tried_for(has_tools=bool(tools))
            .template.render(CHATS[0], tools=tools or None, add_generation_prompt=False)
            .text
            == rendered
        )
