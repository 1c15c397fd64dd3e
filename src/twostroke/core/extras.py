"""The command that adds an extra to the installed package."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """Return a command for a shell that adds an extra such as "train" to this installation.

    If the package was installed from a clone or from a wheel in a folder, the command names the
    clone or the wheel.
    """
    source = _source()
    if source is None:
        return f"pip install 'twostroke[{extra}]'"
    path = "." if source == Path.cwd() else str(source)
    return f"pip install '{path}[{extra}]'"


def _source() -> Path | None:
    """Return the clone or the file that was installed; None if it came from a package index."""
    try:
        text = distribution("twostroke").read_text("direct_url.json")
        address = urlsplit(json.loads(text)["url"]) if text else None
    except PackageNotFoundError:  # a clone whose folder is on Python's path
        clone = Path(__file__).parents[3]
        return clone if (clone / "pyproject.toml").is_file() else None
    except (ValueError, KeyError, TypeError):
        return None
    if address is None or address.scheme != "file":
        return None
    path = Path(unquote(address.path))
    return path if path.exists() else Path.cwd()
