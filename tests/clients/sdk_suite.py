"""The resource tests of OpenAI's and Anthropic's SDKs, from their source packages."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from checks import BASE_URL, ROOT_URL

# All tests of resources that name a path which the server has. The other resources are assistants,
# images, sound, fine-tuning, organizations and the like.
SUITES = {
    "openai": (
        BASE_URL,
        (
            *("chat", "responses", "conversations", "uploads", "beta/responses"),
            *("test_batches.py", "test_completions.py", "test_conversations.py"),
            *("test_embeddings.py", "test_files.py", "test_models.py", "test_responses.py"),
            *("test_uploads.py", "beta/test_responses.py"),
        ),
        (),
    ),
    "anthropic": (
        ROOT_URL,
        (
            *("messages", "test_messages.py", "test_models.py", "test_files.py"),
            *("beta/messages", "beta/test_messages.py", "beta/test_models.py"),
            "beta/test_files.py",
        ),
        ("-p", "tests._alias_httpx"),
    ),
}


def main() -> int:
    """Fetch the tests that belong to the installed SDK, and run those that concern us."""
    name = next(name for name in SUITES if find_spec(name))
    url, tests, options = SUITES[name]
    folder = _fetch(f"{name}-{version(name)}", name)
    environment = os.environ | {"TEST_API_BASE_URL": url, "SDK": name}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--tb=short", "--no-summary"]
    command += ["-p", "no:cacheprovider", "-p", "sdk_plugin", *options]
    paths = [f"tests/api_resources/{test}" for test in tests]
    command += [path for path in paths if (folder / path).exists()]
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def _fetch(release: str, name: str) -> Path:
    """Return the folder of a release's sources, in the environment of this client."""
    if not Path(release).exists():
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary"]
        subprocess.run([*fetch, name, f"{name}=={version(name)}"], check=True)
        with tarfile.open(f"{release}.tar.gz") as archive:
            archive.extractall(filter="data")
    return Path(release)


if __name__ == "__main__":
    sys.exit(main())
