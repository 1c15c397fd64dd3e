"""The quickstarts that need no server run as written, with SmolLM2 in place of their models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from twostroke.cli.app import group

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^twostroke (batch .*)$", re.MULTILINE)


def page_with_smollm2(name: str) -> str:
    text = (GUIDE / name).read_text()
    return text.replace("hf:Qwen/Qwen3-Embedding-0.6B-GGUF", "smollm2").replace(
        "qwen2.5-1.5b", "smollm2"
    )


@pytest.mark.usefixtures("smollm2_path")
def test_batch_quickstart_labels_every_review(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = page_with_smollm2("quickstart-batch.md")
    write_requests, read_results = BLOCK.findall(page)
    [command] = COMMAND.findall(page)
    names: dict[str, Any] = {}
    exec(write_requests, names)
    result = CliRunner().invoke(group, command.split())
    assert result.exit_code == 0, result.output
    exec(read_results, names)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["review-0", "review-1", "review-2"]
    assert {line.split()[1] for line in lines} <= {"positive", "negative"}


@pytest.mark.usefixtures("smollm2_path")
def test_retrieval_quickstart_finds_passages_and_answers(capsys):
    [program] = BLOCK.findall(page_with_smollm2("quickstart-rag.md"))
    names: dict[str, Any] = {}
    program = program.replace('LLM("smollm2")', 'LLM("smollm2", context_length=512)')
    exec(program, names)
    assert names["index"].shape[0] == len(names["passages"])
    assert capsys.readouterr().out.strip()
    names["embedder"].close()
    names["chat_model"].close()
