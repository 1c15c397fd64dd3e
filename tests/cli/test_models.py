"""`twostroke pull` and `twostroke models`: what is here, what is checked, what is removed."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from twostroke import weights
from twostroke.cli.fetch import open_engine, watcher
from twostroke.cli.terminal import Bar
from twostroke.core.config import CacheOptions, EngineOptions
from twostroke.weights import sources
from twostroke.weights.catalogue import PackagedModel, Part
from twostroke.weights.pull import Progress, sidecar

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran
    from twostroke.weights import Watcher

    Cli = Callable[..., Ran]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a catalogue of two models, `mini` and `maxi`."""
    content = b"some weights" * 1000
    entries = {
        "mini": PackagedModel(
            name="mini",
            title="A small model",
            file_name="mini.gguf",
            parts=(Part("mini", "1.0", "mini.gguf"),),
            file_bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            licence="MIT",
        ),
        "maxi": PackagedModel(
            name="maxi",
            title="A large model",
            file_name="maxi.gguf",
            parts=(Part("maxi", "1.0", "maxi.gguf"),),
            file_bytes=2_000_000_000,
            sha256="0" * 64,
            licence="MIT",
        ),
    }
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    monkeypatch.setattr(sources, "CATALOGUE", entries)
    return tmp_path


@pytest.fixture
def mini(own_cache: Path) -> Path:
    """The file of `mini`, in the cache."""
    path = own_cache / "models" / "mini.gguf"
    path.parent.mkdir()
    path.write_bytes(b"some weights" * 1000)
    sidecar(path).write_text(json.dumps({"name": "mini"}))
    return path


def test_the_list_says_what_is_here(cli: Cli, mini: Path) -> None:
    ran = cli("models")
    assert ran.code == 0
    assert ran.out.split("\n") == [
        "NAME  MODEL              SIZE  LICENCE  HERE",
        "mini  A small model      0 MB  MIT      yes",
        "maxi  A large model  2,000 MB  MIT      no",
        "",
    ]
    assert cli("models", "list").out == ran.out


@pytest.mark.parametrize("line", [("models", "--json"), ("models", "list", "--json")])
def test_the_list_is_json_for_scripts(cli: Cli, mini: Path, line: tuple[str, ...]) -> None:
    first, second = json.loads(cli(*line).out)
    assert first == {
        "name": "mini",
        "title": "A small model",
        "file_bytes": 12000,
        "licence": "MIT",
        "path": str(mini),
        "runs": True,
    }
    assert second["path"] is None


def test_a_sound_file_matches(cli: Cli, mini: Path) -> None:
    ran = cli("models", "verify", "mini")
    assert (ran.code, ran.out) == (0, "mini matches its checksum.\n")


def test_a_spoilt_file_does_not_match(cli: Cli, mini: Path) -> None:
    mini.write_bytes(b"other weight" * 1000)
    ran = cli("models", "verify", "mini")
    assert (ran.code, ran.out) == (4, "")
    assert "does not match its checksum" in ran.err


def test_a_removed_model_is_gone(cli: Cli, mini: Path) -> None:
    ran = cli("models", "remove", "mini")
    assert (ran.code, ran.out) == (0, "Removed mini: 0 MB are free again.\n")
    assert not mini.exists()
    assert cli("models", "remove", "mini").code == 3


def test_a_file_of_one_s_own_is_not_removed(cli: Cli, own_cache: Path, tiny: str) -> None:
    ran = cli("models", "remove", tiny)
    assert ran.code == 2
    assert "left alone" in ran.err
    assert Path(tiny).exists()


def test_pull_says_where_the_model_is(cli: Cli, mini: Path) -> None:
    assert cli("pull", "mini").out == f"mini is already here: {mini}\n"


def test_pull_names_the_nearest(cli: Cli, own_cache: Path) -> None:
    ran = cli("pull", "mimi")
    assert ran.code == 3
    assert "Did you mean 'mini'?" in ran.err


def test_pull_fetches_and_says_nothing_in_between_to_a_script(
    cli: Cli, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "pull", slow_pull)
    ran = cli("pull", "mini")
    assert (ran.code, ran.out, ran.err) == (0, "mini is ready: /there/mini.gguf\n", "")


def test_an_interrupted_pull_says_that_nothing_was_kept(
    cli: Cli, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str, watch: Watcher) -> Path:
        raise KeyboardInterrupt(f"Fetching {name!r} was interrupted; nothing was kept.")

    monkeypatch.setattr(weights, "pull", interrupted)
    for line in (("pull", "mini"), ("generate", "mini", "-p", "a")):
        ran = cli(*line)
        assert ran.code == 130
        assert ran.err == "twostroke: Fetching 'mini' was interrupted; nothing was kept.\n"


def slow_pull(name: str, watch: Watcher) -> Path:
    for phase in ("wait", "download", "unpack", "verify"):
        for done in range(0, 101, 20):
            watch(Progress(phase, done * 1000, None if phase == "wait" else 100_000))
    return Path("/there") / f"{name}.gguf"


class Screen:
    """Standard error as a terminal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: list[str] = []
        monkeypatch.setattr(sys, "stderr", self)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "100")
        self.encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.parts.append(text)
        return len(text)

    def flush(self) -> None:
        pass

    @property
    def text(self) -> str:
        return "".join(self.parts)


def test_a_terminal_sees_each_phase_and_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch)
    with Bar() as bar:
        watch = watcher(bar, "mini")
        for phase in ("wait", "download", "unpack", "verify"):
            watch(Progress(phase, 50_000, None if phase == "wait" else 100_000))
            assert bar._progress is not None
            bar._progress.refresh()
    for label in ("Waiting for another download of mini", "Downloading mini", "Unpacking mini"):
        assert label in screen.text
    assert "50.0/100.0 kB" in screen.text
    assert screen.text.endswith("\x1b[2K")  # the line is wiped


@pytest.mark.parametrize("bar", [{"quiet": True}, {"patience_s": 60.0}])
def test_a_bar_may_be_silent(monkeypatch: pytest.MonkeyPatch, bar: dict[str, float]) -> None:
    screen = Screen(monkeypatch)
    with Bar(**bar) as silent:  # type: ignore[arg-type]
        silent.show("Loading", 1, 2)
    assert screen.text == ""


def test_loading_shows_a_bar_once_it_takes_long(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch)
    monkeypatch.setattr("twostroke.cli.fetch._PATIENCE_S", 0.0)
    open_engine(tiny, EngineOptions(cache=CacheOptions(memory_bytes=2_000_000))).close()
    assert "Loading tiny.gguf" in screen.text
