"""Models in the hub's cache: listed, verified, removed, cleaned; and pulls by several processes."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from support.commands import started
from support.hub import COMMIT, Hub, Repo, partials, stored
from twostroke.core.errors import ModelFormatError, ModelNotFoundError
from twostroke.model import hub as fetch
from twostroke.model import loader
from twostroke.model.hub.disk import ignore_progress, locked
from twostroke.model.hub.records import stored_records

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

NAME = "hf:o/r"


@pytest.fixture
def pulled(hub: Hub, folder: dict[str, bytes]) -> Path:
    """The folder of a pulled model."""
    hub.repos["o/r"] = Repo(folder)
    return loader.pull(NAME)


def test_a_pulled_model_is_listed_with_its_facts(hub: Hub, pulled: Path) -> None:
    listing = fetch.list_models()[-1]
    assert listing.name == NAME
    assert listing.source == (f"{hub.url}/o/r/tree/{COMMIT}",)
    assert listing.path == pulled
    assert listing.num_bytes == sum(path.stat().st_size for path in pulled.iterdir())
    assert abs((listing.last_used or 0) - time.time()) < 100


def test_loading_a_model_counts_as_use(pulled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, now = fetch.find(NAME), time.time()
    os.utime(record.file, (now - 2 * 86400, now - 2 * 86400))
    assert [unused_record.name for unused_record in fetch.unused(1)] == [NAME]
    loader.load(NAME)
    assert fetch.unused(1) == []
    monkeypatch.setattr("time.time", lambda: now + 2 * 86400)
    assert [unused_record.name for unused_record in fetch.unused(1)] == [NAME]


def test_verification_names_the_damaged_file(pulled: Path) -> None:
    fetch.verify(NAME)
    path = pulled / "tokenizer.json"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"]")
    with pytest.raises(ModelFormatError, match=r"'tokenizer\.json' does not match its checksum"):
        fetch.verify(NAME)


def test_a_truncated_or_missing_file_is_named_and_fetched_again(
    hub: Hub, folder: dict[str, bytes], pulled: Path
) -> None:
    (pulled / "config.json").write_bytes(b"{")
    blob = (pulled / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:1000])
    assert not fetch.list_models()[-1].is_here
    with pytest.raises(ModelNotFoundError, match="'twostroke pull hf:o/r'"):
        fetch.resolve(NAME)
    assert (loader.pull(NAME) / "model.safetensors").read_bytes() == folder["model.safetensors"]
    blob.unlink()
    with pytest.raises(ModelFormatError, match=r"model\.safetensors' cannot be read: No such file"):
        fetch.verify(NAME)
    assert (loader.pull(NAME) / "model.safetensors").read_bytes() == folder["model.safetensors"]
    fetch.verify(NAME)


def test_removing_deletes_all_files_of_the_model(hub_cache: Path, pulled: Path) -> None:
    size = fetch.find(NAME).num_bytes
    assert fetch.remove(NAME) == size
    assert stored(hub_cache) == []
    assert not list(hub_cache.glob("models--*"))
    with pytest.raises(ModelNotFoundError, match="not in the cache"):
        fetch.remove(NAME)


def test_a_misspelled_name_is_answered_with_the_nearest(pulled: Path) -> None:
    for function in (fetch.verify, fetch.remove, fetch.find):
        with pytest.raises(ModelNotFoundError, match=r"Did you mean 'hf:o/r'\?"):
            function("hf:o/rr")


def test_removing_keeps_what_another_model_needs(
    hub: Hub, hub_cache: Path, gguf: bytes, folder: dict[str, bytes]
) -> None:
    hub.repos["o/r"] = Repo({**folder, "a-Q4_0.gguf": gguf, "a-Q8_0.gguf": gguf + b"8"})
    loader.pull("hf:o/r:Q4_0")
    loader.pull("hf:o/r:Q8_0")
    path = loader.pull("hf:o/r:safetensors")
    assert fetch.remove("hf:o/r:Q4_0") == len(gguf)
    assert {file.name for file in path.iterdir()} == {*folder, "a-Q8_0.gguf"}
    fetch.verify("hf:o/r:Q8_0")
    fetch.verify("hf:o/r:safetensors")


def test_records_of_deleted_models_are_removed(hub_cache: Path, pulled: Path) -> None:
    for path in pulled.iterdir():
        path.unlink()
    pulled.rmdir()
    assert NAME not in {listed.name for listed in fetch.list_models()}
    (record,) = stored_records()
    fetch.forget_missing()
    assert not record.file.exists()


def test_leftovers_are_listed_unless_their_download_still_runs(
    hub: Hub, hub_cache: Path, gguf: bytes
) -> None:
    def interrupt(progress: fetch.DownloadProgress) -> None:
        if progress.done_bytes > 1_000_000:
            raise KeyboardInterrupt

    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    with pytest.raises(KeyboardInterrupt):
        loader.pull(NAME, interrupt)
    (partial,) = partials(hub_cache)
    other = partial.with_name("download-of-another-program.incomplete")
    other.write_bytes(b"theirs")
    lock = hub_cache / ".locks" / "models--o--r" / f"{partial.stem}.lock"
    with locked(lock, ignore_progress):
        assert fetch.leftovers() == []
    (leftover,) = fetch.leftovers()
    assert (leftover.path, leftover.num_bytes) == (partial, partial.stat().st_size)
    other.unlink()
    fetch.remove_leftover(leftover)
    assert not list(hub_cache.glob("models--*"))


def test_a_complete_cache_is_not_written(
    hub: Hub, hub_cache: Path, gguf: bytes, tmp_path: Path
) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf, "README.md": b"hello"})
    path = loader.pull(NAME)
    (tmp_path / "cache" / "models" / "hub").rename(tmp_path / "gone")
    before = {path: path.lstat().st_mtime_ns for path in hub_cache.rglob("*")}
    assert loader.pull(NAME) == path
    assert {path: path.lstat().st_mtime_ns for path in hub_cache.rglob("*")} == before


@pytest.fixture
def for_processes(hub: Hub, gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment variables with the hub's address and cache, for commands."""
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def wait_for_bytes(hub_cache: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while not any(path.stat().st_size for path in partials(hub_cache)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_next_command_resumes_a_stopped_download(
    for_processes: None, hub: Hub, hub_cache: Path, gguf: bytes, number: signal.Signals
) -> None:
    hub.pause_s = 0.05
    with started("pull", NAME) as process:
        wait_for_bytes(hub_cache, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    assert process.returncode in {128 + number, -number}
    if number == signal.SIGINT:
        assert b"are kept: pull again to continue.\n" in err
    assert not list(hub_cache.rglob("a.gguf"))
    hub.pause_s = 0.0
    hub.requests.clear()
    assert loader.pull(NAME).read_bytes() == gguf
    assert hub.transfers[0].range is not None


def test_only_one_of_two_concurrent_commands_downloads(
    for_processes: None, hub: Hub, hub_cache: Path
) -> None:
    hub.pause_s = 0.01
    with started("pull", NAME) as first, started("pull", NAME) as second:
        for process in (first, second):
            out, err = process.communicate(timeout=120)
            assert (process.returncode, err) == (0, b"")
            assert b"Licence: apache-2.0" in out
    assert len(hub.transfers) == 1


def test_a_model_from_the_hub_whose_record_is_damaged_counts_as_not_there(
    pulled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = fetch.find(NAME).file
    path.write_bytes(path.read_bytes().replace(b"apache", b"apachf"))
    assert NAME not in {record.name for record in fetch.list_models()}
    with pytest.raises(ModelNotFoundError, match="is not in the cache"):
        fetch.use(NAME)
    assert str(path) in caplog.text
