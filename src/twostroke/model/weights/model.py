"""`LoadedModel`: a model's description, its weights, and the source of its tokenizer."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final, Self

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun, format_bytes
from twostroke.core.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from twostroke.model.families import ModelSpec
    from twostroke.model.quant import QuantTensor
    from twostroke.model.weights.file_names import FileNames
    from twostroke.model.weights.mapping import MappedFile

_NUM_HASHED_ROWS: Final = 8  # rows of each tensor


class GgufTokenizer(Frozen):
    """A tokenizer in the metadata of a GGUF file (keys `tokenizer.ggml.*`)."""

    metadata: Mapping[str, Any]


class JsonTokenizer(Frozen):
    """A tokenizer in a `tokenizer.json` file, with the folder's `tokenizer_config.json`."""

    path: Path
    config: Mapping[str, Any]


class MtpWeights(Frozen):
    """The tensors of a model's MTP layer, as its file has them: mapped, but not checked.

    `file` is the name of the file in errors. `tensors` have canonical names.
    """

    file: str
    tensors: Mapping[str, QuantTensor]
    names: FileNames


class LoadedModel(Frozen):
    """A model whose weight files are mapped and checked: its description, weights and tokenizer.

    `tensors` holds exactly the weights that the Program of `spec` reads, by canonical name and with
    the shapes that it needs; they are views into `mappings`. `eos_token_ids` end a completion.
    `pooling` is how hidden states become embeddings; None if the files do not tell. `sampling` has
    the publisher's recommended parameters; None for parameters that the files do not have. `mtp`
    has the tensors of the MTP layer (multi-token prediction), for speculation; None if there is no
    such layer. MTP tensors take no memory until they are used.
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
    mtp: MtpWeights | None = None

    def __repr__(self) -> str:
        """Return a short text, without the tensors."""
        size = f"{counted_noun(len(self.tensors), 'tensor')}, {format_bytes(self.file_bytes)}"
        return f"<LoadedModel {self.name}: {self.spec.architecture}, {size}, {str(self.path)!r}>"

    @property
    def file_bytes(self) -> int:
        """Return the size of the model's weight files in bytes."""
        return sum(mapping.size for mapping in self.mappings)

    @property
    def file_stamp(self) -> str:
        """Return a text that changes when a weight file is replaced or written to."""
        return repr([(mapping.size, mapping.modified_ns) for mapping in self.mappings])

    def without_tokenizer(self) -> Self:
        """Return the model without its tokenizer, whose tables may take more memory than a step."""
        return replace(self, tokenizer_source=GgufTokenizer({}))

    def release(self, tensors: Iterable[QuantTensor]) -> None:
        """Free the mapped memory of weights that a backend has repacked elsewhere.

        A later access reads them from the file again.
        """
        release_tensors(self.mappings, tensors)


def release_tensors(mappings: Iterable[MappedFile], tensors: Iterable[QuantTensor]) -> None:
    """Free the mapped memory of weights; a later access reads the files again."""
    views = [tensor.data for tensor in tensors]
    for mapping in mappings:
        mapping.release(views)


def weights_identity(tensors: Mapping[str, QuantTensor]) -> str:
    """Return a hash that identifies a model's weights: other weights or number formats change it.

    It is the SHA-256 of each tensor's name, format, shape, order, and some evenly spaced rows from
    the first to the last. Training changes all rows, and an incomplete copy lacks many. A change of
    a few bytes can go unnoticed. Reading all weights would be too slow for a rank that needs only a
    few of them; to find changed bytes, compare a file's checksum.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.format.name} {tensor.shape}\n".encode())
        digest.update(b"" if tensor.order is None else tensor.order.tobytes())
        last = len(tensor.data) - 1
        for row in sorted({last * i // (_NUM_HASHED_ROWS - 1) for i in range(_NUM_HASHED_ROWS)}):
            digest.update(tensor.data[row].tobytes())
    return digest.hexdigest()
