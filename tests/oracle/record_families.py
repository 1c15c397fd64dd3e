"""Records transformers' logits for the tiny model of each family.

PYTHONPATH=src:tests .venv-oracle/bin/python tests/oracle/record_families.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from support.tiny import tiny_of, write_tiny_folder
from support.tiny_families import FAMILIES
from support.transformers_models import logits

GOLDEN = Path(__file__).parents[1] / "models" / "golden" / "families.json"
TOKENS = [(7 * i * i + 3 * i) % 285 for i in range(80)]
ROWS = (0, 1, 26, 27, 40, 79)  # within the windows of 27 tokens, at their edge, and beyond
COLUMNS = range(0, 285, 41)


def main() -> None:
    """Write some logits of some rows of each family."""
    parts = {
        "made_by": "tests/oracle/record_families.py",
        "transformers": transformers.__version__,
        "tokens": TOKENS,
        "rows": ROWS,
        "columns": list(COLUMNS),
    }
    lines = [f'"{name}": {json.dumps(value)}' for name, value in parts.items()]
    lines += [f'"{family}": {json.dumps(_recorded(family))}' for family in FAMILIES]
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="ascii")


def _recorded(family: str) -> list[list[float]]:
    with tempfile.TemporaryDirectory() as place:
        folder = write_tiny_folder(Path(place) / "tiny", tiny_of(family))
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        every = logits(model, TOKENS)
    return [[round(float(every[row, column]), 5) for column in COLUMNS] for row in ROWS]


if __name__ == "__main__":
    main()
