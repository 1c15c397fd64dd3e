"""Fixtures: a tiny model as a repository of the hub, and a hub that serves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.hub import Hub, hub_at
from support.tiny import write_tiny_folder, write_tiny_gguf
from twostroke.model.hub import hub as hub_module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A tiny GGUF model, padded to 3.5 MB, so that it is downloaded in several chunks."""
    path = write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    return path.read_bytes() + bytes(range(256)) * 12_000


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny safetensors model."""
    path = write_tiny_folder(tmp_path_factory.mktemp("tiny") / "folder")
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    """A folder for the hub's cache that only this test uses."""
    return tmp_path / "hf" / "hub"


@pytest.fixture
def hub(hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_module, "RETRY_PAUSES_S", (0.001, 0.001, 0.001))
    with hub_at(hub_cache, monkeypatch) as hub:
        yield hub
