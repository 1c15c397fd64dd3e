"""Tiny random models, written as GGUF files or Hugging Face folders, real ones but for size."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from support.gguf_writer import I32, U16, Typed, write_gguf
from support.random_blocks import in_format
from support.safetensors_writer import write_safetensors
from support.tiny_families import FAMILIES
from support.tiny_weights import folder_weights, gguf_weights, random_weights
from twostroke.core.frozen import Frozen
from twostroke.model.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np

    from support.tiny_variant import Variant

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Weights with two dimensions that files never quantize.
_FLOAT_WEIGHTS = (
    *(".conv.weight", ".ssm_conv1d.weight", ".ssm_norm.weight", ".ssm_a", ".ssm_d"),
    *(f".ssm_conv1d_{part}.weight" for part in "qkv"),
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 1, 2

_WORDS = ("the", "and", "Ġthe", "Ġa", "Ġis", "Ġof", "Ġto", "ing", "er", "Ġworld", "hello", "Ġin")


class Tiny(Frozen):
    """The sizes of a tiny model; `fmt` is the format of its matrices, `embedding_fmt` of its table.

    `family` is a name of `tiny_families.FAMILIES`; `tiny_of` chooses fitting sizes. Equal Tinys
    have equal weights in both kinds of files.
    """

    num_layers: int = 2
    hidden_size: int = 64
    ffn_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    context_length: int = 512
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5
    tied: bool = True
    fmt: str = "F32"
    embedding_fmt: str = "F32"
    seed: int = 0
    family: str = "llama"

    @property
    def variant(self) -> Variant:
        """The family's departures from Llama."""
        return FAMILIES[self.family]


def tiny_of(family: str, **sizes: Any) -> Tiny:
    """Return a tiny model of a family, with sizes that show its particular features."""
    return Tiny(**{**FAMILIES[family].sizes, **sizes}, family=family)


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Return a byte-level BPE vocabulary of some 300 tokens, and its merges."""
    tokens = [*SPECIAL_TOKENS, *byte_alphabet()]
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    return tokens, merges


def byte_alphabet() -> list[str]:
    """Return GPT-2's printable character for each byte, 0 to 255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def tiny_weights(tiny: Tiny, vocab_size: int | None = None) -> dict[str, np.ndarray]:
    """Return float32 weights by canonical name; rows of q and k in Hugging Face's order."""
    return random_weights(tiny, vocab_size or len(vocabulary()[0]))


def tiny_metadata(tiny: Tiny) -> dict[str, Any]:
    """Return the GGUF metadata of a tiny model, tokenizer and chat template included."""
    tokens, merges = vocabulary()
    facts = {
        "block_count": tiny.num_layers,
        "context_length": tiny.context_length,
        "embedding_length": tiny.hidden_size,
        "feed_forward_length": tiny.ffn_size,
        "attention.head_count": tiny.num_heads,
        "attention.head_count_kv": tiny.num_kv_heads,
        "attention.key_length": tiny.head_dim,
        "attention.value_length": tiny.head_dim,
        "attention.layer_norm_rms_epsilon": tiny.norm_epsilon,
        "rope.freq_base": tiny.rope_base,
        "rope.dimension_count": tiny.head_dim,
        "vocab_size": len(tokens),
        **tiny.variant.metadata,
    }
    architecture = tiny.variant.architecture
    return {
        "general.architecture": architecture,
        "general.name": "Tiny",
        "general.license": "apache-2.0",
        **{f"{architecture}.{key}": value for key, value in facts.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed(I32, [3 if t in SPECIAL_TOKENS else 1 for t in tokens]),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": BOS_ID,
        "tokenizer.ggml.eos_token_id": EOS_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def tiny_tensors(tiny: Tiny, vocab_size: int | None = None) -> dict[str, QuantTensor]:
    """Return the tensors of a tiny model as a GGUF file holds them."""
    tensors = {}
    for name, weight in gguf_weights(tiny, tiny_weights(tiny, vocab_size)).items():
        fmt = tiny.fmt
        if weight.ndim == 1 or name.endswith((".bias", *_FLOAT_WEIGHTS)):
            fmt = "F32"
        elif name in {"token_embd.weight", "output.weight"}:
            fmt = tiny.embedding_fmt
        tensors[name] = in_format(weight, fmt)
    return tensors


def write_tiny_gguf(
    path: Path, tiny: Tiny | None = None, metadata: Mapping[str, Any] | None = None
) -> Path:
    """Write a tiny random model as a GGUF file, with additional `metadata`; return its path."""
    tiny = tiny or Tiny()
    all_metadata = tiny_metadata(tiny) | dict(metadata or {})
    vocab_size = len(all_metadata["tokenizer.ggml.tokens"])
    all_metadata[f"{tiny.variant.architecture}.vocab_size"] = vocab_size
    return write_gguf(path, all_metadata, tiny_tensors(tiny, vocab_size))


def infill_metadata() -> dict[str, Any]:
    """Return metadata that name tokens for filling in the middle, and an end token."""
    tokens, _ = vocabulary()
    named = {"pre": "Ġis", "suf": "Ġof", "mid": "Ġto", "sep": "Ġworld"}
    return {f"tokenizer.ggml.fim_{k}_token_id": tokens.index(text) for k, text in named.items()}


def write_base_gguf(path: Path) -> Path:
    """Write a tiny model that cannot chat, without template and turn tokens."""
    metadata = tiny_metadata(Tiny())
    del metadata["tokenizer.chat_template"]
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = ["<s>" if t == "<|im_start|>" else t for t in tokens]
    return write_gguf(path, metadata, tiny_tensors(Tiny()))


def write_tiny_split(
    folder: Path, tiny: Tiny | None = None, num_parts: int = 3, stem: str = "tiny"
) -> Path:
    """Write a tiny random Llama as a split GGUF model and return the path of its first part."""
    tiny = tiny or Tiny()
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tiny_tensors(tiny)
    for part in range(num_parts):
        metadata = {
            "split.no": Typed(U16, part),
            "split.count": Typed(U16, num_parts),
            "split.tensors.count": Typed(I32, len(tensors)),
        }
        if part == 0:
            metadata |= tiny_metadata(tiny)
        part_tensors = {name: tensors[name] for name in list(tensors)[part::num_parts]}
        write_gguf(folder / f"{stem}-{part + 1:05}-of-{num_parts:05}.gguf", metadata, part_tensors)
    return folder / f"{stem}-00001-of-{num_parts:05}.gguf"


def write_tiny_folder(folder: Path, tiny: Tiny | None = None, num_shards: int = 1) -> Path:
    """Write a tiny random model as a Hugging Face folder (`fmt` F32, F16 or BF16); return it."""
    tiny = tiny or Tiny()
    folder.mkdir(parents=True, exist_ok=True)
    fmt = FORMATS[tiny.fmt]
    tensors = {
        name: QuantTensor.from_floats(weight, fmt)
        for name, weight in folder_weights(tiny, tiny_weights(tiny)).items()
    }
    if num_shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
    else:
        _write_shards(folder, tensors, num_shards)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, 0]}
    tokenizer_config = {"chat_template": CHAT_TEMPLATE, "eos_token": SPECIAL_TOKENS[EOS_ID]}
    _write_json(folder / "config.json", tiny_config(tiny))
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "tokenizer.json", tokenizer_json())
    return folder


def tiny_config(tiny: Tiny) -> dict[str, Any]:
    """Return the `config.json` of a tiny model."""
    config = {
        "model_type": tiny.variant.model_type,
        "hidden_act": "silu",
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.ffn_size,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
        "num_key_value_heads": tiny.num_kv_heads,
        "head_dim": tiny.head_dim,
        "max_position_embeddings": tiny.context_length,
        "rms_norm_eps": tiny.norm_epsilon,
        "rope_theta": tiny.rope_base,
        "rope_scaling": None,
        "tie_word_embeddings": tiny.tied,
        "vocab_size": len(vocabulary()[0]),
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        **tiny.variant.config,
    }
    if "rope_parameters" in config:
        for key in ("rope_theta", "rope_scaling"):
            del config[key]
    if tiny.variant.wide is not None:
        config["vocab_size_per_layer_input"] = len(vocabulary()[0])
    return config


def tokenizer_json() -> dict[str, Any]:
    """Return the vocabulary as a `tokenizer.json` (byte-level BPE)."""
    tokens, merges = vocabulary()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": text, "special": True, **flags}
            for i, text in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


def _write_shards(folder: Path, tensors: dict[str, QuantTensor], num_shards: int) -> None:
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        names = list(tensors)[shard::num_shards]
        write_safetensors(folder / name, {key: tensors[key] for key in names})
        weight_map |= dict.fromkeys(names, name)
    _write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
