"""Trains a small Qwen 3.5 and its layer for multi-token prediction (MTP), to measure drafts.

PYTHONPATH=src:tests .venv-oracle/bin/python tests/oracle/train_mtp.py MODEL.gguf \\
    [--minutes 10] [--mtp-minutes 5]

The model reads bytes, and learns the sources of this repository without its tests. Then the MTP
layer learns to continue from the model's hidden states, and from its own. Both are written to a
GGUF file, in which the model has so many further layers and feed-forward values, all zeros, that
its steps take as long as those of a model of 0.3 billion weights. They change no answer. The MTP
layer is as wide. Measure with

    make bench WHAT=speculation ARGS="--model MODEL.gguf --speculate mtp --tasks code --streams 1 \\
        --accept-quality --no-acceptance"
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from msgspec.structs import replace
from torch.nn.functional import cross_entropy, rms_norm
from train_recurrent import batches, train
from transformers import AutoConfig, AutoModelForCausalLM

from support.gguf_writer import write_gguf
from support.random_blocks import in_format
from support.tiny import Tiny, tiny_config, tiny_metadata, tiny_of
from support.tiny_mtp import mtp_metadata
from support.tiny_weights import gguf_weights, random_weights
from twostroke.model.families import ARCHITECTURES
from twostroke.model.weights.tensor_names import canonical_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

NUM_LAYERS = 23  # in the file; an even number with the MTP layer, which then has attention
FFN_SIZE = 24576  # in the file
LEARNING_RATE = 3e-3
OWN_WEIGHT = 0.5  # of the loss after the layer's own hidden states
_NOT_QUANTIZED = (".ssm_conv1d.weight", ".ssm_norm.weight", ".ssm_a")


class MtpLayer(torch.nn.Module):
    """A layer for multi-token prediction: two norms, a projection, and a decoder layer.

    The decoder layer is transformers' model with one layer, whose last norm is the MTP layer's.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        single = AutoConfig.for_model(**{**config, **one_layer}, attn_implementation="eager")
        self.decoder = AutoModelForCausalLM.from_config(single, dtype=torch.float32).model
        width, self.epsilon = config["hidden_size"], config["rms_norm_eps"]
        self.enorm = torch.nn.Parameter(torch.ones(width))
        self.hnorm = torch.nn.Parameter(torch.ones(width))
        self.projection = torch.nn.Linear(2 * width, width, bias=False)

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Return hidden states (batch, tokens, width) after the last norm."""
        pairs = ((embeddings, self.enorm), (hidden, self.hnorm))
        both = [rms_norm(x, x.shape[-1:], weight, self.epsilon) for x, weight in pairs]
        inputs = self.projection(torch.cat(both, dim=-1))
        states: Tensor = self.decoder(inputs_embeds=inputs, use_cache=False).last_hidden_state
        return states


def main() -> None:
    """Train the model and its MTP layer, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the model's training")
    parser.add_argument("--mtp-minutes", type=float, default=5.0, help="of the layer's training")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    tiny = tiny_of("qwen3.5", hidden_size=128, ffn_size=384, context_length=8192)
    config = tiny_config(tiny)
    theirs = AutoConfig.for_model(**config, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(theirs, dtype=torch.float32)
    train(model, options.minutes * 60)
    model.eval().requires_grad_(False)
    layer = MtpLayer(config)
    train_layer(model, layer, options.mtp_minutes * 60)
    write_model(options.path, tiny, model, layer)


def train_layer(model: Any, layer: MtpLayer, seconds: float) -> None:
    """Train an MTP layer on the hidden states of a model for some seconds."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    start_s, rights = time.monotonic(), list[list[float]]()
    for tokens in batches():
        share = (time.monotonic() - start_s) / seconds
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((len(rights) + 1) / 20, 1.05 - share)
        with torch.no_grad():
            hidden = model.model(tokens, use_cache=False).last_hidden_state
            embeddings = model.model.embed_tokens(tokens)
        losses, right = [], []
        for depth in (1, 2):
            hidden = layer(embeddings[:, depth:], hidden[:, :-1])
            logits, goals = model.lm_head(hidden[:, :-1]), tokens[:, depth + 1 :]
            losses.append(cross_entropy(logits.flatten(0, 1), goals.flatten()))
            right.append((logits.argmax(-1) == goals).float().mean().item())
        optimizer.zero_grad()
        (losses[0] + OWN_WEIGHT * losses[1]).backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        rights.append(right)
    first, second = np.mean(rights[-10:], axis=0)
    print(f"MTP: {len(rights)} steps; of the text's next bytes {first:.1%} and {second:.1%} right")


def write_model(path: Path, tiny: Tiny, model: Any, layer: MtpLayer) -> None:
    """Write a model and its MTP layer to a GGUF file, with further layers of zeros."""
    wide = replace(tiny, num_layers=NUM_LAYERS + 1, ffn_size=FFN_SIZE)
    trained = canonical_weights(model.state_dict())
    mtp = canonical_weights({f"model.{k}": v for k, v in layer.decoder.state_dict().items()})
    new = f"blk.{NUM_LAYERS}."
    trained |= {
        name.replace("blk.0.", new): w for name, w in mtp.items() if name.startswith("blk.0.")
    }
    weights = random_weights(wide, len(trained["token_embd.weight"]))
    for name, values in weights.items():
        number = int(name.split(".")[1]) if name.startswith("blk.") else 0
        is_norm = values.ndim == 1
        if not is_norm and tiny.num_layers <= number < NUM_LAYERS:
            weights[name] = np.zeros_like(values)
        elif name in trained:
            weights[name] = padded(trained[name], values.shape)
    stored = gguf_weights(wide, weights)
    own = {
        "eh_proj": layer.projection.weight,
        "enorm": layer.enorm,
        "hnorm": layer.hnorm,
        "shared_head_norm": layer.decoder.norm.weight + 1,
    }
    for name, parameter in own.items():
        stored[f"{new}nextn.{name}.weight"] = parameter.detach().numpy()
    tensors = {
        name: in_format(
            values, "F32" if values.ndim == 1 or name.endswith(_NOT_QUANTIZED) else "Q8_0"
        )
        for name, values in stored.items()
    }
    in_file = replace(tiny, num_layers=NUM_LAYERS, ffn_size=FFN_SIZE)
    write_gguf(path, tiny_metadata(in_file) | mtp_metadata(in_file), tensors)
    print(f"{path}: {path.stat().st_size / 1e6:,.0f} MB")


def canonical_weights(state: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return the weights of transformers' model by canonical name, as in a GGUF file.

    Queries and gates are separate here; norms have one added, and decays are negative.
    """
    names = ARCHITECTURES["qwen35"].layer_names
    weights: dict[str, np.ndarray] = {}
    for published, tensor in state.items():
        name, values = canonical_name(published, names), tensor.detach().numpy()
        assert name is not None
        if name.endswith("attn_q.weight"):
            heads = values.reshape(-1, 2, 32, values.shape[1])  # queries and gate of each head
            weights[name] = heads[:, 0].reshape(-1, values.shape[1])
            name, values = name.replace("attn_q", "attn_gate"), heads[:, 1]
            values = values.reshape(-1, values.shape[-1])
        elif name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
            values = values + 1
        elif name.endswith("ssm_a"):
            values = -np.exp(values)
        elif name.endswith("ssm_conv1d.weight"):
            values = values[:, 0]
        weights[name] = values.astype(np.float32)
    return weights


def padded(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return values with zeros after the last of each dimension."""
    ends = [(0, size - own) for size, own in zip(shape, values.shape, strict=True)]
    return np.pad(values, ends)


if __name__ == "__main__":
    main()
