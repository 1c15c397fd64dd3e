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
from support.random_blocks import in_format
from support.safetensors_writer import safetensors_bytes
from support.tiny import (
    SPECIAL_TOKENS,
    Tiny,
    tiny_metadata,
    tiny_tensors,
    tokenizer_json,
    write_tiny_folder,
)
from support.tiny_families import FAMILIES
from twostroke.model.families import ARCHITECTURES
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights.safetensors import read_safetensors

CORPUS = Path(__file__).parent / "corpus"
SIZES = {"num_layers": 1, "hidden_size": 2, "ffn_size": 2, "num_heads": 1, "num_kv_heads": 1}
EXPERT_SIZES = (
    *("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"),
)
NUM_TOKENS = 8
ALIGNMENT = 8
ROOMS = ("model/weights", "model/families", "model/tokenizer")


def seeds(target: str) -> dict[str, bytes]:
    """Return the inputs to start from: those written here, and the kept corpus, by name."""
    kept_inputs = {path.name: path.read_bytes() for path in sorted((CORPUS / target).glob("*"))}
    return {f"seed-{name}": data for name, data in _SOUND[target]().items()} | kept_inputs


def words() -> list[str]:
    """Return the texts in the readers' sources: keys, families, kinds of rope, and so on."""
    result: dict[str, None] = dict.fromkeys([*ARCHITECTURES, *FORMATS])
    for room in ROOMS:
        for path in sorted(Path(*twostroke.__path__, room).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    result[node.value] = None
    short = [text for text in result if 2 < len(text) < 60 and " " not in text and text.isascii()]
    parts = [text for text in short if text[0] in "._"]
    whole_names = [text for text in short if text[0] not in "._"]
    return [
        *whole_names,
        *(arch + part for arch in ARCHITECTURES for part in parts if part[0] == "."),
    ]


def _gguf() -> dict[str, bytes]:
    """Return both kinds of tokenizer, each beside tensors of half the formats."""
    values = {"a": [1, 2], "d": ["x", ""], "b": 0.5, "c": Typed(7, [True, False])}
    sentencepiece = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<0x0A>", "▁", "▁H", "H", "e", "l"],
        "tokenizer.ggml.scores": [0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0],
        "tokenizer.ggml.token_type": Typed(I32, [2, 6, 1, 1, 1, 1, 1]),
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tensors = {
        name: in_format(np.arange(fmt.block_size, dtype=np.float32)[None], name)
        for name, fmt in FORMATS.items()
    }
    halves = [{name: tensors[name] for name in list(tensors)[part::2]} for part in range(2)]
    return {
        "byte-level": gguf_bytes(_tokenizer_keys() | values, halves[0]),
        "sentencepiece": gguf_bytes(sentencepiece, halves[1]),
    }


def _gguf_model() -> dict[str, bytes]:
    return {
        family: _model_bytes(small, _cut(tiny_tensors(small), "token_embd.weight"))
        for family, small in _families().items()
    }


def _split() -> dict[str, bytes]:
    small = _families()["llama"]
    tensors = _cut(tiny_tensors(small), "token_embd.weight")
    names = list(tensors)
    parts = []
    for part in range(2):
        keys = {
            "split.no": Typed(U16, part),
            "split.count": Typed(U16, 2),
            "split.tensors.count": Typed(I32, len(names)),
        }
        part_tensors = {name: tensors[name] for name in names[part::2]}
        parts.append(
            _model_bytes(small, part_tensors, keys) if part == 0 else gguf_bytes(keys, part_tensors)
        )
    return {"two": SEPARATOR.join(parts)}


def _safetensors() -> dict[str, bytes]:
    results = {}
    for name in ("F32", "F16", "BF16"):
        values = np.arange(8, dtype=np.float32).reshape(2, 4)
        tensors = {key: QuantTensor.from_floats(values, FORMATS[name]) for key in ("a", "b")}
        results[name] = safetensors_bytes(tensors)
    return results


def _hf_folder() -> dict[str, bytes]:
    return {family: _folder_bytes(small) for family, small in _families().items()}


def _folder_bytes(small: Tiny) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_tiny_folder(Path(scratch), small)
        config = json.loads((folder / "config.json").read_text())
        tensors = dict(read_safetensors(folder / "model.safetensors").tensors)
        tables = ("embed_tokens.weight", "embeddings.weight")
        few = _cut(tensors, next(name for name in tensors if name.endswith(tables)))
    config |= {"vocab_size": NUM_TOKENS}
    config |= {key: small.ffn_size for key in EXPERT_SIZES if key in config}
    names = list(few)
    owners = {name: ("a", "b")[i % 2] + ".safetensors" for i, name in enumerate(names)}
    files = [
        json.dumps(config).encode(),
        json.dumps({"weight_map": owners}).encode(),
        *(safetensors_bytes({name: few[name] for name in names[part::2]}) for part in range(2)),
        b'{"eos_token_id": [2, 0]}',
        b'{"chat_template": "x"}',
    ]
    assert len(files) == len(FOLDER_FILES)
    return SEPARATOR.join(files)


def _families() -> dict[str, Tiny]:
    results = {}
    for family, variant in FAMILIES.items():
        family_sizes = {
            "head_dim": variant.sizes.get("head_dim", 16),
            "family": family,
            "fmt": "F16",
        }
        if variant.wide is not None:
            family_sizes |= {
                "num_layers": len(variant.wide.slides),
                "num_kv_heads": 2,
                "num_heads": 2,
            }
        if variant.attends is not None:
            family_sizes |= {"num_layers": len(variant.attends)}
        lists = (*variant.metadata.values(), *variant.config.values())
        num_layers = max((len(each) for each in lists if isinstance(each, list)), default=1)
        if num_layers > 1 and variant.num_experts:
            continue  # too large
        if isinstance(variant.metadata.get("attention.head_count_kv"), list):
            continue  # its lists of heads need more than these sizes
        if "leading_dense_block_count" in variant.metadata and variant.latent is None:
            num_layers = 2
        if num_layers > 1:  # a value for each layer, or other layers first
            family_sizes.setdefault("num_layers", num_layers)
        differs = variant.wide is not None or variant.attends is not None
        has_inputs = variant.wide is not None and variant.wide.inputs > 0
        if has_inputs or (differs and variant.num_experts):
            continue  # too large
        results[family] = Tiny(**(SIZES | family_sizes), embedding_fmt="F16")
    return results


def _model_bytes(
    small: Tiny, tensors: dict[str, QuantTensor], more_metadata: dict[str, object] | None = None
) -> bytes:
    metadata = tiny_metadata(small) | _tokenizer_keys() | {"general.alignment": ALIGNMENT}
    arch = small.variant.architecture
    sizes = {f"{arch}.{key}": small.ffn_size for key in EXPERT_SIZES}
    sizes[f"{arch}.feed_forward_length"] = small.ffn_size
    metadata |= {key: size for key, size in sizes.items() if key in metadata}
    metadata[f"{arch}.vocab_size"] = NUM_TOKENS
    return gguf_bytes(metadata | (more_metadata or {}), tensors, alignment=ALIGNMENT)


def _tokenizer_keys() -> dict[str, object]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*SPECIAL_TOKENS, "H", "e", "l", "He", "ll"],
        "tokenizer.ggml.token_type": Typed(I32, [3, 3, 3, 1, 1, 1, 1, 1]),
        "tokenizer.ggml.merges": ["H e", "l l"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": "x",
    }


def _tokenizer_json() -> dict[str, bytes]:
    description = tokenizer_json()
    vocab = {text: id_ for id_, text in enumerate([*SPECIAL_TOKENS, "H", "e", "l", "He", "ll"])}
    model = description["model"] | {"vocab": vocab, "merges": ["H e", "l l"]}
    pattern = {"Regex": r"(?i:'s)|\p{N}{1,3}+|[\w&&[^_]]+|\s+(?!\S)"}
    steps = [
        {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ]
    changes = [
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        {"type": "Strip", "strip_left": True, "strip_right": False},
        {"type": "Prepend", "prepend": "H"},
    ]
    members = {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "normalizer": {"type": "Sequence", "normalizers": changes},
    }
    return {
        "byte-level": json.dumps(description | {"model": model}).encode(),
        "steps": json.dumps(description | members | {"model": model}).encode(),
    }


def _cut(tensors: dict[str, QuantTensor], table: str) -> dict[str, QuantTensor]:
    """Keep only the first rows of the embedding table, as many as there are tokens."""
    table_tensor = tensors[table]
    few = QuantTensor(
        table_tensor.format, (NUM_TOKENS, table_tensor.shape[1]), table_tensor.data[:NUM_TOKENS]
    )
    return {name: few if name == table else tensor for name, tensor in tensors.items()}


_SOUND = {
    "gguf": _gguf,
    "gguf_model": _gguf_model,
    "split": _split,
    "safetensors": _safetensors,
    "hf_folder": _hf_folder,
    "tokenizer_json": _tokenizer_json,
}
