"""The examples in docs/guide/python.md and docs/guide/python.ipynb run as written."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHORT = 'LLM("smollm2", context_length=256'  # so that answers without a limit end soon


def run(code: str, names: dict[str, Any], where: str) -> None:
    """Run code that may use `await` at its top level, as a notebook's cell."""
    if "context_length" not in code:
        code = code.replace('LLM("smollm2"', SHORT)
    compiled = compile(code, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(compiled, names)
    if inspect.iscoroutine(result):
        asyncio.run(result)


@pytest.mark.usefixtures("smollm2_path")
def test_the_examples_of_the_page_run(capsys):
    blocks = BLOCK.findall((DOCS / "guide" / "python.md").read_text())
    assert len(blocks) >= 7
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        run(block, names, f"block {number} of python.md")
    names["llm"].close()
    assert "get_weather" in capsys.readouterr().out


@pytest.mark.usefixtures("smollm2_path")
def test_the_cells_of_the_notebook_run(capsys):
    cells = json.loads((DOCS / "guide" / "python.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            run("".join(cell["source"]), names, f"cell {number} of python.ipynb")
    assert "get_weather {'city': 'Paris'}" in capsys.readouterr().out
