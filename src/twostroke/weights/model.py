"""What loading a model gives upward: its description, its weights, and where its tokenizer is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from twostroke.models import ModelSpec
    from twostroke.quant import QuantTensor
    from twostroke.weights.mapping import MappedFile


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A tokenizer that lies in a GGUF file's metadata (keys `tokenizer.ggml.*`)."""

    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JsonTokenizer:
    """A tokenizer that lies in a `tokenizer.json`, with the folder's `tokenizer_config.json`."""

    path: Path
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose files are mapped and checked.

    `tensors` holds exactly the weights that the Program of `spec` reads, by canonical name and
    with the shapes it needs; they are views into `mappings`. `eos_token_ids` end an answer.
    `file_bytes` is the size of the weight files together.
    """

    name: str
    path: Path
    spec: ModelSpec
    tensors: Mapping[str, QuantTensor]
    tokenizer_source: GgufTokenizer | JsonTokenizer
    chat_template: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    licence: str | None
    mappings: tuple[MappedFile, ...]

    @property
    def file_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum(mapping.size for mapping in self.mappings)

    def release(self, tensor: QuantTensor) -> None:
        """Give back the memory of a tensor that was repacked; reading it again still works."""
        for mapping in self.mappings:
            if mapping.release(tensor.data):
                return
