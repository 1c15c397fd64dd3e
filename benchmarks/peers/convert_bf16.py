"""Convert a GGUF model to bf16 safetensors, for peers that read nothing else.

Run by a Python with transformers and gguf: `convert_bf16.py MODEL.gguf FOLDER`. The values are
the dequantized values of the file, rounded to bf16.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers


def main() -> None:
    """Convert one file."""
    source, target = map(Path, sys.argv[1:3])
    options = {}
    if hasattr(transformers, "GgufConfig"):  # versions that would leave weights packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, **options
    )
    model.config.quantization_config = None
    model.save_pretrained(target, safe_serialization=True)


if __name__ == "__main__":
    main()
