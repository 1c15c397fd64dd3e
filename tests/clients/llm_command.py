"""The `llm` command, with our model in its list of OpenAI-compatible ones."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from checks import BASE_URL, MODEL, run

folder = Path(tempfile.mkdtemp())
entry = (
    f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {BASE_URL}\n"
    "  supports_tools: true\n  supports_schema: true\n"
)
(folder / "extra-openai-models.yaml").write_text(entry)


def llm(*arguments: str) -> str:
    """Run the command, which must succeed, and return its output."""
    done = run_llm(*arguments)
    assert not done.returncode, done.stderr
    return done.stdout


def run_llm(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}
    # Drawn at random, a call may be cut in its arguments, which the command cannot read.
    command = ["llm", *arguments, "-o", "temperature", "0"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def stream() -> None:
    assert llm("-m", "ours", "-o", "max_tokens", "20", "Why is the sky blue?").strip()


def plain() -> None:
    assert llm("-m", "ours", "--no-stream", "-o", "max_tokens", "20", "Say something.").strip()


def json_schema() -> None:
    output = llm(
        "-m", "ours", "-o", "max_tokens", "60", "--schema", "name str, age int", "Anna is 30"
    )
    assert set(json.loads(output)) == {"name", "age"}


def tools() -> None:
    weather = 'def weather(city: str) -> str:\n    "The weather in a city."\n    return "sunny"'
    done = run_llm(
        *("-m", "ours", "-o", "max_tokens", "300", "--functions", weather, "--td"),
        *("--cl", "3", "What is the weather in Paris?"),
    )
    # A small model may call its tool again and again. Then the command stops after three answers of
    # the server, of which the last two follow results of the tool.
    is_loop = "Chain limit of 3 exceeded" in done.stderr
    assert is_loop or not done.returncode, done.stderr
    assert "weather({'city': 'Paris'})" in done.stderr
    assert "sunny" in done.stderr


def continued() -> None:
    llm("-m", "ours", "-o", "max_tokens", "10", "My name is Anna.")
    assert llm("-c", "What is my name?").strip()


run(stream, plain, json_schema, tools, continued)
