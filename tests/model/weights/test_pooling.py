"""How hidden states are pooled into an embedding, as a model's files describe it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.safetensors_writer import write_safetensors
from support.tiny import Tiny, tiny_weights, write_tiny_folder, write_tiny_gguf
from support.tiny_weights import folder_weights
from twostroke.core.errors import ModelFormatError
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path

KIND = "sentence_transformers.models."


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (None, None),
        (0, None),
        (1, "mean"),
        (2, "cls"),
        (3, "last"),
        (4, "rank"),
        (77, "pooling type 77"),
    ],
)
def test_a_gguf_file_stores_pooling_as_a_number(
    tmp_path: Path, number: int | None, expected: str | None
) -> None:
    metadata = {} if number is None else {"llama.pooling_type": number}
    path = write_tiny_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    assert load_path(path).pooling == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "max+mean"),
        ({"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "x" * 500}, "x" * 40),
    ],
)
def test_a_sentence_transformers_folder_stores_pooling_as_flags_or_a_word(
    tmp_path: Path, config: dict[str, Any], expected: str | None
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    assert load_path(folder).pooling is None
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    assert load_path(folder).pooling == expected


@pytest.mark.parametrize(
    ("more_modules", "expected"), [([], "mean"), (["Normalize"], "mean"), (["Dense"], "mean+Dense")]
)
def test_modules_after_the_pooling_are_named(
    tmp_path: Path, more_modules: list[str], expected: str
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    modules = [{"type": KIND + name} for name in ("Transformer", "Pooling", *more_modules)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    flags = {"pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    assert load_path(folder).pooling == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("modules.json", "{"),
        ("modules.json", "{}"),
        ("modules.json", "[5]"),
        ("modules.json", '[{"type": 5}]'),
        ("1_Pooling/config.json", "[]"),
        ("1_Pooling/config.json", "\x00"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    (folder / "1_Pooling").mkdir()
    (folder / name).write_text(content)
    with pytest.raises(ModelFormatError, match=name.rpartition("/")[2]):
        load_path(folder)


def test_tensor_names_without_the_model_prefix_are_read(tmp_path: Path) -> None:
    tiny = Tiny()
    folder = write_tiny_folder(tmp_path / "tiny", tiny)
    right = {name: tensor.dequantize() for name, tensor in load_path(folder).tensors.items()}
    weights = folder_weights(tiny, tiny_weights(tiny))
    (folder / "model.safetensors").unlink()  # it is mapped
    bare = {
        name.removeprefix("model."): QuantTensor.from_floats(weight, FORMATS["F32"])
        for name, weight in weights.items()
    }
    assert set(bare) != set(weights)
    write_safetensors(folder / "model.safetensors", bare)
    tensors = load_path(folder).tensors
    assert set(tensors) == set(right)
    for name, values in right.items():
        np.testing.assert_array_equal(tensors[name].dequantize(), values)
