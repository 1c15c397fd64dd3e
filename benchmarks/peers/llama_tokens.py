"""Return llama.cpp's most likely next tokens for a GGUF file.

Used by compress.py. The library is part of the wheel xllamacpp, called by its C interface
(include/llama.h).
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_uint32, c_void_p
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers import environments
from twostroke.lab.compress.walk import CalibrationStream
from twostroke.lab.measure.compare import held_out_text, pieces_of
from twostroke.model.families import build_program
from twostroke.model.loader import load

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


_SILENT = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(lambda *_: None)
_PIECE = 256
_NUM_TOKENS = 512


def library_path() -> Path:
    """Return the path of llama.cpp's library, which is installed at first use."""
    folder = environments.python_of("ggml").parents[1]
    (path,) = folder.glob("lib/python*/site-packages/xllamacpp/xllamacpp*.so")
    return path


def agreement(model: Path) -> float:
    """Return the share of places of the held-out text where the reference has the same one.

    The reference computes with the file's weights in float32. llama.cpp rounds activations of
    quantized matrices to 8 bits, so that it differs even for its own files.
    """
    pieces = pieces_of(held_out_text(), [str(model)], _PIECE, _NUM_TOKENS)
    loaded = load(str(model))
    program = build_program(loaded.spec)
    stream = CalibrationStream(program, pieces)
    for op in program.ops:
        stream.run(op, {w.name: loaded.tensors[w.name].dequantize() for w in op.weights})
    ours = stream.values[program.ops[-1].output].argmax(axis=1)
    return float((ours == likeliest(model, pieces)).mean())


def likeliest(model: Path, pieces: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return the likeliest token after each of the tokens of all pieces.

    Raises:
        SystemExit: llama.cpp does not load the model.
    """
    library = _typed(ctypes.CDLL(str(library_path())))
    results: list[int] = []
    data = True  # is cleared, too
    with _loaded(library, model, max(map(len, pieces))) as (loaded, context):
        vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(loaded))
        for piece in pieces:
            library.llama_memory_clear(library.llama_get_memory(context), data)
            batch = library.llama_batch_init(len(piece), 0, 1)
            batch.n_tokens = len(piece)
            for i, token in enumerate(piece):
                batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            if library.llama_decode(context, batch):
                raise SystemExit(f"llama.cpp cannot run {model.name}.")
            for i in range(len(piece)):
                logits = library.llama_get_logits_ith(context, i)
                results.append(int(np.ctypeslib.as_array(logits, (vocab_size,)).argmax()))
            library.llama_batch_free(batch)
    return np.array(results)


class _Options(ctypes.Structure):
    """Options by value: larger than either structure, of which only the first fields are set."""

    _fields_ = (("first", c_uint32 * 3), ("others", c_uint32 * 125))


class _Batch(ctypes.Structure):
    """As `llama_batch`."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


@contextmanager
def _loaded(library: ctypes.CDLL, path: Path, length: int) -> Iterator[tuple[int, int]]:
    library.llama_log_set(_SILENT, None)
    library.llama_backend_init()
    model = library.llama_model_load_from_file(
        str(path).encode(), library.llama_model_default_params()
    )
    if not model:
        raise SystemExit(f"llama.cpp does not load {path.name}.")
    options = library.llama_context_default_params()
    options.first[:] = (length, length, length)  # context, batch and micro-batch
    context = library.llama_init_from_model(model, options)
    try:
        yield model, context
    finally:
        library.llama_free(context)
        library.llama_model_free(model)


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    signatures = {
        "llama_log_set": (None, (c_void_p, c_void_p)),
        "llama_backend_init": (None, ()),
        "llama_model_default_params": (_Options, ()),
        "llama_context_default_params": (_Options, ()),
        "llama_model_load_from_file": (c_void_p, (c_char_p, _Options)),
        "llama_init_from_model": (c_void_p, (c_void_p, _Options)),
        "llama_model_get_vocab": (c_void_p, (c_void_p,)),
        "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
        "llama_get_memory": (c_void_p, (c_void_p,)),
        "llama_memory_clear": (None, (c_void_p, c_bool)),
        "llama_batch_init": (_Batch, (c_int32, c_int32, c_int32)),
        "llama_batch_free": (None, (_Batch,)),
        "llama_decode": (c_int32, (c_void_p, _Batch)),
        "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
        "llama_free": (None, (c_void_p,)),
        "llama_model_free": (None, (c_void_p,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
