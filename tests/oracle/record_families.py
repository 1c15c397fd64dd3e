"""Records transformers' logits for the tiny models of the families named; default: of all.

PYTHONPATH=src:tests .venv-oracle/bin/python tests/oracle/record_families.py [FAMILY...]

With names of families, the recordings of other families stay as they are.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from support.tiny import tiny_of, write_tiny_folder
from support.tiny_families import FAMILIES
from support.transformers_models import logits, text_model

GOLDEN = Path(__file__).parents[1] / "model" / "families" / "golden" / "families.json"
TOKENS = [(7 * i * i + 3 * i) % 285 for i in range(80)]
ROWS = (0, 1, 26, 27, 40, 79)  # within the windows of 27 tokens, at their edge, and beyond
COLUMNS = range(0, 285, 41)


def main() -> None:
    """Write some logits of some rows of each family, or of the families named as arguments."""
    stored = json.loads(GOLDEN.read_bytes())
    names = sys.argv[1:] or FAMILIES
    parts = {
        "made_by": "tests/oracle/record_families.py",
        "transformers": transformers.__version__,
        "tokens": TOKENS,
        "rows": ROWS,
        "columns": list(COLUMNS),
    }
    lines = [f'"{name}": {json.dumps(value)}' for name, value in parts.items()]
    for family in FAMILIES:
        rows = _recorded(family) if family in names else stored[family]
        lines.append(f'"{family}": {json.dumps(rows)}')
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="ascii")


def _model(folder: Path) -> Any:
    """Return transformers' model with the weights of a folder."""
    config = json.loads((folder / "config.json").read_bytes())
    if config["model_type"] != "muse_glimmer_text":
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    model = text_model(config)
    stored = load_file(folder / "model.safetensors")
    weights = {name.replace("model.", "model.language_model."): w for name, w in stored.items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all("vision" in name or name == "lm_head.weight" for name in missing)
    return model


def _recorded(family: str) -> list[list[float]]:
    with tempfile.TemporaryDirectory() as folder_name:
        folder = write_tiny_folder(Path(folder_name) / "tiny", tiny_of(family))
        model = _model(folder)
        every = logits(model, TOKENS)
    return [[round(float(every[row, column]), 5) for column in COLUMNS] for row in ROWS]


if __name__ == "__main__":
    main()
