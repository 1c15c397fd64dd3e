"""`twostroke pull` and `twostroke models`: list, verify and remove models."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from twostroke.cli.pull import open_engine, progress_watcher
from twostroke.cli.terminal import TerminalProgressBar
from twostroke.core.message_text import format_bytes
from twostroke.core.options import CacheOptions, EngineOptions
from twostroke.model import hub as fetch
from twostroke.model import loader
from twostroke.model.hub import inventory, names
from twostroke.model.hub.catalogue import PackagedModel, WheelPart
from twostroke.model.hub.disk import DownloadProgress, ignore_progress, locked

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran
    from twostroke.model.hub import Watcher

    Cli = Callable[..., Ran]


LICENCE = "Licence: MIT (https://licences/mit)\n"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a catalogue of two models, `mini` and `maxi`."""
    content = b"some weights" * 1000
    entries = {
        "mini": PackagedModel(
            name="mini",
            title="A small model",
            file_name="mini.gguf",
            parts=(WheelPart("mini", "1.0", "mini.gguf"),),
            file_bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            licence="MIT (https://licences/mit)",
            family="llama",
            number_format="Q4_0",
            good_for="tests",
        ),
        "maxi": PackagedModel(
            name="maxi",
            title="A large model",
            file_name="maxi.gguf",
            parts=(WheelPart("maxi", "1.0", "maxi.gguf"),),
            file_bytes=2_000_000_000,
            sha256="0" * 64,
            licence="MIT",
            draft="mini",
        ),
    }
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    for module in (inventory, names):
        monkeypatch.setattr(module, "CATALOGUE", entries)
    return tmp_path


@pytest.fixture
def mini(own_cache: Path) -> Path:
    """The file of `mini`, in the cache."""
    path = own_cache / "models" / "mini.gguf"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"some weights" * 1000)
    sidecar(path).write_text("{}")
    return path


def sidecar(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def test_the_list_says_what_is_here_and_what_is_not(cli: Cli, mini: Path) -> None:
    ran = cli("models")
    assert ran.code == 0
    assert ran.out.split("\n") == [
        "NAME  FAMILY  FORMAT      SIZE  LICENCE  LAST USED  GOOD FOR",
        "mini  llama   Q4_0       12 KB  MIT      today      tests",
        "maxi  ?       ?       2,000 MB  MIT      not here",
        "The models here take 12 KB. 'twostroke models show NAME' shows where one is.",
        "'twostroke pull NAME' fetches one, 'twostroke pull hf:OWNER/REPO' one of the hub.",
        "",
    ]
    assert cli("models", "list").out == ran.out


@pytest.mark.parametrize("line", [("models", "--json"), ("models", "list", "--json")])
def test_the_list_is_json_for_scripts(cli: Cli, mini: Path, line: tuple[str, ...]) -> None:
    first, second = json.loads(cli(*line).out)
    assert first.pop("last_used") == pytest.approx(sidecar(mini).stat().st_mtime)
    assert first == {
        "name": "mini",
        "title": "A small model",
        "good_for": "tests",
        "family": "llama",
        "format": "Q4_0",
        "file_bytes": 12000,
        "licence": "MIT (https://licences/mit)",
        "source": ["pypi:mini==1.0:mini.gguf"],
        "path": str(mini),
        "runs": True,
    }
    assert second["path"] is None


def test_one_model_is_shown_with_all_its_facts(cli: Cli, mini: Path) -> None:
    lines = dict(line.split(None, 1) for line in cli("models", "show", "mini").out.splitlines())
    assert lines["licence"] == "MIT (https://licences/mit)"
    assert lines["path"] == str(mini)
    assert lines["file_bytes"] == "12,000"
    assert json.loads(cli("models", "show", "mini", "--json").out)["name"] == "mini"
    ran = cli("models", "show", "minj")
    assert (ran.code, "Did you mean 'mini'?" in ran.err) == (3, True)


def test_a_sound_file_matches(cli: Cli, mini: Path) -> None:
    ran = cli("models", "verify", "mini")
    assert (ran.code, ran.out) == (0, "mini matches its checksum.\n")


def test_a_spoilt_file_does_not_match(cli: Cli, mini: Path) -> None:
    mini.write_bytes(b"other weight" * 1000)
    ran = cli("models", "verify", "mini")
    assert (ran.code, ran.out) == (4, "")
    assert "'mini.gguf' does not match its checksum: run 'twostroke models" in ran.err


def test_all_models_are_verified_and_each_fault_named(cli: Cli, mini: Path) -> None:
    assert cli("models", "verify", "--all").out == "mini matches its checksum.\n"
    mini.write_bytes(b"other weight" * 1000)
    ran = cli("models", "verify", "--all", "--json")
    assert ran.code == 4
    (row,) = json.loads(ran.out)
    assert row["name"] == "mini"
    assert "does not match" in row["error"]
    assert cli("models", "verify").code == 2
    assert cli("models", "verify", "mini", "--all").code == 2


@pytest.mark.parametrize("word", ["remove", "rm"])
def test_a_removed_model_is_gone(cli: Cli, mini: Path, word: str) -> None:
    refused = cli("models", word, "mini")
    assert refused.code == 2
    assert "This would delete mini (12 KB): confirm it with --yes." in refused.err
    assert mini.exists()
    ran = cli("models", word, "mini", "-y")
    assert (ran.code, ran.out) == (0, "Removed mini: 12 KB freed.\n")
    assert not mini.exists()
    assert cli("models", word, "mini", "-y").code == 3


@pytest.mark.parametrize(("answer", "is_removed"), [("n\n", False), ("y\n", True), ("", False)])
def test_on_a_terminal_removing_is_confirmed(
    cli: Cli, mini: Path, answer: str, is_removed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[str] = []

    def confirm(text: str, *, abort: bool, err: bool) -> None:
        questions.append(text)
        if not answer.startswith("y"):
            raise click.Abort

    monkeypatch.setattr(click, "confirm", confirm)
    ran = cli("models", "remove", "mini", stdin=None)
    assert questions == ["Delete mini (12 KB)?"]
    assert mini.exists() is not is_removed
    assert (ran.code == 0) is is_removed


@pytest.fixture
def leftover(own_cache: Path) -> Path:
    """The unfinished download of `maxi`."""
    folder = own_cache / "models" / ".pull-maxi.gguf"
    folder.mkdir(parents=True)
    (folder / "whole.part").write_bytes(bytes(3_000_000))
    return folder


def test_what_broken_downloads_left_is_cleaned(cli: Cli, leftover: Path, mini: Path) -> None:
    refused = cli("models", "clean")
    assert refused.code == 2
    assert f"3 MB  {leftover} (an unfinished download)" in refused.err
    assert "confirm it with --yes" in refused.err
    assert leftover.exists()
    ran = cli("models", "clean", "--yes")
    assert (ran.code, ran.out) == (0, "3 MB freed.\n")
    assert not leftover.exists()
    assert mini.exists()
    assert cli("models", "clean").out == "There is nothing to clean.\n"


def test_a_download_that_still_runs_is_not_cleaned(cli: Cli, leftover: Path) -> None:
    with locked(leftover.with_name(".maxi.gguf.lock"), ignore_progress):
        assert cli("models", "clean", "--yes").out == "There is nothing to clean.\n"
    assert leftover.exists()


def test_models_that_nobody_used_for_long_are_cleaned(cli: Cli, leftover: Path, mini: Path) -> None:
    assert cli("models", "clean", "--unused", "30", "--yes").out == "There is nothing to clean.\n"
    long_ago = time.time() - 40 * 86400
    os.utime(sidecar(mini), (long_ago, long_ago))
    assert "40 days ago" in cli("models").out
    ran = cli("models", "clean", "--unused", "30", "--yes", "--json")
    assert json.loads(ran.out) == {"removed": ["mini"], "freed_bytes": 12000}
    assert not mini.exists()
    assert leftover.exists(), "only what was asked for goes"


@pytest.mark.parametrize("days", ["-1", "nan"])
def test_unused_days_must_not_be_negative(cli: Cli, mini: Path, days: str) -> None:
    ran = cli("models", "clean", "--unused", days, "--yes")
    assert ran.code == 2
    assert f"0 days or more, not {days}" in ran.err
    assert mini.exists()


def test_sizes_are_shown_in_a_unit_that_people_can_read() -> None:
    sizes = (12_345_678, 9_999_000_000, 12_340_000_000, 12_300_000_000_000)
    assert [*map(format_bytes, sizes)] == ["12 MB", "9,999 MB", "12.3 GB", "12.3 TB"]


def test_a_user_s_own_file_is_not_removed(cli: Cli, own_cache: Path, tiny: str) -> None:
    ran = cli("models", "remove", tiny)
    assert ran.code == 2
    assert "is your own file" in ran.err
    assert Path(tiny).exists()


def test_pull_says_where_the_model_is(cli: Cli, mini: Path) -> None:
    assert cli("pull", "mini").out == f"mini is already here: {mini}\n{LICENCE}"


def test_pull_of_a_path_fails_unless_it_is_a_model(cli: Cli, tmp_path: Path, tiny: str) -> None:
    ran = cli("pull", tiny)
    assert (ran.code, ran.out) == (0, f"{tiny} is your own file, which needs no fetching: {tiny}\n")
    notes = tmp_path / "notes.txt"
    notes.write_text("some notes")
    no_folder = "has neither a config.json nor a .gguf file"
    for path, code, message in (
        (notes, 4, "'notes.txt' is not a GGUF file"),
        (tmp_path, 3, no_folder),
    ):
        ran = cli("pull", str(path))
        assert (ran.code, ran.out) == (code, "")
        assert message in ran.err


def test_pull_names_a_draft_that_is_not_here(
    cli: Cli, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maxi = own_cache / "models" / "maxi.gguf"
    monkeypatch.setattr("twostroke.cli.pull.fetch", lambda _: maxi)
    hint = "`serve` and `chat` are faster with a draft model: twostroke pull mini\n"
    assert cli("pull", "maxi").out == f"maxi is ready: {maxi}\nLicence: MIT\n{hint}"
    monkeypatch.setattr("twostroke.model.hub.local_draft", lambda _: "mini")
    assert hint not in cli("pull", "maxi").out


def test_pull_names_the_nearest(cli: Cli, own_cache: Path) -> None:
    ran = cli("pull", "mimi")
    assert ran.code == 3
    assert "Did you mean 'mini'?" in ran.err


@pytest.mark.parametrize("command", [("pull",), ("models", "pull")])
def test_several_are_pulled_one_after_the_other(
    cli: Cli, mini: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(loader, "pull", slow_pull)
    ran = cli(*command, "maxi", "mini")
    assert (ran.code, ran.err) == (0, "")
    first, _, second, _ = ran.out.splitlines()
    assert first == "maxi is ready: /there/maxi.gguf"
    assert second == f"mini is already here: {mini}"


def test_one_that_cannot_be_pulled_does_not_keep_back_the_others(
    cli: Cli, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "pull", pull_of_known)
    ran = cli("pull", "mimi", "mini", "maxi")
    assert ran.code == 3
    assert "mini is ready" in ran.out
    assert "maxi is ready" in ran.out
    first, last = ran.err.splitlines()
    assert first.startswith("mimi: There is no model 'mimi'")
    assert last == "twostroke: 1 of 3 models failed: mimi."


def test_pull_fetches_and_says_nothing_in_between_to_a_script(
    cli: Cli, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "pull", slow_pull)
    ran = cli("pull", "mini")
    assert (ran.code, ran.out, ran.err) == (0, f"mini is ready: /there/mini.gguf\n{LICENCE}", "")


def test_an_interrupted_pull_says_that_nothing_was_kept(
    cli: Cli, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str, watch: Watcher) -> Path:
        raise KeyboardInterrupt(f"Fetching {name!r} was interrupted; nothing was kept.")

    monkeypatch.setattr(loader, "pull", interrupted)
    for line in (("pull", "mini"), ("generate", "mini", "-p", "a")):
        ran = cli(*line)
        assert ran.code == 130
        assert ran.err == "twostroke: Fetching 'mini' was interrupted; nothing was kept.\n"


def pull_of_known(name: str, watch: Watcher) -> Path:
    fetch.find(name)
    return slow_pull(name, watch)


def slow_pull(name: str, watch: Watcher) -> Path:
    for phase in ("wait", "download", "unpack", "verify"):
        for done in range(0, 101, 20):
            watch(DownloadProgress(phase, done * 1000, None if phase == "wait" else 100_000))
    return Path("/there") / f"{name}.gguf"


class Screen:
    """Standard error that claims to be a terminal."""

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
    with TerminalProgressBar() as bar:
        watch = progress_watcher(bar, "mini")
        for phase in ("wait", "download", "unpack", "verify"):
            watch(DownloadProgress(phase, 50_000, None if phase == "wait" else 100_000))
            assert bar._progress is not None
            bar._progress.refresh()
    for label in ("Waiting for another download of mini", "Downloading mini", "Unpacking mini"):
        assert label in screen.text
    assert "50.0/100.0 kB" in screen.text
    assert screen.text.endswith("\x1b[2K")  # the line is wiped


def test_a_choice_is_shown_above_the_bar(
    cli: Cli, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choosing(name: str, watch: Watcher) -> Path:
        watch(DownloadProgress("choose", 0, None, "taking Q4_K_M"))
        return slow_pull(name, watch)

    monkeypatch.setattr(loader, "pull", choosing)
    assert cli("pull", "mini").err == "taking Q4_K_M\n"
    screen = Screen(monkeypatch)
    with TerminalProgressBar() as bar:
        watch = progress_watcher(bar, "mini")
        watch(DownloadProgress("download", 1, 2))
        watch(DownloadProgress("choose", 0, None, "taking Q4_K_M"))
    assert "taking Q4_K_M" in screen.text


@pytest.mark.parametrize("bar", [{"quiet": True}, {"delay_s": 60.0}])
def test_a_bar_may_be_silent(monkeypatch: pytest.MonkeyPatch, bar: dict[str, float]) -> None:
    screen = Screen(monkeypatch)
    with TerminalProgressBar(**bar) as silent:  # type: ignore_progress[arg-type]
        silent.show("Loading", 1, 2)
    assert screen.text == ""


def test_loading_shows_a_bar_once_it_takes_long(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch)
    monkeypatch.setattr("twostroke.cli.pull._BAR_DELAY_S", 0.0)
    open_engine(tiny, EngineOptions(cache=CacheOptions(memory_bytes=2_000_000))).close()
    assert "Loading tiny.gguf" in screen.text
