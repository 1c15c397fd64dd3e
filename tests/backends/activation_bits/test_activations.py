"""`activation_bits="auto"` is resolved once for a model, and the choice is stored."""

from __future__ import annotations

import shutil
from importlib import resources
from typing import TYPE_CHECKING

import msgspec
import pytest
from msgspec.structs import replace

from support.tiny import Tiny, write_tiny_gguf
from twostroke import LLM, EngineOptions
from twostroke.backends import recipe
from twostroke.backends.activation_bits import METHOD
from twostroke.backends.activation_bits import resolve as activations
from twostroke.backends.activation_bits.resolve import resolve_activation_bits
from twostroke.backends.cpu import CpuBackend
from twostroke.core.env import cache_dir
from twostroke.core.errors import MemoryLimitError
from twostroke.core.options import ActivationBits, ComputeOptions
from twostroke.model.families import build_program
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path

AUTO = ComputeOptions(num_threads=1, activation_bits="auto")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    loaded = load_path(write_tiny_gguf(tmp_path / "tiny.gguf", Tiny(fmt="Q4_1")))
    return loaded, build_program(loaded.spec)


def test_a_choice_is_made_once_and_a_damaged_one_again(model, tmp_path, monkeypatch):
    monkeypatch.setattr(activations, "MIN_WEIGHTS", 0)
    messages: list[str] = []
    first = resolve_activation_bits(AUTO, *model, messages.append).activation_bits
    assert isinstance(first, ActivationBits)
    assert len(messages) == 2
    assert "once" in messages[0]
    assert "is prepared" in messages[1]
    assert resolve_activation_bits(AUTO, *model, messages.append).activation_bits == first
    assert len(messages) == 2
    (stored_path,) = (tmp_path / "cache" / "activation-bits").iterdir()
    for damaged in ("{", stored_path.read_text().replace(first.model_id, "another")):
        stored_path.write_text(damaged)
        assert resolve_activation_bits(AUTO, *model, messages.append).activation_bits == first
    assert len(messages) == 6


def test_a_model_that_does_not_fit_is_refused_before_its_bits_are_chosen(model, monkeypatch):
    monkeypatch.setattr(activations, "MIN_WEIGHTS", 0)
    monkeypatch.setattr(activations, "choose", lambda *_: pytest.fail("bits were chosen for it"))
    monkeypatch.setattr(recipe, "memory_free", lambda *_: 1 << 20)
    with pytest.raises(MemoryLimitError, match="no context would fit"):
        LLM(model[0].path, EngineOptions(compute=AUTO))


def test_a_measurement_keeps_the_packed_weights_for_the_start(model, monkeypatch):
    monkeypatch.setattr(activations, "MIN_WEIGHTS", 0)
    stores = []
    create = CpuBackend.__init__

    def note_store(self, *args, packed_store=None, **options):
        stores.append(packed_store)
        create(self, *args, packed_store=packed_store, **options)

    monkeypatch.setattr(CpuBackend, "__init__", note_store)
    LLM(model[0].path, EngineOptions(compute=AUTO)).close()
    measuring, serving = stores
    names = ["matrix Q4_1 (1, 32)"]
    library_path = model[0].path  # any file
    assert measuring.path_of(library_path, names, "id") == serving.path_of(
        library_path, names, "id"
    )


def test_large_models_are_scored_on_less_text(model, monkeypatch):
    monkeypatch.setattr(activations, "MIN_WEIGHTS", 0)
    loaded, program = model
    lengths: list[int] = []
    score_with = CpuBackend.score_with

    def score_and_count(self, bits, tokens):
        lengths.append(len(tokens))
        return score_with(self, bits, tokens)

    monkeypatch.setattr(CpuBackend, "score_with", score_and_count)
    resolve_activation_bits(AUTO, loaded, program)
    longest = max(lengths)
    shutil.rmtree(cache_dir() / "activation-bits")
    lengths.clear()
    monkeypatch.setattr(activations, "LARGE_WEIGHTS", 0)
    monkeypatch.setattr(activations, "_CHOOSING_WORK", 0)
    monkeypatch.setattr(activations, "_CHECKING_WORK", 0)
    choice = resolve_activation_bits(AUTO, loaded, program).activation_bits
    assert isinstance(choice, ActivationBits)
    assert max(lengths) < longest
    assert lengths[0] == 64
    assert resolve_activation_bits(AUTO, loaded, program).activation_bits == choice


def test_equal_choices_have_the_same_name():
    bits = {"a.weight": 8, "b.weight": 9}
    choice = ActivationBits("model", METHOD, bits, 1e-4, 3)
    other = replace(choice, bits=dict(reversed(bits.items())), divergence=2e-4)
    assert str(choice) == str(other)
    assert str(choice) != str(replace(choice, bits=bits | {"b.weight": 8}))


def test_choices_in_the_package_are_of_this_method():
    file = resources.files("twostroke.backends.activation_bits").joinpath("shipped.json")
    shipped = msgspec.json.decode(file.read_bytes(), type=list[ActivationBits])
    assert {choice.version for choice in shipped} == {METHOD}
    for choice in shipped:
        assert activations._shipped(choice.model_id) == choice
        assert set(choice.bits.values()) <= {8, 9}
    assert activations._shipped("another") is None


def test_nothing_is_chosen_for_small_models_other_backends_and_given_bits(model):
    assert resolve_activation_bits(AUTO, *model).activation_bits == 15
    for compute in (
        ComputeOptions("reference", activation_bits="auto"),
        ComputeOptions(activation_bits=8),
    ):
        assert resolve_activation_bits(compute, *model) is compute
