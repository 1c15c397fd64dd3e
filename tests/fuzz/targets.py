"""What is fuzzed: each target hands bytes to a reader of model files, as files in a folder.

The promise that every input must keep: a model, or a refusal of one sentence (ModelFormatError,
ModelNotFoundError), within a second and in memory that is proportional to the input.
"""

from __future__ import annotations

import time
import tracemalloc
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.errors import ModelFormatError, ModelNotFoundError
from twostroke.model.tokenizer import from_gguf, from_tokenizer_json
from twostroke.model.weights import load_path
from twostroke.model.weights.gguf import read_gguf
from twostroke.model.weights.safetensors import read_safetensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from twostroke.model.quant import QuantTensor
    from twostroke.model.tokenizer import Tokenizer

REFUSALS = (ModelFormatError, ModelNotFoundError)
MAX_LENGTH = 16384  # bytes of an input
MAX_SECONDS = 1.0
MAX_BYTES_FIXED = 1 << 20
MAX_BYTES_PER_BYTE = 256

# What stands between files where a target reads several of them.
SEPARATOR = b"<|next file|>"
SPLIT_FILES = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
FOLDER_FILES = (
    "config.json",
    "model.safetensors.index.json",
    "a.safetensors",
    "b.safetensors",
    "generation_config.json",
    "tokenizer_config.json",
)
TEXT = "Hello, wörld!\n\n  it's 1234 日本"


def gguf(data: bytes, folder: Path) -> None:
    """Read one GGUF file, all of it, and build the tokenizer that it describes."""
    file = read_gguf(rewrite(folder / "model.gguf", data))
    read_all(file.tensors)
    dict(file.metadata)
    use_tokenizer(from_gguf(file.metadata))


def gguf_model(data: bytes, folder: Path) -> None:
    """Load the model that a GGUF file describes."""
    read_all(load_path(rewrite(folder / "model.gguf", data)).tensors)


def split(data: bytes, folder: Path) -> None:
    """Read a GGUF model in two parts."""
    write_files(folder, SPLIT_FILES, data)
    read_all(load_path(folder).tensors)


def safetensors(data: bytes, folder: Path) -> None:
    """Read one safetensors file."""
    read_all(read_safetensors(rewrite(folder / "model.safetensors", data)).tensors)


def hf_folder(data: bytes, folder: Path) -> None:
    """Load a Hugging Face folder: configuration, index, and two safetensors files."""
    write_files(folder, FOLDER_FILES, data)
    rewrite(folder / "tokenizer.json", b"{}")
    read_all(load_path(folder).tensors)


def tokenizer_json(data: bytes, folder: Path) -> None:
    """Build the tokenizer of a `tokenizer.json`."""
    use_tokenizer(from_tokenizer_json(rewrite(folder / "tokenizer.json", data)))


TARGETS: dict[str, Callable[[bytes, Path], None]] = {
    "gguf": gguf,
    "gguf_model": gguf_model,
    "split": split,
    "safetensors": safetensors,
    "hf_folder": hf_folder,
    "tokenizer_json": tokenizer_json,
}


def keep_promise(target: str, data: bytes, folder: Path, *, measure_memory: bool) -> bool:
    """Run a target on `data`; return whether it was read, AssertionError if the promise broke."""
    start = time.perf_counter()
    if measure_memory:
        tracemalloc.start()
    try:
        message = _refusal(target, data, folder)
        peak = tracemalloc.get_traced_memory()[1] if measure_memory else 0
    finally:
        tracemalloc.stop()
    limit = MAX_BYTES_FIXED + MAX_BYTES_PER_BYTE * len(data)
    assert peak <= limit, f"{peak} bytes of memory for {len(data)} bytes of input"
    if time.perf_counter() - start > MAX_SECONDS:
        # A busy machine is no fault of the reader: the process's own time counts.
        start = time.process_time()
        _refusal(target, data, folder)
        seconds = time.process_time() - start
        assert seconds < MAX_SECONDS, f"{seconds:.1f} s for {len(data)} bytes of input"
    if message is not None:
        assert "\n" not in message
        assert len(message) < 2000
    return message is None


def _refusal(target: str, data: bytes, folder: Path) -> str | None:
    try:
        TARGETS[target](data, folder)
    except REFUSALS as error:
        return str(error)
    return None


def write_files(folder: Path, names: tuple[str, ...], data: bytes) -> None:
    """Cut `data` at the separators into files; what is empty becomes no file."""
    paths = [folder / name for name in names]
    pieces = data.split(SEPARATOR, len(names) - 1)
    for path in paths[len(pieces) :]:
        path.unlink(missing_ok=True)
    for path, piece in zip(paths, pieces, strict=False):
        if piece:
            rewrite(path, piece)
        else:
            path.unlink(missing_ok=True)


def rewrite(path: Path, data: bytes) -> Path:
    """Replace a file by a new one: views into the old one's mapping must stay valid."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


def read_all(tensors: Mapping[str, QuantTensor]) -> None:
    """Dequantize every tensor; scales may be infinite."""
    with np.errstate(all="ignore"):
        for tensor in tensors.values():
            tensor.dequantize()


def use_tokenizer(tokenizer: Tokenizer) -> None:
    """Take a text there and back, and spell the first tokens."""
    tokenizer.decode(tokenizer.encode(TEXT, add_special=True))
    tokenizer.decode(range(min(64, tokenizer.vocab_size)), skip_special=False)
