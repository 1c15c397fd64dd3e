"""`twostroke fit`: its table, its answer if nothing fits, and its refusals."""

from __future__ import annotations

import json

import pytest

from support.tiny import write_tiny_gguf


@pytest.fixture
def models(tmp_path):
    """Files of a tiny model whose names have number formats."""
    paths = [tmp_path / f"tiny-{label}.gguf" for label in ("Q4_1", "F32")]
    return [str(write_tiny_gguf(path)) for path in paths]


def test_the_best_is_named_with_its_command(cli, models):
    ran = cli("fit", *models, "--on", "L4", "--context", "100", "--prompt", "40", "--output", "20")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0].startswith("4 candidates of 4 fit; no other beats these 2 in size, KL")
    assert lines[1].strip() == f"twostroke serve {models[1]} --kv-format f16"
    assert "tiny-F32" in ran.out
    assert "tiny-Q4_1" not in ran.out  # as large, and farther from the published weights
    shown = cli("fit", *models, "--on", "L4", "--context", "100", "--output", "20", "--all")
    assert shown.out.count("beaten") == 2


def test_json_has_every_candidate(cli, models):
    limits = ("--context", "100", "--output", "20", "--kl", "0.05", "--kv-format", "int8")
    ran = cli("fit", *models, "--on", "L4", *limits, "--json")
    body = json.loads(ran.out)
    assert [candidate["label"] for candidate in body["candidates"]] == ["F32", "Q4_1"]
    assert body["candidates"][0]["is_best"]
    assert [excess["limit"] for excess in body["candidates"][1]["excesses"]] == ["KL"]
    assert body["unread"] == []


def test_nothing_that_fits_is_one_sentence(cli, models):
    ran = cli("fit", models[0], "--on", "L4", "--context", "1000000", "--output", "20")
    assert ran.code == 9
    assert ran.err.splitlines()[-1].startswith("twostroke: Nothing fits L4: the nearest is ")
    assert "1,000,000 are asked" in ran.err


def test_refusals_are_sentences(cli, models, tmp_path):
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(b"GGUF and nothing else")
    for arguments, words in (
        ((models[0], "--on", "H100-SXN"), "Did you mean 'H100-SXM'?"),
        ((models[0], "--on", "L4", "--context", "100", "--prompt", "99"), "--context must be at"),
        ((models[0], "--on", "L4", "--kl", "-1"), "--kl must be from 0"),
        ((models[0], "--on", "L4", "--kv-format", "int9"), "Did you mean 'int8'?"),
        ((models[0], "--on", "L4", "--threads", "2"), "--threads has no effect"),
        ((models[0], "--on", "L4", "--streams", "0"), "--streams must be from 1"),
        (("nothing.gguf", "--on", "L4"), "No model could be read. nothing.gguf: There is no file"),
        ((str(odd), "--on", "L4"), "No model could be read."),
    ):
        ran = cli("fit", *arguments)
        assert ran.code != 0
        assert words in ran.err
        assert not ran.out
