"""Configuration and tokenizer files of a Hugging Face folder, also converted from a GGUF file."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.errors import TwostrokeError
from twostroke.core.json_io import read_json, write_json
from twostroke.lab.measure.compare import held_out_text
from twostroke.model.loader import build_tokenizer
from twostroke.model.tokenizer import from_tokenizer_json
from twostroke.model.tokenizer.pretokenizers import pre_tokenizer
from twostroke.model.tokenizer.template_files import FOLDERS
from twostroke.model.weights import GgufTokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from twostroke.model.weights import LoadedModel

# Architectures of GGUF files whose config.json needs only sizes.
_PLAIN_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_CONTROL, _USER_DEFINED = 3, 4  # token types in GGUF files
_BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def config_of(source: LoadedModel) -> dict[str, Any]:
    """Return the contents of a model's config.json for a Hugging Face folder.

    If the model is a GGUF file, they are converted from its metadata.

    Raises:
        TwostrokeError: the model's family is not supported.
    """
    spec = source.spec
    if not isinstance(source.tokenizer_source, GgufTokenizer):
        config = read_json(source.path / "config.json")
        if "text_config" in config:
            raise TwostrokeError(f"{source.name} is part of a vision model, which stays as it is.")
        # The tensors decide if they contradict the file.
        return config | {
            "tie_word_embeddings": spec.tied_embeddings,
            "vocab_size": spec.vocab_size,
        }
    is_scaled = spec.rope.scaled_frequencies is not None or spec.rope.dim != spec.head_dim
    has_biases = spec.qkv_bias != (spec.architecture == "qwen2") or spec.output_bias
    if spec.architecture not in _PLAIN_ARCHITECTURES or is_scaled or spec.window or has_biases:
        names = ", ".join(_PLAIN_ARCHITECTURES)
        raise TwostrokeError(
            f"{source.name} is a GGUF file for which no config.json can be written: only plain "
            f"models of {names} can. Give the model's safetensors folder."
        )
    return {
        "architectures": [_PLAIN_ARCHITECTURES[spec.architecture]],
        "model_type": spec.architecture,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": spec.norm_epsilon,
        "rope_theta": spec.rope.base,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tied_embeddings,
        "bos_token_id": source.bos_token_id,
        "eos_token_id": list(source.eos_token_ids),
    }


def write_tokenizer(source: LoadedModel, folder: Path) -> None:
    """Write the files of a model's tokenizer into a Hugging Face folder.

    Raises:
        TwostrokeError: the tokenizer of a GGUF file cannot be written, or the written tokenizer
            splits text differently.
    """
    tokenizer_source = source.tokenizer_source
    if not isinstance(tokenizer_source, GgufTokenizer):
        for name in _TOKENIZER_FILES:
            if (source.path / name).is_file():
                shutil.copyfile(source.path / name, folder / name)
        for name in FOLDERS:
            if (source.path / name).is_dir():
                shutil.copytree(source.path / name, folder / name, dirs_exist_ok=True)
        return
    if tokenizer_source.metadata.get("tokenizer.ggml.model") != "gpt2":
        raise TwostrokeError(
            f"{source.name} has a tokenizer that is not byte-level BPE, the only kind that can be "
            "written as tokenizer.json yet. Give the model's safetensors folder."
        )
    write_json(folder / "tokenizer.json", _tokenizer_json(tokenizer_source.metadata))
    tokens = tokenizer_source.metadata["tokenizer.ggml.tokens"]
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.spec.context_length,
        "clean_up_tokenization_spaces": False,
    }
    if source.bos_token_id is not None:
        config["bos_token"] = tokens[source.bos_token_id]
    if source.eos_token_ids:
        config["eos_token"] = tokens[source.eos_token_ids[0]]
    templates = build_tokenizer(source).chat_templates
    if templates.keys() == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items()
        ]
    write_json(folder / "tokenizer_config.json", config)
    ids = {"bos_token_id": source.bos_token_id, "eos_token_id": list(source.eos_token_ids)}
    write_json(folder / "generation_config.json", ids)
    text = held_out_text()
    if from_tokenizer_json(folder).encode(text) != build_tokenizer(source).encode(text):
        raise TwostrokeError(f"{source.name}: its tokenizer cannot be written as tokenizer.json.")


def _tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a byte-level BPE tokenizer in the format of Hugging Face tokenizers."""
    tokens = list(metadata["tokenizer.ggml.tokens"])
    kinds = list(metadata.get("tokenizer.ggml.token_type", []))
    pre = pre_tokenizer(str(metadata.get("tokenizer.ggml.pre") or "default"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    cuts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos)
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id_, "content": tokens[id_], "special": int(kind) == _CONTROL, **flags}
            for id_, kind in enumerate(kinds)
            if int(kind) in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*cuts, {**_BYTE_LEVEL, "use_regex": False}],
        },
        "post_processor": _bos_post_processor(tokens[bos], bos)
        if adds_bos and bos is not None
        else None,
        "decoder": {**_BYTE_LEVEL, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": {token: id_ for id_, token in enumerate(tokens)},
            "merges": list(metadata["tokenizer.ggml.merges"]),
        },
    }


def _bos_post_processor(token: str, id_: int) -> dict[str, Any]:
    """Return the tokenizer.json post-processor that prepends a token to each text."""
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, bos, second],
        "special_tokens": {token: {"id": token, "ids": [int(id_)], "tokens": [token]}},
    }
