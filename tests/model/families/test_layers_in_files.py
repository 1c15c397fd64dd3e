"""The layers of a file: layers with shared keys and values, and layers that the model lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.gguf_writer import write_gguf
from support.tiny import tiny_config, tiny_metadata, tiny_of, tiny_tensors, tiny_weights
from twostroke.core.errors import ModelFormatError
from twostroke.model.families import ARCHITECTURES
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_path
from twostroke.model.weights.hf_model import hf_fields, hf_spec
from twostroke.model.weights.tensor_names import canonical_name, published_name

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4"])
def test_keys_of_layers_that_are_not_there_are_refused(tmp_path: Path, family: str) -> None:
    tiny = tiny_of(family)
    extra_tensors = {
        "blk.9.attn_k.weight": QuantTensor.from_floats(np.ones((4, 4), np.float32), FORMATS["F32"])
    }
    path = write_gguf(tmp_path / "a.gguf", tiny_metadata(tiny), tiny_tensors(tiny) | extra_tensors)
    with pytest.raises(
        ModelFormatError, match=r"has tensor 'blk\.9\.attn_k\.weight', which the family"
    ):
        load_path(path)


def test_layers_with_shared_keys_have_none_whatever_the_file_has(tmp_path: Path) -> None:
    tiny = tiny_of("gemma4")
    extra_tensors = {
        "blk.6.attn_k.weight": QuantTensor.from_floats(np.ones((4, 4), np.float32), FORMATS["F32"])
    }
    path = write_gguf(tmp_path / "a.gguf", tiny_metadata(tiny), tiny_tensors(tiny) | extra_tensors)
    assert not extra_tensors.keys() & load_path(path).tensors.keys()


def test_names_in_folders_are_those_that_were_read() -> None:
    for family in ("gemma4", "gemma4-large"):
        for name in tiny_weights(tiny_of(family)):
            theirs = published_name(name, ARCHITECTURES["gemma4"].layer_names)
            assert canonical_name(theirs, ARCHITECTURES["gemma4"].layer_names) == name
    assert canonical_name("model.vision_embedder.patch_dense.weight", {}) is None


def test_ropes_of_null_are_those_of_the_family() -> None:
    config = tiny_config(tiny_of("gemma4"))
    specs = [
        hf_spec(hf_fields("config.json", variant), "a")
        for variant in (config, config | {"rope_parameters": None})
    ]
    assert specs[0] == specs[1]
