"""Where fuzzing starts: small sound files of every kind, and the words that readers look for."""

from __future__ import annotations

import ast
import json
import tempfile
from pathlib import Path

import numpy as np

import twostroke
from fuzz.targets import FOLDER_FILES, SEPARATOR
from support.gguf_writer import I32, U16, Typed, gguf_bytes
from support.safetensors_writer import safetensors_bytes
from support.tiny import Tiny, tiny_metadata, tiny_tensors, vocabulary, write_tiny_folder
from twostroke.models import ARCHITECTURES
from twostroke.quant import FORMATS, QuantTensor
from twostroke.weights.safetensors import read_safetensors

CORPUS = Path(__file__).parent / "corpus"
SMALL = Tiny(num_layers=1, hidden_size=4, ffn_size=4, num_heads=1, num_kv_heads=1, head_dim=4)
NUM_TOKENS = 8
ALIGNMENT = 8
ROOMS = ("weights", "models", "tokenize")


def seeds(target: str) -> dict[str, bytes]:
    """Return the inputs to start from: those written here, and the kept corpus, by name."""
    made = {"gguf": _gguf, "split": _split, "safetensors": _safetensors, "hf_folder": _hf_folder}
    kept = {path.name: path.read_bytes() for path in sorted((CORPUS / target).glob("*"))}
    return {f"seed-{name}": data for name, data in made[target]().items()} | kept


def words() -> list[str]:
    """Return the texts in the readers' sources: keys, families, kinds of rope, and so on."""
    found: dict[str, None] = dict.fromkeys([*ARCHITECTURES, *FORMATS])
    for room in ROOMS:
        for path in sorted(Path(*twostroke.__path__, room).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found[node.value] = None
    short = [text for text in found if 2 < len(text) < 60 and " " not in text and text.isascii()]
    parts = [text for text in short if text[0] in "._"]
    whole = [text for text in short if text[0] not in "._"]
    return [*whole, *(arch + part for arch in ARCHITECTURES for part in parts if part[0] == ".")]


def _gguf() -> dict[str, bytes]:
    found = {
        "model": _model_bytes(_cut(tiny_tensors(SMALL), "token_embd.weight")),
        "empty": gguf_bytes({}, {}),
        "values": gguf_bytes(
            {"a": [[1, 2], ["x", ""]], "b": 0.5, "c": Typed(7, [True, False])}, {}
        ),
    }
    for name, fmt in FORMATS.items():
        values = np.arange(fmt.block_size, dtype=np.float32)[None]
        found[name] = gguf_bytes({}, {"t": QuantTensor.from_floats(values, fmt)})
    return found


def _split() -> dict[str, bytes]:
    tensors = _cut(tiny_tensors(SMALL), "token_embd.weight")
    names = list(tensors)
    parts = []
    for part in range(2):
        keys = {
            "split.no": Typed(U16, part),
            "split.count": Typed(U16, 2),
            "split.tensors.count": Typed(I32, len(names)),
        }
        own = {name: tensors[name] for name in names[part::2]}
        parts.append(_model_bytes(own, keys) if part == 0 else gguf_bytes(keys, own))
    return {"two": SEPARATOR.join(parts)}


def _safetensors() -> dict[str, bytes]:
    found = {}
    for name in ("F32", "F16", "BF16"):
        values = np.arange(8, dtype=np.float32).reshape(2, 4)
        tensors = {key: QuantTensor.from_floats(values, FORMATS[name]) for key in ("a", "b")}
        found[name] = safetensors_bytes(tensors)
    return found


def _hf_folder() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_tiny_folder(Path(scratch), SMALL)
        config = json.loads((folder / "config.json").read_text())
        tensors = dict(read_safetensors(folder / "model.safetensors").tensors)
        few = _cut(tensors, "model.embed_tokens.weight")
    names = list(few)
    owners = {name: ("a", "b")[i % 2] + ".safetensors" for i, name in enumerate(names)}
    files = [
        json.dumps(config | {"vocab_size": NUM_TOKENS}).encode(),
        json.dumps({"weight_map": owners}).encode(),
        *(safetensors_bytes({name: few[name] for name in names[part::2]}) for part in range(2)),
        b'{"eos_token_id": [2, 0]}',
        b'{"chat_template": "x"}',
    ]
    assert len(files) == len(FOLDER_FILES)
    return {"folder": SEPARATOR.join(files)}


def _model_bytes(tensors: dict[str, QuantTensor], more: dict[str, object] | None = None) -> bytes:
    tokens = vocabulary()[0]
    few = [*tokens[:3], "H", "e", "l", "He", "ll"]
    metadata = tiny_metadata(SMALL) | {
        "llama.vocab_size": NUM_TOKENS,
        "tokenizer.ggml.tokens": few,
        "tokenizer.ggml.token_type": Typed(I32, [3, 3, 3, 1, 1, 1, 1, 1]),
        "tokenizer.ggml.merges": ["H e", "l l"],
        "tokenizer.chat_template": "x",
        "general.alignment": ALIGNMENT,
    }
    return gguf_bytes(metadata | (more or {}), tensors, alignment=ALIGNMENT)


def _cut(tensors: dict[str, QuantTensor], table: str) -> dict[str, QuantTensor]:
    """Keep only the first rows of the embedding table, as many as there are tokens."""
    whole = tensors[table]
    few = QuantTensor(whole.format, (NUM_TOKENS, whole.shape[1]), whole.data[:NUM_TOKENS])
    return {name: few if name == table else tensor for name, tensor in tensors.items()}
