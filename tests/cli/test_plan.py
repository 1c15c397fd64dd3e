"""`twostroke plan`: its tables, its JSON and its refusals."""

from __future__ import annotations

import json

import pytest

CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "intermediate_size": 14336,
    "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "llama-8b" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIG))
    return str(path.parent)


def test_tables_and_formulas_are_printed(cli, config):
    lines = cli("plan", config, "--on", "h100-sxm", "--tpot", "10", "--explain").out.splitlines()
    assert lines[0].startswith("llama-8b on H100-SXM: 8.03 G weights (bf16)")
    assert any(line.startswith("STREAMS") for line in lines)
    assert any(line.startswith("weights w4a16") for line in lines)
    knee = next(line for line in lines if line.startswith("knee ="))
    assert "295" in knee


def test_json_holds_what_the_tables_show(cli, config):
    given = ("--on", "A100-80GB", "--weights", "w4a16", "--streams", "8", "--json")
    plan = json.loads(cli("plan", config, *given).out)
    assert plan["chosen"]["streams"] == 8
    assert plan["stored"] == "w4a16"
    assert plan["chosen"] in plan["rows"]
    assert plan["memory"]["weights"] < 6.2e9  # 16 bits for embeddings and logits


def test_a_file_is_planned_on_this_machine(cli, tiny):
    out = cli("plan", str(tiny), "--prompt", "16", "--output", "8").out
    assert "F32" in out.splitlines()[0]


def test_wrong_options_are_named_as_they_are_written(cli, config):
    for given, reason in (
        (("--on", "H100-SXN"), "--on must be one of here, "),
        (("--tpot", "-1"), "--tpot must be greater than 0"),
        (("--devices", "0"), "--devices must be from 1 to 1024, got 0."),
        (("--weights", "int9"), "int8"),
    ):
        ran = cli("plan", config, "--on", "L4", *given)
        assert ran.code == 2
        assert reason in ran.err


def test_what_is_no_model_is_refused(cli, tmp_path):
    ran = cli("plan", str(tmp_path / "nothing.json"), "--on", "L4")
    assert ran.code == 3
