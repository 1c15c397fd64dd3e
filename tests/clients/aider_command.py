"""aider, which changes a file in a small repository as it is asked to."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from checks import BASE_URL, MODEL, run

CODE = 'def greet():\n    print("hello")\n'


SETTINGS = f"""
- name: openai/{MODEL}
  edit_format: whole
  extra_params: {{max_tokens: 200, temperature: 0, extra_body: {{repetition_penalty: 1.1}}}}
"""


def aider(*options: str) -> str:
    """Ask for a change of a file in a new repository; return the file, if aider got an answer."""
    command = ["aider", "--model", f"openai/{MODEL}", "--yes-always", "--no-check-update"]
    command += ["--no-analytics", "--no-show-model-warnings", "--map-tokens", "0", "--no-pretty"]
    command += ["--message", "Make greet print goodbye in place of hello.", "greet.py", *options]
    environment = os.environ | {"OPENAI_API_BASE": BASE_URL, "OPENAI_API_KEY": "none"}
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        (folder / "greet.py").write_text(CODE)
        (folder / ".aider.model.settings.yml").write_text(SETTINGS)
        for git in (["init", "-q"], ["add", "greet.py"]):
            subprocess.run(["git", *git], cwd=folder, check=True)
        environment |= {"HOME": folder_name, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert not done.returncode, done.stdout + done.stderr
        assert "Tokens:" in done.stdout, done.stdout + done.stderr
        assert "litellm." not in done.stdout, done.stdout  # as its errors begin
        return (folder / "greet.py").read_text()


# Small models do not keep to aider's formats, so a file may stay as it is.
def edit() -> None:
    assert aider()


def not_streamed() -> None:
    assert aider("--no-stream")


def run_client() -> None:
    assert aider("--edit-format", "ask") == CODE


run(edit, not_streamed, run_client)
