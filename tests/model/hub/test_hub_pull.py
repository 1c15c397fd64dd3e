"""Downloads from the hub with its real client: complete, resumed, shared with other programs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import huggingface_hub
import pytest

from support.hub import COMMIT, Hub, Repo, partials, refusal, stored
from twostroke.model import hub as fetch
from twostroke.model import loader
from twostroke.model.hub.disk import DownloadProgress

if TYPE_CHECKING:
    from pathlib import Path

NAME = "hf:o/r"


def test_a_model_is_fetched_named_and_loaded(hub: Hub, hub_cache: Path, gguf: bytes) -> None:
    hub.repos["o/r"] = Repo({"tiny-Q4_0.gguf": gguf, "README.md": b"read me"})
    seen: list[DownloadProgress] = []
    path = loader.pull(NAME, seen.append)
    assert path.read_bytes() == gguf
    assert path.parent.name == COMMIT
    assert {p.phase for p in seen} == {"download", "verify"}
    done = [p.done_bytes for p in seen if p.phase == "download"]
    assert done == sorted(done)
    assert seen[-1] == DownloadProgress("verify", len(gguf), len(gguf))
    for name in (NAME, "hf:o/r:q4_0", "https://huggingface.co/o/r"):
        assert loader.pull(name) == path
    model = loader.load(NAME)
    assert (model.name, model.licence) == ("o/r", "apache-2.0")
    assert len(hub.transfers) == 1


def test_the_hub_s_own_client_finds_what_was_fetched(
    hub: Hub, hub_cache: Path, gguf: bytes
) -> None:
    hub.repos["o/r"] = Repo({"a-Q4_0.gguf": gguf, "config.json": b"{}"})
    path = loader.pull(NAME)
    client_path = huggingface_hub.hf_hub_download(
        "o/r", "a-Q4_0.gguf", cache_dir=hub_cache, local_files_only=True
    )
    assert client_path == str(path)
    scanned = huggingface_hub.scan_cache_dir(hub_cache)
    (only,) = scanned.repos
    assert (only.repo_id, only.size_on_disk, list(scanned.warnings)) == ("o/r", len(gguf), [])


def test_files_fetched_by_another_program_are_used(hub: Hub, hub_cache: Path, gguf: bytes) -> None:
    hub.repos["o/r"] = Repo({"a-Q4_0.gguf": gguf})
    theirs = huggingface_hub.hf_hub_download("o/r", "a-Q4_0.gguf", cache_dir=hub_cache)
    hub.requests.clear()
    assert str(loader.pull(NAME)) == theirs
    assert hub.transfers == []
    assert fetch.remove(NAME) == 0
    assert stored(hub_cache), "what others fetched is theirs"


def test_only_needed_files_of_a_safetensors_repository_are_fetched(
    hub: Hub, hub_cache: Path, folder: dict[str, bytes]
) -> None:
    noise = {"pytorch_model.bin": b"!", "modeling.py": b"import os", "README.md": b"hello"}
    hub.repos["o/r"] = Repo({**folder, **noise}, licence=None)
    path = loader.pull(NAME)
    assert {file.name for file in path.iterdir()} == set(folder)
    assert loader.load(NAME).name == "o/r"
    listing = fetch.find(NAME)
    assert (listing.family, listing.number_format, listing.licence) == (
        "llama",
        "safetensors",
        None,
    )
    fetch.verify(NAME)


def test_all_parts_of_a_split_model_are_fetched(hub: Hub, gguf: bytes) -> None:
    parts = {f"m-Q8_0-0000{n}-of-00002.gguf": gguf + bytes([n]) for n in (1, 2)}
    hub.repos["o/r"] = Repo({**parts, "m-F16.gguf": b"GGUF"})
    path = loader.pull("hf:o/r:Q8_0")
    assert path.name == "m-Q8_0-00001-of-00002.gguf"
    assert path.with_name("m-Q8_0-00002-of-00002.gguf").read_bytes() == gguf + b"\2"


def test_a_choice_is_reported(hub: Hub, gguf: bytes) -> None:
    hub.repos["o/r"] = Repo({"m-Q4_0.gguf": gguf, "m-Q8_0.gguf": gguf + b"8"})
    seen: list[DownloadProgress] = []
    loader.pull(NAME, seen.append)
    assert seen[0].phase == "choose"
    assert "taking Q4_0; others: Q8_0" in (seen[0].note or "")
    assert fetch.find(NAME).name == "hf:o/r:Q4_0"


def test_a_broken_connection_resumes_where_it_stopped(
    hub: Hub, hub_cache: Path, gguf: bytes
) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    hub.cuts.extend([1_200_000, 1_200_000])
    assert loader.pull(NAME).read_bytes() == gguf
    starts = [int((transfer.range or "").removeprefix("bytes=")[:-1]) for transfer in hub.transfers]
    assert starts[0] == 0
    assert 1_000_000 <= starts[1] <= 1_200_000
    assert 2_000_000 <= starts[2] <= 2_400_000
    assert not partials(hub_cache)


def test_a_later_pull_continues_an_interrupted_one(hub: Hub, hub_cache: Path, gguf: bytes) -> None:
    def interrupt(progress: DownloadProgress) -> None:
        if progress.done_bytes > 2_000_000:
            raise KeyboardInterrupt

    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    with pytest.raises(KeyboardInterrupt, match=r"Interrupted. [23] MB are kept: pull again"):
        loader.pull(NAME, interrupt)
    (partial,) = partials(hub_cache)
    size = partial.stat().st_size
    assert 2_000_000 < size < len(gguf)
    assert not list(hub_cache.rglob("a.gguf"))
    hub.requests.clear()
    assert loader.pull(NAME).read_bytes() == gguf
    assert [transfer.range for transfer in hub.transfers] == [f"bytes={size}-"]


def test_a_server_without_ranges_starts_again(hub: Hub, hub_cache: Path, gguf: bytes) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    hub.knows_ranges = False
    hub.cuts.append(1_500_000)
    assert loader.pull(NAME).read_bytes() == gguf


def test_a_connection_that_always_breaks_fails_and_keeps_the_received_bytes(
    hub: Hub, hub_cache: Path, gguf: bytes
) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    hub.cuts.extend([1_500_000] + [0] * 10)
    assert "could not be reached" in refusal(NAME)
    assert len(hub.transfers) == 5
    assert partials(hub_cache)[0].stat().st_size >= 1_000_000


def test_only_one_of_several_concurrent_pulls_downloads(hub: Hub, gguf: bytes) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    hub.pause_s = 0.002
    phases: list[str] = []
    paths: list[Path] = []

    def run() -> None:
        paths.append(loader.pull(NAME, lambda progress: phases.append(progress.phase)))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == gguf
    assert phases.count("wait") == 2
    assert len(hub.transfers) == 1


def test_a_new_commit_is_another_model_that_shares_equal_files(
    hub: Hub, hub_cache: Path, gguf: bytes
) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    loader.pull(f"hf:o/r@{COMMIT}")
    hub.repos["o/r"].commit = "f" * 40
    path = loader.pull(NAME)
    assert path.parent.name == "f" * 40
    assert len(hub.transfers) == 1
    assert fetch.remove(NAME) == 0, "the other commit still links to it"
    assert fetch.remove(f"hf:o/r@{COMMIT}") == len(gguf)
    assert stored(hub_cache) == []
