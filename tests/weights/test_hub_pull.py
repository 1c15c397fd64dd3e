"""Fetching from the hub, with its real client, from a stand-in that can be made to fail."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
from typing import TYPE_CHECKING

import huggingface_hub
import pytest

from support.gguf_writer import gguf_bytes
from support.hub import COMMIT, TOKEN, Hub, Repo, git_sha1, hub_at
from support.tiny import write_tiny_folder, write_tiny_gguf
from twostroke import weights
from twostroke.core.errors import DownloadError, ModelFormatError, ModelNotFoundError
from twostroke.weights.hub import pull as hub_pull
from twostroke.weights.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = "hf:o/r"


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A tiny model, padded to 5 MB: several pieces on the wire."""
    path = write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    return path.read_bytes() + bytes(range(256)) * 20_000


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny safetensors model."""
    path = write_tiny_folder(tmp_path_factory.mktemp("tiny") / "folder")
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The hub's cache, in the way of this test only."""
    return tmp_path / "hf" / "hub"


@pytest.fixture
def hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_pull, "PAUSE_S", 0.001)
    with hub_at(cache, monkeypatch) as hub:
        yield hub


def stored(cache: Path) -> list[str]:
    """The names of the files in the hub's cache."""
    found = (path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file())
    return sorted(name for name in found if not name.startswith(".locks/"))


def partials(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.incomplete"))


def refusal(name: str, kind: type[Exception] = DownloadError) -> str:
    with pytest.raises(kind) as caught:
        weights.pull(name)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_a_model_is_fetched_named_and_loaded(hub: Hub, cache: Path, gguf: bytes) -> None:
    hub.repos["o/r"] = Repo({"tiny-Q4_0.gguf": gguf, "README.md": b"read me"})
    seen: list[Progress] = []
    path = weights.pull(NAME, seen.append)
    assert path.read_bytes() == gguf
    assert path.parent.name == COMMIT
    assert {p.phase for p in seen} == {"download"}
    done = [p.done_bytes for p in seen]
    assert done == sorted(done)
    assert seen[-1] == Progress("download", len(gguf), len(gguf))
    for name in (NAME, "hf:o/r:q4_0", "https://huggingface.co/o/r"):
        assert weights.pull(name) == path
    model = weights.load(NAME)
    assert (model.name, model.licence) == ("o/r", "apache-2.0")
    assert len(hub.transfers) == 1


def test_the_hub_s_own_client_finds_what_was_fetched(hub: Hub, cache: Path, gguf: bytes) -> None:
    hub.repos["o/r"] = Repo({"a-Q4_0.gguf": gguf, "config.json": b"{}"})
    path = weights.pull(NAME)
    found = huggingface_hub.hf_hub_download(
        "o/r", "a-Q4_0.gguf", cache_dir=cache, local_files_only=True
    )
    assert found == str(path)
    scanned = huggingface_hub.scan_cache_dir(cache)
    (only,) = scanned.repos
    assert (only.repo_id, only.size_on_disk, list(scanned.warnings)) == ("o/r", len(gguf), [])


def test_what_another_program_fetched_is_not_fetched_again(
    hub: Hub, cache: Path, gguf: bytes
) -> None:
    hub.repos["o/r"] = Repo({"a-Q4_0.gguf": gguf})
    theirs = huggingface_hub.hf_hub_download("o/r", "a-Q4_0.gguf", cache_dir=cache)
    hub.asked.clear()
    assert str(weights.pull(NAME)) == theirs
    assert hub.transfers == []
    assert weights.remove(NAME) == 0
    assert stored(cache), "what others fetched is theirs"


def test_of_a_safetensors_repository_nothing_needless_is_fetched(
    hub: Hub, cache: Path, folder: dict[str, bytes]
) -> None:
    noise = {"pytorch_model.bin": b"!", "modeling.py": b"import os", "README.md": b"hello"}
    hub.repos["o/r"] = Repo({**folder, **noise}, licence=None)
    path = weights.pull(NAME)
    assert {file.name for file in path.iterdir()} == set(folder)
    assert weights.load(NAME).name == "o/r"
    listing = weights.find(NAME)
    assert (listing.family, listing.number_format, listing.licence) == (
        "llama",
        "safetensors",
        None,
    )
    weights.verify(NAME)


def test_all_parts_of_a_split_model_are_fetched(hub: Hub, gguf: bytes) -> None:
    parts = {f"m-Q8_0-0000{n}-of-00002.gguf": gguf + bytes([n]) for n in (1, 2)}
    hub.repos["o/r"] = Repo({**parts, "m-F16.gguf": b"GGUF"})
    path = weights.pull("hf:o/r:Q8_0")
    assert path.name == "m-Q8_0-00001-of-00002.gguf"
    assert path.with_name("m-Q8_0-00002-of-00002.gguf").read_bytes() == gguf + b"\2"


def test_a_choice_is_said_aloud(hub: Hub, gguf: bytes) -> None:
    hub.repos["o/r"] = Repo({"m-Q4_0.gguf": gguf, "m-Q8_0.gguf": gguf + b"8"})
    seen: list[Progress] = []
    weights.pull(NAME, seen.append)
    assert seen[0].phase == "choose"
    assert "taking Q4_0; others: Q8_0" in (seen[0].note or "")
    assert weights.find(NAME).name == "hf:o/r:Q4_0"


def test_a_cut_connection_is_taken_up_where_it_broke(hub: Hub, cache: Path, gguf: bytes) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    hub.cuts.extend([3_000_000, 1_500_000])
    assert weights.pull(NAME).read_bytes() == gguf
    assert [asked.range is None for asked in hub.transfers] == [True, False, False]
    first = int((hub.transfers[1].range or "").removeprefix("bytes=")[:-1])
    assert 2_000_000 <= first <= 3_000_000
    assert not partials(cache)


def test_a_later_pull_goes_on_where_an_interrupted_one_ended(
    hub: Hub, cache: Path, gguf: bytes
) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.done_bytes > 2_000_000:
            raise KeyboardInterrupt

    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    with pytest.raises(KeyboardInterrupt, match=r"interrupted; [23] MB are kept, and the next"):
        weights.pull(NAME, interrupt)
    (partial,) = partials(cache)
    size = partial.stat().st_size
    assert 2_000_000 < size < len(gguf)
    assert not list(cache.rglob("a.gguf"))
    hub.asked.clear()
    assert weights.pull(NAME).read_bytes() == gguf
    assert [asked.range for asked in hub.transfers] == [f"bytes={size}-"]


def test_a_server_without_ranges_begins_anew(hub: Hub, cache: Path, gguf: bytes) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    hub.knows_ranges = False
    hub.cuts.append(2_500_000)
    assert weights.pull(NAME).read_bytes() == gguf


def test_a_connection_that_is_always_cut_is_given_up_and_what_came_is_kept(
    hub: Hub, cache: Path, gguf: bytes
) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    hub.cuts.extend([2_500_000] + [0] * 10)
    assert "could not be reached" in refusal(NAME)
    assert len(hub.transfers) == 1 + hub_pull.NUM_RETRIES
    assert partials(cache)[0].stat().st_size >= 2_000_000


def test_wrong_bytes_are_dropped(hub: Hub, cache: Path, gguf: bytes) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    hub.damaged = True
    assert "'a.gguf' arrived with a wrong checksum" in refusal(NAME)
    assert stored(cache) == []
    hub.damaged = False
    assert weights.pull(NAME).read_bytes() == gguf


def test_wrong_bytes_of_a_small_file_are_dropped(hub: Hub, cache: Path, folder: dict) -> None:
    hub.repos["o/r"] = Repo(folder)
    hub.damaged = True
    assert "'config.json' arrived with a wrong checksum" in refusal(NAME)


def test_more_bytes_than_announced_are_dropped(hub: Hub, cache: Path, gguf: bytes) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    hub.longer = True
    assert "is larger than the" in refusal(NAME)
    assert stored(cache) == []


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_hub_is_asked_again(hub: Hub, gguf: bytes, status: int) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    hub.refusals.extend([(status, {"Retry-After": "2"})] * 3)
    assert weights.pull(NAME).read_bytes() == gguf


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (429, {"Retry-After": "300"}, "limits how often you may ask for 'o/r': try again in 300 s"),
        (429, {"RateLimit": '"api";r=0;t=55'}, "try again in 55 s; log in with 'hf auth login'"),
        (503, {}, "is out of order for 'o/r' (status 503): try again later"),
        (418, {}, "refuses 'o/r' with status 418"),
        (403, {}, "the token is wrong or may not read it"),
    ],
)
def test_a_hub_that_stays_busy_is_one_sentence(
    hub: Hub, gguf: bytes, status: int, headers: dict[str, str], expected: str
) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    hub.refusals.extend([(status, headers)] * 20)
    assert expected in refusal(NAME)


def test_a_gated_repository_says_where_its_licence_is(
    hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf}, gated=True)
    message = refusal(NAME)
    assert f"'o/r' is gated: accept its licence at {hub.url}/o/r, then log in with" in message
    monkeypatch.setenv("HF_TOKEN", "other")
    assert f"Your token has no access to 'o/r' yet: accept its licence at {hub.url}/o/r" in refusal(
        NAME
    )
    monkeypatch.setenv("HF_TOKEN", "nonsense")
    assert "the token is wrong" in refusal(NAME)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert weights.pull(NAME).read_bytes() == gguf
    assert {asked.token for asked in hub.transfers} == {None}, "a token left the hub"


def test_what_cannot_be_seen_is_not_found(
    hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf}, private=True)
    for name in (NAME, "hf:o/none"):
        assert "has no model 'o/" in refusal(name, ModelNotFoundError)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert weights.pull(NAME).read_bytes() == gguf
    message = refusal("hf:o/r@dev", ModelNotFoundError)
    assert message == f"'o/r' has no revision 'dev': see {hub.url}/o/r."
    assert "holds no 'Q8_0'" in refusal("hf:o/r:Q8_0", ModelNotFoundError)


@pytest.mark.parametrize("nonsense", [b"<html>Log in</html>", b"[]", b"{}", b'{"id": "o/r"}'])
def test_an_answer_that_is_none_is_one_sentence(hub: Hub, nonsense: bytes) -> None:
    hub.nonsense = nonsense
    assert "describes no repository: check HF_ENDPOINT" in refusal(NAME)


def test_no_network_is_one_sentence_and_the_cache_still_works(
    hub: Hub, gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/r"] = Repo({"a-Q4_0.gguf": gguf})
    path = weights.pull(NAME)
    shutil.rmtree(tmp_path / "cache")  # the hub's cache still has it
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert weights.pull(NAME) == path
    assert weights.load(NAME).name == "o/r"
    assert "could not be reached for 'o/r'" in refusal("hf:o/r:Q8_0")
    assert "could not be reached for 'o/other'" in refusal("hf:o/other")


def test_offline_mode_is_told_from_no_network(
    hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set, unset it" in refusal(NAME)
    assert hub.asked == []


def test_a_family_that_cannot_run_is_refused_at_the_first_bytes(hub: Hub, cache: Path) -> None:
    strange = gguf_bytes({"general.architecture": "strange"}, {}) + bytes(20_000_000)
    hub.repos["o/r"] = Repo({"a.gguf": strange})
    seen: list[Progress] = []
    with pytest.raises(ModelFormatError, match="family 'strange', which this version cannot run"):
        weights.pull(NAME, seen.append)
    assert seen[-1].done_bytes <= 2 << 20
    assert stored(cache) == []


def test_numbers_that_cannot_be_read_are_refused_at_the_first_bytes(
    hub: Hub, cache: Path, gguf: bytes
) -> None:
    at = gguf.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    data = gguf[:at] + (16).to_bytes(4, "little") + gguf[at + 4 :]
    hub.repos["o/r"] = Repo({"a.gguf": data + bytes(20_000_000)})
    message = refusal(NAME, ModelFormatError)
    assert "'a.gguf' has numbers of type IQ2_XXS" in message
    assert "name another quantization" in message
    assert stored(cache) == []


def test_what_is_no_gguf_file_is_refused_at_the_first_bytes(hub: Hub, cache: Path) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": b"version https://git-lfs" + bytes(20_000_000)})
    assert "is not a GGUF file" in refusal(NAME, ModelFormatError)
    assert stored(cache) == []


def test_a_configuration_that_cannot_run_is_refused_before_the_weights(
    hub: Hub, folder: dict[str, bytes]
) -> None:
    for change, expected in (
        ({"model_type": "strange"}, "is of the family 'strange'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ):
        config = json.loads(folder["config.json"]) | change
        hub.repos["o/r"] = Repo({**folder, "config.json": json.dumps(config).encode()})
        assert expected in refusal(NAME, ModelFormatError)
    assert hub.transfers == []


def test_a_full_disk_is_seen_beforehand(
    hub: Hub, cache: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000_000))
    message = refusal(NAME)
    assert "needs 22 MB of disk space to be fetched" in message
    assert "set HF_HOME to a folder elsewhere" in message
    assert hub.transfers == []


def test_a_cache_that_cannot_be_written_is_one_sentence(hub: Hub, cache: Path, gguf: bytes) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    cache.parent.mkdir()
    cache.write_text("a file")
    message = refusal(NAME)
    assert "could not be written to" in message
    assert "set HF_HOME" in message


def test_names_that_lead_out_of_the_repository_are_none(hub: Hub, cache: Path) -> None:
    hub.repos["o/r"] = Repo({"../../../evil.gguf": b"GGUF", "/etc/evil.gguf": b"GGUF"})
    assert "holds neither a GGUF file nor" in refusal(NAME, ModelFormatError)


def test_of_two_pulls_at_once_one_fetches(hub: Hub, gguf: bytes) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    hub.pause_s = 0.002
    phases: list[str] = []
    paths: list[Path] = []

    def run() -> None:
        paths.append(weights.pull(NAME, lambda progress: phases.append(progress.phase)))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == gguf
    assert phases.count("wait") == 2
    assert len(hub.transfers) == 1


def test_a_file_system_without_links_holds_the_files_themselves(
    hub: Hub, cache: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("pathlib.Path.symlink_to", refuse)
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    path = weights.pull(NAME)
    assert path.read_bytes() == gguf
    assert not path.is_symlink()
    weights.verify(NAME)
    assert weights.remove(NAME) == len(gguf)
    assert stored(cache) == []


def test_a_missing_client_says_how_to_install_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'twostroke[hub]'" in refusal(NAME)
    with pytest.raises(ModelNotFoundError, match="'twostroke pull hf:o/r'"):
        weights.resolve(NAME)


def test_a_new_commit_is_another_model_and_shares_what_is_equal(
    hub: Hub, cache: Path, gguf: bytes
) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    weights.pull(f"hf:o/r@{COMMIT}")
    hub.repos["o/r"].commit = "f" * 40
    path = weights.pull(NAME)
    assert path.parent.name == "f" * 40
    assert len(hub.transfers) == 1
    assert weights.remove(NAME) == 0, "the other commit still links to it"
    assert weights.remove(f"hf:o/r@{COMMIT}") == len(gguf)
    assert stored(cache) == []


def test_the_stand_in_names_files_as_git_does() -> None:
    assert git_sha1(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"
    assert len(hashlib.sha256(b"").hexdigest()) == 64
