"""A loaded model: its description, its weights, and the place of its tokenizer."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.frozen import Frozen
from twostroke.core.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from twostroke.model.families import ModelSpec
    from twostroke.model.quant import QuantTensor
    from twostroke.model.weights.mapping import MappedFile

_NUM_COMPARED: Final = 8  # rows of a tensor that tell files apart


class GgufTokenizer(Frozen):
    """A tokenizer in a GGUF file's metadata (keys `tokenizer.ggml.*`)."""

    metadata: Mapping[str, Any]


class JsonTokenizer(Frozen):
    """A tokenizer in a `tokenizer.json`, with the folder's `tokenizer_config.json`."""

    path: Path
    config: Mapping[str, Any]


class LoadedModel(Frozen):
    """A model whose files are mapped and checked.

    `tensors` holds exactly the weights that the Program of `spec` reads, by canonical name and
    with the shapes it needs; they are views into `mappings`. `eos_token_ids` end an answer.
    `pooling` is the way in which embeddings are made, None where the files do not say. `sampling`
    has the values that its publisher recommends, None where the files do not say.
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
    pooling: str | None = None
    sampling: SamplingParams = SamplingParams()

    @property
    def file_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum(mapping.size for mapping in self.mappings)

    def release(self, tensors: Iterable[QuantTensor]) -> None:
        """Free the memory of tensors that were repacked; they can still be read again."""
        release_tensors(self.mappings, tensors)


def release_tensors(mappings: Iterable[MappedFile], tensors: Iterable[QuantTensor]) -> None:
    """Free the memory of tensors of mapped files; they can still be read again."""
    views = [tensor.data for tensor in tensors]
    for mapping in mappings:
        mapping.release(views)


def weights_identity(tensors: Mapping[str, QuantTensor]) -> str:
    """Return what tells apart the weights of two files, also in the formats of their numbers.

    It is the SHA-256 of each tensor's name, format, shape, order, and some rows from the first to
    the last, evenly spaced. Training changes all rows, and a copy that broke off lacks many. A rank
    should not read all weights, of which it may need a small part, so a few changed bytes can go
    unnoticed; a file's own checksum finds these.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.format.name} {tensor.shape}\n".encode())
        digest.update(b"" if tensor.order is None else tensor.order.tobytes())
        last = len(tensor.data) - 1
        for row in sorted({last * i // (_NUM_COMPARED - 1) for i in range(_NUM_COMPARED)}):
            digest.update(tensor.data[row].tobytes())
    return digest.hexdigest()
