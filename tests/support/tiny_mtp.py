"""Tiny random models with a layer for multi-token prediction (MTP), in both kinds of files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from support.gguf_writer import write_gguf
from support.random_blocks import in_format
from support.safetensors_writer import write_safetensors
from support.tiny import (
    tiny_metadata,
    tiny_of,
    tiny_tensors,
    tiny_weights,
    write_tiny_folder,
)
from support.tiny_weights import folder_weights, gguf_weights
from twostroke.model.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from support.tiny import Tiny

    Weights = dict[str, np.ndarray]

MTP_FAMILIES = (
    *("qwen3.5", "qwen3.5-moe", "qwen3-next", "glm4", "glm4-air", "deepseek-v3", "glm4-lite"),
)
_QWEN_NAMES = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head_norm": "norm",
}
_FOLDER_NAMES = {"shared_head_norm": "shared_head.norm"}


def own_weights(tiny: Tiny) -> Weights:
    """Return the weights that only an MTP layer has, by their GGUF names without the layer."""
    rng = np.random.default_rng(7)
    hidden = tiny.hidden_size
    norms = {
        name: (1 + 0.2 * rng.standard_normal(hidden)).astype(np.float32)
        for name in ("enorm", "hnorm", "shared_head_norm")
    }
    projection = rng.standard_normal((hidden, 2 * hidden)) * (2 * hidden) ** -0.5
    return {"eh_proj": projection.astype(np.float32), **norms}


def layer_source(tiny: Tiny) -> tuple[Tiny, int]:
    """Return a larger tiny model, one of whose layers becomes the MTP layer, and its number.

    The layer has attention, and experts if the model has any.
    """
    number = tiny.num_layers
    while tiny.variant.delta is not None and not tiny.variant.delta.attends(number):
        number += 1
    return replace(tiny, num_layers=number + 1, seed=11), number


def gguf_layer(tiny: Tiny) -> dict[str, QuantTensor]:
    """Return the tensors of the MTP layer as a GGUF file has them."""
    source, number = layer_source(tiny)
    new, old = f"blk.{tiny.num_layers}.", f"blk.{number}."
    layer = gguf_weights(source, tiny_weights(source))
    weights = {n.replace(old, new): values for n, values in layer.items() if n.startswith(old)}
    weights |= {f"{new}nextn.{name}.weight": values for name, values in own_weights(tiny).items()}
    return {
        name: in_format(values, tiny.fmt if values.ndim > 1 else "F32")
        for name, values in weights.items()
    }


def mtp_metadata(tiny: Tiny) -> dict[str, Any]:
    """Return the metadata of a GGUF file with one MTP layer, where they differ."""
    counts = {"block_count": tiny.num_layers + 1, "nextn_predict_layers": 1}
    return {f"{tiny.variant.architecture}.{key}": count for key, count in counts.items()}


def write_mtp_gguf(
    path: Path,
    family: str,
    changes: Mapping[str, QuantTensor | None] | None = None,
    **sizes: Any,
) -> Path:
    """Write a tiny model with an MTP layer as a GGUF file; return its path.

    `changes` are tensors to replace, or to leave out if they are None.
    """
    tiny = tiny_of(family, **sizes)
    tensors: dict[str, QuantTensor | None] = {**tiny_tensors(tiny), **gguf_layer(tiny)}
    tensors |= dict(changes or {})
    stored = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return write_gguf(path, tiny_metadata(tiny) | mtp_metadata(tiny), stored)


def write_mtp_folder(
    folder: Path, family: str, changes: Mapping[str, QuantTensor | None] | None = None
) -> Path:
    """Write a tiny model with an MTP layer as a Hugging Face folder; return its path.

    `changes` are as for `write_mtp_gguf`.
    """
    tiny = tiny_of(family)
    write_tiny_folder(folder, tiny)
    source, number = layer_source(tiny)
    is_qwen = tiny.variant.delta is not None
    old = f"model.layers.{number}."
    new = "mtp.layers.0." if is_qwen else f"model.layers.{tiny.num_layers}."
    layer = folder_weights(source, tiny_weights(source))
    weights = {n.replace(old, new): values for n, values in layer.items() if n.startswith(old)}
    for name, values in own_weights(tiny).items():
        offset = np.float32(0 if name == "eh_proj" else tiny.variant.norm_offset)
        published = _QWEN_NAMES[name] if is_qwen else _FOLDER_NAMES.get(name, name)
        prefix = "mtp." if is_qwen else new
        weights[f"{prefix}{published}.weight"] = values - offset
    weights |= folder_weights(tiny, tiny_weights(tiny))
    tensors: dict[str, QuantTensor | None] = {
        name: QuantTensor.from_floats(values, FORMATS["F32"]) for name, values in weights.items()
    }
    tensors |= dict(changes or {})
    stored = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_safetensors(folder / "model.safetensors", stored)
    config = folder / "config.json"
    values = json.loads(config.read_text())
    values["mtp_num_hidden_layers" if is_qwen else "num_nextn_predict_layers"] = 1
    config.write_text(json.dumps(values))
    return folder
