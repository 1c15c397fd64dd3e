"""Plans of models on the hub download only headers, from a local stand-in of the hub."""

from __future__ import annotations

import json

import pytest

from support.configs import UNKNOWN_HERE
from support.hub import Repo, hub_at, stored
from support.tiny import write_tiny_folder, write_tiny_gguf
from twostroke.core.errors import DownloadError, ModelFormatError, ModelNotFoundError
from twostroke.lab.planner import Question, find_device, load_planned_model, make_plan
from twostroke.model.hub import hub as hub_module


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_module, "RETRY_PAUSES_S", (0.001,))
    with hub_at(tmp_path / "hf" / "hub", monkeypatch) as hub:
        yield hub


@pytest.fixture
def gguf(tmp_path):
    """A tiny model's file, followed by more bytes than a plan needs."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    return path, path.read_bytes() + bytes(5_000_000)


def sent(hub):
    """The ranges of bytes that the plan requested."""
    spans = [transfer.range.removeprefix("bytes=").split("-") for transfer in hub.transfers]
    return sum(int(last) - int(first) + 1 for first, last in spans)


def test_the_header_of_a_file_is_enough(hub, gguf, tmp_path):
    path, content = gguf
    hub.repos["own/tiny"] = Repo({"tiny-Q8_0.gguf": content})
    remote, local = load_planned_model("hf:own/tiny"), load_planned_model(str(path))
    assert remote.name == "own/tiny"
    assert remote.weight_bytes == local.weight_bytes
    assert remote.stored == local.stored
    assert sent(hub) < len(content) / 2
    assert stored(tmp_path / "hf" / "hub") == []  # nothing is kept
    device, question = find_device("L4"), Question(prompt=16, output=8)
    assert make_plan(remote, device, question).rows == make_plan(local, device, question).rows


def test_headers_and_the_configuration_of_a_folder_are_enough(hub, tmp_path):
    folder = write_tiny_folder(tmp_path / "folder")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    hub.repos["own/folder"] = Repo(files)
    remote, local = load_planned_model("hf:own/folder"), load_planned_model(str(folder))
    assert remote.weight_bytes == local.weight_bytes
    weights = len(files["model.safetensors"])
    header = int.from_bytes(files["model.safetensors"][:8], "little") + 8
    assert header < weights
    assert sent(hub) == header
    assert not any(request.path.endswith("tokenizer.json") for request in hub.requests)


def test_the_configuration_of_a_model_that_does_not_run_here_is_enough(hub, tmp_path):
    folder = write_tiny_folder(tmp_path / "folder")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    files["config.json"] = json.dumps(UNKNOWN_HERE["gpt-oss-20b"]).encode()
    hub.repos["own/gpt-oss"] = Repo(files)
    remote = load_planned_model("hf:own/gpt-oss")
    assert remote.name == "own/gpt-oss"
    assert remote.num_weights == pytest.approx(20.91e9, rel=0.001)
    (tmp_path / "folder" / "config.json").write_bytes(files["config.json"])
    assert load_planned_model(str(folder)).weight_bytes == remote.weight_bytes


def test_a_server_without_ranges_will_do(hub, gguf):
    path, content = gguf
    hub.repos["own/tiny"] = Repo({"tiny-Q8_0.gguf": content})
    hub.knows_ranges = False
    assert (
        load_planned_model("hf:own/tiny").weight_bytes == load_planned_model(str(path)).weight_bytes
    )


def test_what_cannot_be_reached_or_read_is_one_sentence(hub, gguf, monkeypatch):
    _, content = gguf
    hub.repos["own/tiny"] = Repo({"tiny-Q8_0.gguf": b"GGUX" + content[4:]})
    hub.repos["own/closed"] = Repo({"tiny-Q8_0.gguf": content}, gated=True)
    for name, kind, words in (
        ("hf:own/tiny", ModelFormatError, "is not a GGUF file"),
        ("hf:own/none", ModelNotFoundError, "The hub has no model 'own/none'"),
        ("hf:own/closed", DownloadError, "is gated"),
    ):
        with pytest.raises(kind, match=words):
            load_planned_model(name)
    monkeypatch.setattr(hub_module, "RETRY_PAUSES_S", ())
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=r"could not be reached for 'own/tiny': check the net"):
        load_planned_model("hf:own/tiny")


def test_quantized_folders_must_be_pulled(hub, tmp_path):
    folder = write_tiny_folder(tmp_path / "folder")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    config = json.loads(files["config.json"])
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    hub.repos["own/fp8"] = Repo({**files, "config.json": json.dumps(config).encode()})
    with pytest.raises(ModelFormatError, match="pull"):
        load_planned_model("hf:own/fp8")
