"""Trains small models on text, and compares their logits with transformers' at 4,096 tokens.

PYTHONPATH=src:tests .venv-oracle/bin/python tests/oracle/train_recurrent.py \\
    [FAMILY...] [--minutes 3]

Random weights hide errors of recurrent layers: their decays forget all but a few tokens. Training
gives decays, gates and strengths the values of a model that remembers, and attention sinks a share
of the softmax (gpt-oss). At this length, scaled RoPEs and attention temperatures matter, too. A
model is read twice, as the folder that transformers writes and as a GGUF file. The reference
backend must agree with transformers in float32, and the cpu backend nearly so. Experts in MXFP4, as
published, are compared on both backends.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.cpu import cpu_backend
from support.gguf_writer import write_gguf
from support.tiny import SPECIAL_TOKENS, Tiny, tiny_config, tiny_metadata, tiny_of, tokenizer_json
from support.tiny_weights import gguf_weights
from support.transformers_models import logits
from twostroke.backends.cpu.library import choose_level
from twostroke.backends.reference import ReferenceBackend
from twostroke.lab.measure.divergence import compare
from twostroke.model.families import build_program
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from twostroke.model.weights import LoadedModel

ROOT = Path(__file__).parents[2]
HELD_OUT = ROOT / "ARCHITECTURE.md"
NUM_TOKENS = 4096  # that are compared
MAX_MEAN_KL = 1e-6
MAX_CPU_KL = 1e-3
TRAINED_TOKENS = 512  # of a sequence
BATCH = 4
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 20
JOINED = {
    "shortconv.in_proj": ("shortconv.in_b", "shortconv.in_c", "shortconv.in_v"),
    "ssm_in": ("ssm_in_z", "ssm_in_x", "ssm_in_dt"),
}
# Sizes of each family's model, and changed values of its config.json.
SIZES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "qwen3.5": ({"ffn_size": 384}, {}),
    "gpt-oss": ({}, {}),
    "kimi-linear": ({}, {}),
    "lfm2": ({}, {}),
    "lfm2-moe": ({}, {}),
    "granite-hybrid": ({}, {"mamba_expand": 1}),
    "granite-hybrid-experts": ({}, {"mamba_expand": 1}),
    "nemotron-h": ({}, {}),
    "nemotron-h-experts": ({}, {}),
    "granite": ({}, {}),
    "smollm3": ({}, {}),
    "ministral3": ({}, {}),
    "minimax-m2": ({}, {}),
}
# The ends of the names of weights that training must move.
WATCHED = ("A_log", "dt_bias", "sinks", "conv.conv.weight")


def main() -> int:
    """Train, compare, and print the figures; return 1 if a difference is too large."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=[*SIZES], help="default: all")
    parser.add_argument("--minutes", type=float, default=3.0, help="of training")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    are_wrong = [check(family, options.minutes * 60) for family in options.families]
    return int(any(are_wrong))


def check(family: str, seconds: float) -> bool:
    """Train a model of a family, compare it, and return whether a difference is too large."""
    torch.manual_seed(0)
    sizes, changes = SIZES[family]
    tiny = tiny_of(family, hidden_size=128, context_length=8192, **sizes)
    config = AutoConfig.for_model(**tiny_config(tiny) | changes, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    num_weights = sum(weight.numel() for weight in model.parameters())
    print(f"{family}: {num_weights / 1e6:.1f} million weights")
    train(model, seconds)
    model.eval()
    tokens = byte_tokens(HELD_OUT.read_bytes())[:NUM_TOKENS]
    theirs = logits(model, tokens)
    is_wrong = False
    with tempfile.TemporaryDirectory() as folder_name:
        for form, loaded in read_back(model, tiny, Path(folder_name)):
            program = build_program(loaded.spec)
            backend = ReferenceBackend(program, loaded.tensors, num_pages=1, page_size=16)
            expected = theirs
            if "MXFP4" in form:  # transformers would not read the GGUF file
                expected = backend.score(tokens)
            else:
                is_wrong |= differs(f"{form}, reference", theirs, backend.score(tokens), tokens)
            level = choose_level(None).level
            with cpu_backend((program, loaded.tensors), level, 1, num_states=2) as native:
                ours = native.score(tokens)
            is_wrong |= differs(f"{form}, cpu", expected, ours, tokens, MAX_CPU_KL)
    return is_wrong


def differs(
    form: str,
    theirs: np.ndarray,
    ours: np.ndarray,
    tokens: list[int],
    max_mean_kl: float = MAX_MEAN_KL,
) -> bool:
    """Print how far two models' logits are apart; return whether it is too far."""
    result = compare([(theirs, ours, tokens)])
    print(
        f"{form}: mean KL {result.mean_kl:.2e} at {len(tokens)} tokens, "
        f"same top token {result.top1_agreement:.2%}",
        flush=True,
    )
    return not result.mean_kl <= max_mean_kl


def train(model: Any, seconds: float) -> None:
    """Train a model on the sources and documents of this repository for some seconds."""
    watched = [weight for name, weight in model.named_parameters() if name.endswith(WATCHED)]
    initial = [weight.detach().clone() for weight in watched]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    start_s, losses = time.monotonic(), []
    for batch in batches():
        share = (time.monotonic() - start_s) / seconds
        if share >= 1:
            break
        rate = LEARNING_RATE * min((len(losses) + 1) / WARM_UP_STEPS, 1.05 - share)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    changes = [
        (weight.detach() - before).abs().max().item()
        for weight, before in zip(watched, initial, strict=True)
    ]
    last = losses[-10:]
    print(
        f"{len(losses)} steps of {BATCH * TRAINED_TOKENS} tokens, loss {losses[0]:.2f} to "
        f"{sum(last) / len(last):.2f} per byte"
        + (f"; decays or sinks moved by up to {max(changes):.2f}" if changes else ""),
        flush=True,
    )


def batches() -> Iterator[torch.Tensor]:
    """Yield random sequences of the repository's texts, without the held-out text."""
    files = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")])
    text = b"\n".join(path.read_bytes() for path in files)
    rng = random.Random(0)
    while True:
        starts = [rng.randrange(len(text) - TRAINED_TOKENS) for _ in range(BATCH)]
        yield torch.tensor([byte_tokens(text[at : at + TRAINED_TOKENS]) for at in starts])


def byte_tokens(text: bytes) -> list[int]:
    """Return the token of each byte, in the vocabulary of the tiny models."""
    return [byte + len(SPECIAL_TOKENS) for byte in text]


def read_back(model: Any, tiny: Tiny, work_folder: Path) -> Iterator[tuple[str, LoadedModel]]:
    """Write a model as a folder and as a GGUF file, and yield the name of each form and the model.

    The GGUF file is as llama.cpp's converter writes it: Qwen's has one added to its norms, tiled
    value heads, and negative decay rates. A model with experts and biases is also written with
    experts in MXFP4.
    """
    model.save_pretrained(work_folder / "model")
    (work_folder / "model" / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    folder = load_path(work_folder / "model")
    yield "folder", folder
    weights = {
        name: tensor.dequantize() + np.float32(tiny.variant.norm_offset * _has_one_added(name))
        for name, tensor in joined_projections(folder.tensors).items()
    }
    tensors = {
        name: QuantTensor.from_floats(values, FORMATS["F32"])
        for name, values in gguf_weights(tiny, weights).items()
    }
    yield "GGUF", load_path(write_gguf(work_folder / "model.gguf", tiny_metadata(tiny), tensors))
    if tiny.variant.has_expert_biases:
        for name in [name for name in tensors if name.endswith("_exps.weight")]:
            values = tensors[name].dequantize()
            tensors[name] = QuantTensor.from_floats(values, FORMATS["MXFP4"])
        path = write_gguf(work_folder / "mxfp4.gguf", tiny_metadata(tiny), tensors)
        yield "GGUF in MXFP4", load_path(path)


def joined_projections(tensors: Mapping[str, QuantTensor]) -> dict[str, QuantTensor]:
    """Return a model's weights as files have them.

    Projections of short convolutions and of Mamba-2 are joined, and the convolution of Kimi Linear
    is separate for queries, keys and values.
    """
    joined = dict(tensors)
    for name, tensor in tensors.items():
        if (
            name.endswith(".ssm_conv1d.weight")
            and f"{name.split('.ssm_')[0]}.ssm_f_a.weight" in tensors
        ):
            kernels = np.split(joined.pop(name).dequantize(), 3)
            for part, kernel in zip("qkv", kernels, strict=True):
                own_name = name.replace("conv1d", f"conv1d_{part}")
                joined[own_name] = QuantTensor.from_floats(kernel, tensor.format)
        for stack, parts in JOINED.items():
            if name.endswith(f"{parts[0]}.weight"):
                prefix = name.removesuffix(f"{parts[0]}.weight")
                rows = [joined.pop(f"{prefix}{part}.weight").dequantize() for part in parts]
                stacked = QuantTensor.from_floats(np.concatenate(rows), FORMATS["F32"])
                joined[f"{prefix}{stack}.weight"] = stacked
    return joined


def _has_one_added(name: str) -> bool:
    """Return whether Qwen's GGUF files have one added to a weight.

    They have it added to norms, but not to the delta rule's.
    """
    return name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")


if __name__ == "__main__":
    sys.exit(main())
