"""Hints name a command that installs an extra where the package came from."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from twostroke.core.env import install_command

if TYPE_CHECKING:
    import pytest


def installed_from(url: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the package was installed from this address, or (None) from a package index."""
    text = None if url is None else json.dumps({"url": url, "dir_info": {}})
    result = SimpleNamespace(read_text=lambda _name: text)
    monkeypatch.setattr("importlib.metadata.distribution", lambda _name: result)


def test_a_package_of_an_index_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed_from(None, monkeypatch)
    assert install_command("train") == "pip install 'twostroke[train]'"
    installed_from("https://elsewhere/twostroke.whl", monkeypatch)
    assert install_command("train") == "pip install 'twostroke[train]'"


def test_a_clone_or_a_wheel_is_named_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    installed_from(clone.as_uri(), monkeypatch)
    assert install_command("plots") == f"pip install '{clone}[plots]'"
    monkeypatch.chdir(clone)
    assert install_command("plots") == "pip install '.[plots]'"


def test_a_clone_that_was_moved_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed_from((tmp_path / "gone").as_uri(), monkeypatch)
    assert install_command("hub") == "pip install '.[hub]'"


def test_what_is_not_installed_runs_from_its_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> None:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr("importlib.metadata.distribution", fail)
    root = Path(__file__).parents[2]
    monkeypatch.chdir("/")
    assert install_command("hub") == f"pip install '{root}[hub]'"
