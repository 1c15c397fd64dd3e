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


def llm(*arguments: str, is_told: bool = False) -> str:
    """Return what the command says, or what it is told to tell of calls."""
    environment = os.environ | {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}
    # Drawn at random, a call may be cut in its arguments, which the command cannot read.
    command = ["llm", *arguments, "-o", "temperature", "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stderr if is_told else done.stdout


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
    output = llm(
        *("-m", "ours", "-o", "max_tokens", "300", "--functions", weather, "--td"),
        "What is the weather in Paris?",
        is_told=True,
    )
    assert "weather({'city': 'Paris'})" in output
    assert "sunny" in output


def continued() -> None:
    llm("-m", "ours", "-o", "max_tokens", "10", "My name is Anna.")
    assert llm("-c", "What is my name?").strip()


run(stream, plain, json_schema, tools, continued)
