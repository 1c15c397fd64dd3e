"""Compares the logits of each family's tiny GGUF model with llama.cpp's.

`make long SUITE=llama-oracle ARGS="qwen3.5 llama"`; without names, all families.

Both compute in float32, with keys and values in float32. A family that llama.cpp does not load is
listed with llama.cpp's reason and does not count. Models with recurrent layers are compared after
4,000 tokens, too, where errors would have added up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from benchmarks.peers.environments import python_of
from support.tiny import SPECIAL_TOKENS, tiny_of, write_tiny_gguf
from support.tiny_families import FAMILIES
from support.tiny_recurrent import delta_metadata
from twostroke.backends.reference import ReferenceBackend
from twostroke.core.errors import TwostrokeError
from twostroke.model.families import build_program
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_TEXT = Path(__file__).parents[2] / "ARCHITECTURE.md"
_SHORT_LENGTHS = (5, 17, 64, 200)  # within the context of each tiny model
_LONG_LENGTHS = (513, 1000, 2048, 4000)
_LONG_CONTEXT = 8192
_DRAWN_BYTE = ord("A")
MAX_KL = 5e-6  # log-probabilities are sent as text of float32
# Families whose tiny models llama.cpp only reads with an output matrix of their own.
_UNTIED = frozenset({"olmo2", "olmo3", "gpt-oss", "minimax-m2", "mellum", "muse-glimmer"})
# Metadata of published files that this product does not need.
_METADATA: dict[str, dict[str, Any]] = {
    "ernie4.5-experts": {"expert_shared_feed_forward_length": 256},
    "deepseek-v2": {"attention.q_lora_rank": 0},
}
# Where llama.cpp computes something else on purpose: from this many tokens on, and why.
KNOWN_DIFFERENCES = {
    "mistral": (17, "llama.cpp reads no sliding window in the architecture llama"),
    "phi3": (17, "llama.cpp has turned the sliding window of Phi-3 off"),
    "mellum": (0, "llama.cpp rotates layers with a window by the base of the others"),
    "gpt-oss": (0, "llama.cpp rounds the ends of YaRN's blend to whole pairs"),
    "exaone4": (0, "llama.cpp knows layers without RoPE only in models of 64 layers"),
}


class RefusedError(Exception):
    """llama.cpp does not load the model."""


def main() -> int:
    """Compare the families, and print a line for each; return 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--environment", type=Path, help="a virtual environment with xllamacpp")
    options = parser.parse_args()
    python = python_of("ggml", options.environment)
    num_wrong = num_refused = 0
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            try:
                differences = compare(family, Path(folder), python)
            except RefusedError as error:
                num_refused += 1
                print(f"{family:24} refused by llama.cpp: {error}")
                continue
            except TwostrokeError as error:
                num_wrong += 1
                print(f"{family:24} refused here: {error}")
                continue
        longest, reason = KNOWN_DIFFERENCES.get(family, (max(differences), ""))
        compared = [value for length, value in differences.items() if length <= longest]
        is_wrong = not max(compared, default=0.0) <= MAX_KL
        num_wrong += is_wrong
        values = ", ".join(f"{length}: {value:.1e}" for length, value in differences.items())
        verdict = "DIFFERS" if is_wrong else "same"
        if reason:
            verdict += f" up to {longest} tokens ({reason})"
        print(f"{family:24} {verdict}; KL by tokens: {values}", flush=True)
    print(
        f"{len(options.families)} families, {num_wrong} differ, {num_refused} refused by llama.cpp"
    )
    return int(num_wrong > 0)


def compare(family: str, folder: Path, python: Path) -> dict[int, float]:
    """Return the KL divergence from llama.cpp's distribution after prompts of several lengths."""
    path, lengths = write_model(family, folder)
    loaded = load_path(path)
    program = build_program(loaded.spec)
    text = (_TEXT.read_bytes() * 2)[: lengths[-1]]
    tokens = [byte + len(SPECIAL_TOKENS) for byte in text]
    prompts = [tokens[:length] for length in lengths]
    theirs = llama_log_probabilities(
        path, prompts, program.vocab_size, program.context_length, python
    )
    backend = ReferenceBackend(program, loaded.tensors, num_pages=1, page_size=16)
    ours = backend.score(tokens)
    return {
        length: _divergence(ours[length - 1].astype(np.float64), log_probabilities)
        for length, log_probabilities in zip(lengths, theirs, strict=True)
    }


def write_model(family: str, folder: Path) -> tuple[Path, Sequence[int]]:
    """Write a family's tiny model; return its path, and the prompt lengths to compare.

    llama.cpp demands that value heads of the delta rule are as wide as key heads.
    """
    variant, lengths = FAMILIES[family], _SHORT_LENGTHS
    sizes: dict[str, Any] = {"tied": False} if family in _UNTIED else {}
    if variant.delta is not None:
        delta = replace(variant.delta, value_dim=variant.delta.key_dim)
        metadata = {**variant.metadata, **delta_metadata(delta)}
        FAMILIES[family] = replace(variant, delta=delta, metadata=metadata)
    if variant.attends is not None:
        sizes["context_length"] = _LONG_CONTEXT
        lengths = (*_SHORT_LENGTHS, *_LONG_LENGTHS)
    added = {
        f"{variant.architecture}.{key}": value for key, value in _METADATA.get(family, {}).items()
    }
    path = folder / f"{family}.gguf"
    return write_tiny_gguf(path, tiny_of(family, **sizes), added), lengths


def llama_log_probabilities(
    path: Path,
    prompts: Sequence[Sequence[int]],
    vocab_size: int,
    context_length: int,
    python: Path,
) -> list[NDArray[np.float64]]:
    """Return llama.cpp's log-probabilities of all tokens after each prompt.

    Raises:
        RefusedError: llama.cpp does not load the model.
    """
    question, answer = path.with_suffix(".question"), path.with_suffix(".answer")
    content: dict[str, Any] = {
        "model": str(path),
        "prompts": prompts,
        "vocab_size": vocab_size,
        "context_length": context_length,
        "drawn_token": _DRAWN_BYTE + len(SPECIAL_TOKENS),
    }
    question.write_text(json.dumps(content))
    script = Path(__file__).with_name("llama_logits.py")
    command = [str(python), str(script), str(question), str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RefusedError(_reason(done.stdout + done.stderr))
    entries = json.loads(answer.read_text())
    return [np.array([entry[str(token)] for token in range(vocab_size)]) for entry in entries]


def _reason(log: str) -> str:
    errors = [line.partition(" E ")[2] for line in log.splitlines() if " E " in line]
    return (errors or log.splitlines() or ["it ended without a word"])[0][-200:]


def _divergence(logits: NDArray[np.float64], theirs: NDArray[np.float64]) -> float:
    """Return the KL divergence of llama.cpp's log-probabilities `theirs` from our logits."""
    logits = logits - logits.max()
    ours = logits - np.log(np.exp(logits).sum())
    return float(np.sum(np.exp(ours) * (ours - theirs)))


if __name__ == "__main__":
    sys.exit(main())
