"""`twostroke compare`: its tables, its JSON, its limits and its refusals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from support.tiny import Tiny, write_tiny_gguf
from twostroke.core.options import ActivationBits
from twostroke.lab.measure import compare as module

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Ran
    from twostroke.core.options import ComputeOptions
    from twostroke.model.weights import LoadedModel

    Cli = Callable[..., Ran]


@pytest.fixture(autouse=True)
def level_with_one_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a level other than AMX, which would have a second line for generated rows."""
    monkeypatch.setenv("TWOSTROKE_CPU_LEVEL", "portable")


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    return str(write_tiny_gguf(tmp_path / "tiny.gguf", Tiny()))


@pytest.fixture
def coarse(tmp_path: Path) -> str:
    return str(write_tiny_gguf(tmp_path / "coarse.gguf", Tiny(fmt="Q4_0")))


def test_formats_of_keys_and_values_are_shown_side_by_side(cli: Cli, tiny: str) -> None:
    line = ("compare", tiny, "--tokens", "60", "--kv-formats")
    ran = cli(*line, "f16,int8")
    assert ran.code == 0
    named = [text for text in ran.out.splitlines() if text.startswith("cpu, ")]
    assert ["int8 keys and values" in text for text in named] == [False, True]
    assert "'int4' is not one of f16, bf16, int16, int8." in cli(*line, "int4").err


def test_the_cpu_reader_is_shown_against_the_reference(cli: Cli, tiny: str) -> None:
    ran = cli("compare", tiny, "--tokens", "200", "--length", "100", "--check")
    assert ran.code == 0
    first, _, head, line, *rest = ran.out.splitlines()
    assert first.endswith("tiny.gguf against reference, 200 tokens")
    assert head.split()[:3] == ["READER", "MEAN", "KL"]
    assert line.startswith("cpu, ")
    assert rest[1].startswith("DRIFT AFTER LAYER")
    assert [row.split()[0] for row in rest[2:]] == ["1", "2"]


def test_all_levels_that_run_here_are_lines_of_the_json(cli: Cli, tiny: str) -> None:
    ran = cli("compare", tiny, "--tokens", "64", "--levels", "all", "--readers", "cpu", "--json")
    result = json.loads(ran.out)
    assert result["num_tokens"] == 64
    assert any("portable" in line["name"] for line in result["readers"])
    assert all(line["comparison"]["mean_kl"] < 1e-3 for line in result["readers"])


def test_formats_of_keys_and_values_are_lines_too(cli: Cli, tiny: str) -> None:
    ran = cli("compare", tiny, "--tokens", "100", "--kv-formats", "all", "--json")
    half, bfloat, float32_line, eighth = json.loads(ran.out)["readers"]
    assert "bf16 keys and values" in bfloat["name"]
    assert "int8 keys and values" in eighth["name"]
    for precise in (half, float32_line):
        assert precise["comparison"]["mean_kl"] < bfloat["comparison"]["mean_kl"]
    assert half["comparison"]["mean_kl"] < eighth["comparison"]["mean_kl"] < 1e-2


def test_bits_of_activations_are_lines_too(cli: Cli, coarse: str) -> None:
    ran = cli("compare", coarse, "--tokens", "100", "--activation-bits", "all", "--json")
    chosen_line, fifteen, nine, eight = json.loads(ran.out)["readers"]
    assert chosen_line["comparison"] == fifteen["comparison"], "a small model keeps 15 bits"
    assert "9-bit activations" in nine["name"]
    assert "8-bit activations" in eight["name"]
    kl = [reader["comparison"]["mean_kl"] for reader in (fifteen, nine, eight)]
    assert kl == sorted(kl)
    assert kl[-1] < 1e-1


def test_chosen_bits_are_measured_against_fifteen(
    cli: Cli, coarse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen_compute(compute: ComputeOptions, loaded: LoadedModel, _: object) -> ComputeOptions:
        if compute.activation_bits != "auto":
            return compute
        names = {name: 8 for name, tensor in loaded.tensors.items() if len(tensor.shape) == 2}
        return replace(compute, activation_bits=ActivationBits("", 0, names, 0.0, len(names)))

    monkeypatch.setattr(module, "resolve_activation_bits", chosen_compute)
    for bits in ((), ("--activation-bits", "auto")):
        ran = cli("compare", coarse, "--tokens", "100", "--right", "cpu", *bits, "--json")
        (reader,) = json.loads(ran.out)["readers"]
        assert reader["comparison"]["mean_kl"] > 1e-7


def test_check_fails_for_a_coarser_format(cli: Cli, tiny: str, coarse: str) -> None:
    arguments = ("compare", coarse, "--against", tiny, "--readers", "reference", "--tokens", "128")
    assert cli(*arguments).code == 0
    ran = cli(*arguments, "--check")
    assert ran.code == 1
    assert "Beyond the limits (mean KL below 0.001" in ran.err
    assert "reference" in ran.err


def test_an_own_text_is_read(cli: Cli, tiny: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("hello the world is here to be read " * 5, encoding="utf-8")
    assert "against reference" in cli("compare", tiny, "--text", str(text)).out
    text.write_text("", encoding="utf-8")
    assert "has no text" in cli("compare", tiny, "--text", str(text)).err
    text.write_bytes(b"\xff\xfe\xff")
    assert "is not UTF-8 text" in cli("compare", tiny, "--text", str(text)).err
    assert "cannot be read" in cli("compare", tiny, "--text", str(tmp_path)).err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--readers", "cpu,refrence"), "'refrence' is not one of cpu, gpu, reference, torch."),
        (("--readers", ""), "'' is not one of cpu, gpu, reference, torch."),
        (("--levels", ""), "Invalid value for '--levels': '' is not one of"),
        (("--kv-formats", ""), "'' is not one of f16, bf16, int16, int8."),
        (("--against", ""), "There is no model ''"),
        (("--levels", "avx9"), "Invalid value for '--levels': 'avx9' is not one of"),
        (("--length", "100000"), "lower --length"),
        (("--device", "cuda"), "--device needs the torch backend: add it to --readers."),
        (("--levels", "all", "--readers", "reference"), "--levels needs the cpu backend"),
        (("--activation-bits", "7"), "'7' is not one of auto, 15, 9, 8."),
        (("--kv-formats", "f16,int4"), "'int4' is not one of f16, bf16, int16, int8."),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    cli: Cli, tiny: str, words: tuple[str, ...], sentence: str
) -> None:
    ran = cli("compare", tiny, *words)
    assert ran.code != 0
    assert sentence in ran.err
    assert ran.out == ""


def test_an_unknown_level_is_refused_before_anything_is_read(cli: Cli, tiny: str) -> None:
    ran = cli("compare", tiny, "--readers", "reference,cpu", "--levels", "avx9")
    assert ran.code == 2
    assert "Reading with" not in ran.err
