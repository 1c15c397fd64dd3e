"""Layers for multi-token prediction, which files have after the layers of the model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.gguf_writer import write_gguf
from support.safetensors_writer import write_safetensors
from support.tiny import (
    tiny_metadata,
    tiny_of,
    tiny_tensors,
    tiny_weights,
    write_tiny_folder,
    write_tiny_gguf,
)
from support.tiny_weights import folder_weights
from twostroke.core.errors import ModelFormatError
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path


def test_mtp_layers_are_left_out_of_a_folder(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", tiny_of("deepseek-v3"))
    plain = load_path(folder)
    weights = folder_weights(tiny_of("deepseek-v3"), tiny_weights(tiny_of("deepseek-v3")))
    last = {name: w for name, w in weights.items() if name.startswith("model.layers.2.")}
    extra = {name.replace("layers.2.", "layers.3."): values for name, values in last.items()}
    extra["model.layers.3.eh_proj.weight"] = np.zeros((4, 4), np.float32)
    fmt = FORMATS["F32"]
    stored = {name: QuantTensor.from_floats(w, fmt) for name, w in (weights | extra).items()}
    write_safetensors(folder / "model.safetensors", stored)
    with pytest.raises(ModelFormatError, match=r"model\.layers\.3\."):
        load_path(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    assert load_path(folder).tensors.keys() == plain.tensors.keys()
    renamed = {name.replace("model.", "model.language_model."): w for name, w in stored.items()}
    write_safetensors(folder / "model.safetensors", renamed)
    assert load_path(folder).tensors.keys() == plain.tensors.keys()


def test_ernies_mtp_layers_are_left_out_of_a_folder(tmp_path: Path) -> None:
    tiny = tiny_of("ernie4.5-experts")
    folder = write_tiny_folder(tmp_path / "tiny", tiny)
    plain = load_path(folder)
    weights = folder_weights(tiny, tiny_weights(tiny))
    block = {name: w for name, w in weights.items() if name.startswith("model.layers.0.")}
    weights |= {name.replace("layers.0.", "mtp_block.0."): w for name, w in block.items()}
    for name in ("mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj"):
        weights[f"model.{name}.0.weight"] = np.ones((4, 4), np.float32)
    stored = {name: QuantTensor.from_floats(w, FORMATS["F32"]) for name, w in weights.items()}
    write_safetensors(folder / "model.safetensors", stored)
    assert load_path(folder).tensors.keys() == plain.tensors.keys()


@pytest.mark.parametrize("family", ["glm4", "deepseek-v3", "hy3"])
def test_mtp_layers_are_left_out_of_a_gguf_file(tmp_path: Path, family: str) -> None:
    tiny = tiny_of(family)
    plain = load_path(write_tiny_gguf(tmp_path / "a.gguf", tiny))
    tensors = tiny_tensors(tiny)
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("blk.2.")}
    tensors |= {name.replace("blk.2.", "blk.3."): tensor for name, tensor in last.items()}
    tensors["blk.3.nextn.eh_proj.weight"] = tensors["token_embd.weight"]
    counts = {"block_count": 4, "nextn_predict_layers": 1}
    counts_by_key = {f"{tiny.variant.architecture}.{key}": count for key, count in counts.items()}
    model = load_path(write_gguf(tmp_path / "a.gguf", tiny_metadata(tiny) | counts_by_key, tensors))
    assert model.tensors.keys() == plain.tensors.keys()
    assert model.spec == plain.spec
