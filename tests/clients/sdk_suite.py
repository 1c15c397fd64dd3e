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

# What we serve; the other resources are assistants, images, audio, files and the like.
SUITES = {
    "openai": (
        BASE_URL,
        (
            "chat",
            "responses",
            *(f"test_{one}.py" for one in ("completions", "embeddings", "models", "responses")),
        ),
        (),
    ),
    "anthropic": (ROOT_URL, ("test_messages.py", "test_models.py"), ("-p", "tests._alias_httpx")),
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
    command += [f"tests/api_resources/{test}" for test in tests]
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
