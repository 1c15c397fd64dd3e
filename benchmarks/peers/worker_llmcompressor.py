"""Quantize a Hugging Face folder with LLM Compressor or AutoRound, in their environment.

`python worker_llmcompressor.py METHOD FOLDER PIECES OUT GROUP`: METHOD is gptq, awq or
autoround, PIECES a JSON file of token ids. A number after a hyphen in METHOD is AutoRound's
number of iterations.
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path

from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache

IntermediatesCache.pin_memory = lambda *_: None  # AWQ pins memory, which needs a GPU
_LENGTH = 512  # tokens of AutoRound's sequences, which must be equally long


def main(method: str, folder: str, pieces: str, out: str, group: str) -> None:
    """Write the rounded model to `out`."""
    tokens = json.loads(Path(pieces).read_text())
    name, _, iterations = method.partition("-")
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": name != "awq",  # AWQ's usual scheme has zero points
        "strategy": "group",
        "group_size": int(group),
    }
    kwargs = {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    if name == "gptq":
        recipe = [GPTQModifier(**kwargs)]
    elif name == "awq":
        recipe = [AWQModifier(), QuantizationModifier(**kwargs)]
    else:
        every = list(chain.from_iterable(tokens))
        starts = range(0, len(every) - _LENGTH + 1, _LENGTH)
        tokens = [every[start : start + _LENGTH] for start in starts]
        tuned = {"iters": int(iterations or 200), "enable_torch_compile": False, "batch_size": 4}
        recipe = [AutoRoundModifier(**kwargs, **tuned)]
    columns = {"input_ids": tokens, "attention_mask": [[1] * len(piece) for piece in tokens]}
    oneshot(
        model=folder,
        dataset=Dataset.from_dict(columns),
        recipe=recipe,
        num_calibration_samples=len(tokens),
        shuffle_calibration_samples=False,
        max_seq_length=max(map(len, tokens)),
        output_dir=out,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
