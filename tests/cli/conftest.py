"""Fixtures: a tiny model, a separate cache folder, and the command line as a function."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from support.configs import write_config
from support.native import native_dir
from support.tiny import Tiny, write_tiny_gguf
from twostroke.cli.app import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Ran:
    """The output and the exit code of a command."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which the machine's limits are measured once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep every test out of the user's cache, and free of the user's settings."""
    native_dir()
    monkeypatch.setenv("TWOSTROKE_CACHE", str(shared_cache))
    for name in ("TWOSTROKE_NUM_THREADS", "TWOSTROKE_CPU_LEVEL", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return shared_cache


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a tiny model."""
    return str(write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a tiny model whose context takes minutes to fill."""
    sizes = Tiny(context_length=200_000, num_layers=4)
    return str(write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "endless.gguf", sizes))


@pytest.fixture
def config(tmp_path: Path) -> str:
    """The path of a folder with the configuration of a model of 8B."""
    path = tmp_path / "llama-8b" / "config.json"
    write_config(path, "8B", max_position_embeddings=8192)
    return str(path.parent)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Return a function that runs the command line.

    `stdin` is the text on standard input; None stands for a terminal.
    """

    def call(*arguments: str, stdin: bytes | None = b"") -> Ran:
        capfd.readouterr()
        terminal = io.TextIOWrapper(io.BytesIO(stdin or b""), encoding="utf-8")
        if stdin is None:
            terminal.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", terminal)
        code = run(list(arguments))
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Ran(code, out, err)

    return call


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty folder in place of the native libraries."""
    from twostroke.backends.cpu import library

    def forget() -> None:
        library._obstacle.cache_clear()
        library.load_library.cache_clear()

    with monkeypatch.context() as patch:
        patch.setenv("TWOSTROKE_NATIVE_DIR", str(tmp_path))
        forget()
        yield tmp_path
    forget()
