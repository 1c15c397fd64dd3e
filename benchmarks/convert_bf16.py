"""Writes a GGUF model as bf16 safetensors, for peers that read nothing else.

Run by a Python with transformers and gguf: `convert_bf16.py MODEL.gguf FOLDER`. The values are
those of the quantized file, rounded to bf16.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Convert one file."""
    source, target = map(Path, sys.argv[1:3])
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16
    )
    model.save_pretrained(target, safe_serialization=True)


if __name__ == "__main__":
    main()
