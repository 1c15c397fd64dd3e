"""What a fleet's file may say, and how its mistakes are told."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from twostroke.core.errors import ModelFormatError, UsageError
from twostroke.fleet.cluster.spec import ReplicaPool, flags, read_spec

if TYPE_CHECKING:
    from pathlib import Path

WHOLE_SPEC = """
name: shop
router:
  host: 0.0.0.0
  port: 8080
  options: {policy: prefix}
models:
  - model: smollm2
    name: chat
    min_replicas: 2
    max_replicas: 8
    cpus: 2
    memory: 1.5
    options: {context-length: 4096, strict: true, in-process: false, cors-origin: [a, b]}
  - model: hf:owner/other
"""

_PAIR = "models:\n- model: a\n  prefill: {}\n- model: a\n  name: prefill\n  {}"


def read(tmp_path: Path, text: str) -> ReplicaPool:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    return read_spec(path)[0].models[0]


def test_a_file_becomes_command_lines(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(WHOLE_SPEC)
    spec, _ = read_spec(path)
    chat, other = spec.models
    assert spec.router.arguments == ("route", "--policy", "prefix")
    assert spec.router.address == ("0.0.0.0", 8080)
    assert chat.arguments == (
        *("serve", "smollm2", "--threads", "2", "--context-length", "4096", "--strict"),
        *("--cors-origin", "a", "--cors-origin", "b", "--name", "chat"),
    )
    assert chat.bounds == (2, 8)
    assert other.label == "other"
    assert other.bounds == (1, 1)


def test_pools_that_read_prompts_need_ports_of_their_own(tmp_path: Path) -> None:
    pairs = "".join(
        f"- {{model: {name}, prefill: r{name}}}\n- {{model: {name}, name: r{name}, {port}}}\n"
        for name, port in (("a", "replicas: 2"), ("b", "peer_port: PORT"))
    )
    path = tmp_path / "fleet.yaml"
    path.write_text("models:\n" + pairs.replace("PORT", "7803"))
    assert read_spec(path)[0].prefill_labels == {"ra", "rb"}
    path.write_text("models:\n" + pairs.replace("PORT", "7802"))
    with pytest.raises(UsageError, match="needs the ports from 7802 to 7803, but ra has 7802"):
        read_spec(path)


def test_options_override_the_threads() -> None:
    words = ("serve", "a", "--threads", "4", "--name", "a")
    assert ReplicaPool(model="a", options={"threads": 4}).arguments == words
    assert flags({"a": False}) == ()


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("qwen2.5-coder-1.5b", "qwen2.5-coder-1.5b"),
        ("hf:Qwen/Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("./a/model.v2.gguf", "model.v2"),
        ("/m/big-00001-of-00003.gguf", "big"),
    ],
)
def test_a_replica_is_served_by_the_name_that_its_work_is_asked_by(model: str, label: str) -> None:
    pool = ReplicaPool(model=model)
    assert pool.label == label
    assert pool.arguments[-2:] == ("--name", label)
    several = ReplicaPool(model=model, options={"models": "b"})
    assert "--name" not in several.arguments, "servers of several models take no name"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            _PAIR.format("prefill", "peer_port: 65535"),
            "line 6: models[1].peer_port needs the ports from 65535 to 65536",
        ),
        ("models:\n- model: a\n  options: {x: [1]}", "line 3: must be a text, got a number"),
        ("models:\n- model: a\n  resources: {rack: -1}", "line 3: resources.rack must be from 0"),
        ("models:\n- model: a\n  name: --x", "line 3: name must not begin with a dash"),
        ("models:\n- name: a\n  model: ''", "line 3: model must be a path"),
        ("models: []", "line 1: models must name at least one model."),
        ("models:\n- model: a\n  replica: 2", "line 3: there is no field 'replica'. Did you mean"),
        ("models:\n- model: a\nrouter:\n  prot: 1", "line 4: there is no field 'prot'. Did you"),
        ("models:\n- model: a\nruoter: {}", "line 3: there is no field 'ruoter'. Did you mean"),
        ("models:\n- model: a\n  replicas: 0", "line 3: replicas must be from 1 to 10,000, got 0."),
        (
            "models:\n- model: a\n  min_replicas: 3\n  max_replicas: 2",
            "line 4: max_replicas must be",
        ),
        (
            "models:\n- model: a\n  min_replicas: 0\n  max_replicas: 0",
            "line 4: max_replicas must be",
        ),
        (
            "models:\n- model: a\n  min_replicas: 0\nrouter:\n  options: {start-wait: 0}",
            "line 3: models[0].min_replicas needs a router that waits: remove start-wait",
        ),
        (
            "models:\n- model: a\n  min_replicas: 0\n  options: {models: [b]}",
            "line 3: min_replicas must be at least 1 for servers of several models",
        ),
        ("models:\n- model: a\n  cpus: many", "line 3: must be a number such as 2.5 or 1e3, got a"),
        ("models:\n- model: a\n  replicas: 2\n  max_replicas: 3", "line 3: replicas excludes"),
        ("models:\n- model: a\n- model: b/a", "line 3: models[1].name is 'a' for two models"),
        ("models:\n- model: a\nname: My Fleet", "line 3: name must have small letters"),
        ("models:\n- model: [", "this is not YAML"),
        (
            "models:\n- model: a\n  cpus: 1e999",
            "line 3: models[0].cpus must be a finite number, got inf.",
        ),
        (
            "models:\n- model: a\n  options:\n    timeout: -.inf",
            "line 4: models[0].options.timeout must be a finite number, got -inf.",
        ),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("fleet.yaml, line ")


def test_a_pool_that_reads_prompts_has_a_port_for_each_replica(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(_PAIR.format("prefill", "peer_port: 7900"))
    spec, _ = read_spec(path)
    decode, prefill = spec.models
    assert spec.prefill_labels == {"prefill"}
    assert prefill.as_prefill(2).options == {"role": "prefill", "peer-address": "{host}:7902"}
    words = decode.as_decode().arguments
    peers = ("--prefill-peers-file", "{prefill-peers}")
    assert words[4:] == ("--role", "decode", *peers, "--name", "a")


def test_what_a_replica_cannot_take_up_is_another_version() -> None:
    pool = ReplicaPool(model="a")
    assert pool.version == ReplicaPool(model="a", max_replicas=4).version
    assert pool.version != ReplicaPool(model="a", peer_port=7900).version
    assert pool.version != ReplicaPool(model="a", options={"context-length": 512}).version


def test_a_file_that_is_not_there_is_named_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)  # as if it were not installed
    with pytest.raises(ModelFormatError, match=r"'none\.yaml' cannot be read"):
        read_spec(tmp_path / "none.yaml")
    (tmp_path / "fleet.yaml").write_text("models: []")
    with pytest.raises(UsageError, match="ray and pyyaml"):
        read_spec(tmp_path / "fleet.yaml")
