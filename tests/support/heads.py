"""Random heads for tiny models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.model.families.heads import TABLE, heads_for
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import HeadsFacts, load_path, target_identity
from twostroke.model.weights.heads import SURENESS_KINDS, save_heads, stored_shapes

if TYPE_CHECKING:
    from pathlib import Path


def write_random_heads(
    folder: Path, model: Path, kind: str, *, depth: int = 4, window: int = 32, seed: int = 0
) -> Path:
    """Write random, untrained heads for the model of a file; return their folder."""
    loaded = load_path(model)
    vocab_size = loaded.spec.vocab_size
    rng = np.random.default_rng(seed)
    token_ids = sorted(int(i) for i in rng.choice(vocab_size, size=96, replace=False))
    spec = heads_for(
        loaded.spec, kind, num_tokens=len(token_ids), depth=depth, ffn_size=64, window=window
    )
    table = loaded.tensors[TABLE].dequantize()
    tensors = {}
    for name, shape in stored_shapes(spec).items():
        values = rng.standard_normal(shape) / np.sqrt(shape[-1])
        if len(shape) == 1:
            values = np.ones(shape)
        elif name == "output.weight":
            values = table[token_ids]
        fmt = FORMATS["F32" if len(shape) == 1 else "F16"]
        tensors[name] = QuantTensor.from_floats(values.astype(np.float32), fmt)
    facts = HeadsFacts.of(
        spec,
        target_id=target_identity(loaded.tensors),
        token_ids=tuple(token_ids),
        accepted=(0.5,) * depth,
        right_if_sure=tuple((kind + 0.5) / SURENESS_KINDS for kind in range(SURENESS_KINDS)),
    )
    save_heads(folder, facts, tensors)
    return folder
