"""Failures of the hub, the network or the disk: each is one sentence with a remedy."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING

import huggingface_hub
import pytest

from support.gguf_writer import gguf_bytes
from support.hub import TOKEN, Hub, Repo, git_sha1, refusal, stored
from twostroke.core.errors import ModelFormatError, ModelNotFoundError
from twostroke.model import hub as fetch
from twostroke.model import loader

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.model.hub.disk import DownloadProgress

NAME = "hf:o/r"


def test_damaged_downloads_are_deleted(hub: Hub, hub_cache: Path, gguf: bytes) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    for fault in ("damaged", "longer"):
        setattr(hub, fault, True)
        assert "'a.gguf' arrived damaged" in refusal(NAME)
        assert stored(hub_cache) == []
        setattr(hub, fault, False)
    assert loader.pull(NAME).read_bytes() == gguf


def test_requests_to_a_busy_hub_are_retried(hub: Hub, gguf: bytes) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    hub.refusals.extend([(429, {}), (500, {}), (503, {})])
    assert loader.pull(NAME).read_bytes() == gguf


def test_each_error_status_of_the_hub_is_one_sentence(hub: Hub, gguf: bytes) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    for status, expected in (
        (503, "with status 503: it is busy; try again later."),
        (418, "with status 418: see"),
        (403, "You may not read 'o/r'"),
    ):
        hub.refusals.extend([(status, {})] * 4)
        assert expected in refusal(NAME)
        hub.refusals.clear()


def test_a_gated_repository_says_where_its_licence_is(
    hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf}, gated=True)
    expected = f"'o/r' is gated: accept its licence at {hub.url}/o/r; log in with"
    assert expected in refusal(NAME)
    monkeypatch.setenv("HF_TOKEN", "other")
    assert expected in refusal(NAME)
    monkeypatch.setenv("HF_TOKEN", "nonsense")
    assert "You may not read" in refusal(NAME)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert loader.pull(NAME).read_bytes() == gguf
    assert {transfer.token for transfer in hub.transfers} == {None}, "a token left the hub"


def test_private_and_missing_repositories_are_not_found(
    hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf}, private=True)
    for name in (NAME, "hf:o/none"):
        assert "has no model 'o/" in refusal(name, ModelNotFoundError)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert loader.pull(NAME).read_bytes() == gguf
    message = refusal("hf:o/r@dev", ModelNotFoundError)
    assert message == f"'o/r' has no revision 'dev': see {hub.url}/o/r."
    assert "has no 'Q8_0'" in refusal("hf:o/r:Q8_0", ModelNotFoundError)


def test_a_meaningless_answer_of_the_hub_is_one_sentence(hub: Hub) -> None:
    for nonsense in (b"<html>Log in</html>", b"[]", b"{}", b'{"id": "o/r"}'):
        hub.nonsense = nonsense
        assert "did not describe the repository 'o/r': check HF_ENDPOINT" in refusal(NAME)


def test_without_a_network_the_cache_still_works(
    hub: Hub, gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/r"] = Repo({"a-Q4_0.gguf": gguf})
    path = loader.pull(NAME)
    shutil.rmtree(tmp_path / "cache")  # the hub's cache still has it
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert loader.pull(NAME) == path
    assert loader.load(NAME).name == "o/r"
    with pytest.raises(ModelNotFoundError, match="has no 'Q8_0', but Q4_0"):
        loader.pull("hf:o/r:Q8_0")
    assert "could not be reached for 'o/other'" in refusal("hf:o/other")


def test_offline_mode_has_its_own_message(
    hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal(NAME)
    assert hub.requests == []


def test_an_unsupported_family_is_refused_after_the_first_bytes(hub: Hub, hub_cache: Path) -> None:
    strange = gguf_bytes({"general.architecture": "strange"}, {}) + bytes(20_000_000)
    hub.repos["o/r"] = Repo({"a.gguf": strange})
    seen: list[DownloadProgress] = []
    with pytest.raises(ModelFormatError, match="architecture 'strange', which is not supported"):
        loader.pull(NAME, seen.append)
    assert seen[-1].done_bytes <= 2 << 20
    assert stored(hub_cache) == []


def test_unsupported_number_formats_are_refused_after_the_first_bytes(
    hub: Hub, hub_cache: Path, gguf: bytes
) -> None:
    at = gguf.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    data = gguf[:at] + (41).to_bytes(4, "little") + gguf[at + 4 :]
    hub.repos["o/r"] = Repo({"a.gguf": data + bytes(20_000_000)})
    message = refusal(NAME, ModelFormatError)
    assert "'a.gguf' has tensor 'output_norm.weight' of type Q1_0" in message
    assert stored(hub_cache) == []


def test_a_file_that_is_not_gguf_is_refused_after_the_first_bytes(
    hub: Hub, hub_cache: Path
) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": b"version https://git-lfs" + bytes(20_000_000)})
    assert "is not a GGUF file" in refusal(NAME, ModelFormatError)
    assert stored(hub_cache) == []


def test_an_unsupported_configuration_is_refused_before_the_weights(
    hub: Hub, folder: dict[str, bytes]
) -> None:
    for change, expected in (
        ({"model_type": "strange"}, "'config.json' has the architecture 'strange'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ):
        config = json.loads(folder["config.json"]) | change
        files = {**folder, "config.json": json.dumps(config).encode()}
        hub.repos["o/r"] = Repo(files, commit=git_sha1(files["config.json"]))
        assert expected in refusal(NAME, ModelFormatError)
    assert hub.transfers == []


def test_a_full_disk_is_detected_before_the_download(
    hub: Hub, hub_cache: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000_000))
    message = refusal(NAME)
    assert "needs 20 MB of disk space" in message
    assert "set HF_HOME to a folder on another disk" in message
    assert hub.transfers == []


def test_a_cache_that_cannot_be_written_is_one_sentence(
    hub: Hub, hub_cache: Path, gguf: bytes
) -> None:
    hub.repos["o/r"] = Repo({"a.gguf": gguf})
    hub_cache.parent.mkdir()
    hub_cache.write_text("a file")
    message = refusal(NAME)
    assert "cannot be written to" in message
    assert "set HF_HOME" in message


def test_a_missing_client_says_how_to_install_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "[hub]', or give the path" in refusal(NAME)
    with pytest.raises(ModelNotFoundError, match="'twostroke pull hf:o/r'"):
        fetch.resolve(NAME)
