"""llama.cpp's side of a comparison, run by a Python with llama-cpp-python (see pipe.py).

It uses llama.cpp's own batched decoding through the low-level interface, with a context that
fits the job, and takes the most likely token of each row with NumPy.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np

from benchmarks.common.pipe import claim_output, serve
from benchmarks.common.workload import Timing
from benchmarks.peers.llama_rpc import library, start_server

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CELLS = 256  # llama.cpp pads a stream's cache to this
_MICRO_BATCH = 512  # llama.cpp's own default


def main() -> None:
    """Load the model, then answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument(
        "--rpc-layers", type=int, default=0, metavar="N",
        help="that many of the last layers (and the output) are another process's: its rpc-server",
    )  # fmt: skip
    args, answers = parser.parse_args(), claim_output()
    llama = Llama(args.model, args.threads, args.rpc_layers)
    serve({
        "about": llama.about, "run": llama.run, "score": llama.score, "forget": llama.forget
    }, answers)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What a context is made for."""

    num_streams: int
    length: int  # tokens a stream, prompt and answer
    flash_attention: bool


class Llama:
    """A model, and a context for each shape of job so far."""

    def __init__(self, path: str, num_threads: int, rpc_layers: int = 0) -> None:
        """Load a GGUF file; `rpc_layers` of it into a server with as many threads."""
        llama_cpp.llama_backend_init()
        self._server = start_server(num_threads) if rpc_layers else None
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = rpc_layers
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}.")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._num_threads = num_threads
        self._pool = ThreadPool(num_threads)
        self._contexts: dict[Shape, Context] = {}

    def about(self) -> dict[str, Any]:
        """Return the version and what its kernels use."""
        return {
            "version": llama_cpp.__version__,
            "system_info": llama_cpp.llama_print_system_info().decode().strip(),
        }

    def run(
        self, prompts: list[list[int]], num_tokens: int, num_kept: int, *, flash_attention: bool
    ) -> dict[str, Any]:
        """Answer prompts of one length together, as `ours.run_job` does.

        The first `num_kept` tokens of the first stream's prompt are computed once, and copied into
        memory of its own for each other stream: what is in it costs no time.
        """
        shape = Shape(len(prompts), len(prompts[0]) + num_tokens, flash_attention)
        context = self._context(shape)
        context.keep(prompts[0][:num_kept])
        prompt = context.prompt_batch([prompt[num_kept:] for prompt in prompts], first=num_kept)
        start_s = time.perf_counter()
        tokens = first = context.decode(prompt)
        prefilled = time.perf_counter()
        for i in range(num_tokens - 1):
            tokens = context.decode(context.next_batch(tokens, len(prompts[0]) + i))
        end_s = time.perf_counter()
        return Timing(
            prompt_tokens=sum(map(len, prompts)),
            prefill_s=prefilled - start_s,
            decode_tokens=len(prompts) * (num_tokens - 1),
            decode_s=end_s - prefilled,
            wall_s=end_s - start_s,
            first_tokens=[int(token) for token in first],
        ).as_json()

    def score(self, tokens: list[int], path: str, *, flash_attention: bool) -> dict[str, Any]:
        """Write the logits (len(tokens), vocab_size) of one sequence to `path` as float32."""
        context = self._context(Shape(1, len(tokens), flash_attention))
        context.keep([])
        batch = context.prompt_batch([tokens], every=True)
        np.save(path, context.logits(batch, len(tokens)))
        return {}

    def forget(self) -> dict[str, Any]:
        """Give the memory of all contexts back."""
        for context in self._contexts.values():
            context.close()
        self._contexts.clear()
        return {}

    def _context(self, shape: Shape) -> Context:
        if shape not in self._contexts:
            context = Context(self._model, shape, self._num_threads, self._vocab_size)
            context.use(self._pool)
            self._contexts[shape] = context
        return self._contexts[shape]


class Context:
    """A context with two batches: one for prompts, one for a token of each stream."""

    def __init__(self, model: Any, shape: Shape, num_threads: int, vocab_size: int) -> None:
        """Make them for jobs of one shape."""
        params = llama_cpp.llama_context_default_params()
        cells = -(-shape.length // _CELLS) * _CELLS
        params.n_ctx = shape.num_streams * cells
        params.n_batch = shape.num_streams * shape.length
        params.kv_unified = False  # memory of its own for each stream
        params.n_ubatch = min(_MICRO_BATCH, params.n_batch)
        params.n_seq_max = shape.num_streams
        params.n_threads = params.n_threads_batch = num_threads
        params.flash_attn_type = int(shape.flash_attention)
        params.offload_kqv = True  # keys and values are where their layers are
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise MemoryError(f"llama.cpp cannot make a context for {shape}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size, self._num_streams = vocab_size, shape.num_streams
        self._kept_tokens: list[int] = []
        self._prompts = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._next = _filled(
            llama_cpp.llama_batch_init(shape.num_streams, 0, 1),
            streams=np.arange(shape.num_streams),
            positions=np.zeros(shape.num_streams),
            is_wanted=np.ones(shape.num_streams),
        )

    def use(self, pool: ThreadPool) -> None:
        """Compute with the threads of a pool in place of new ones for each batch."""
        pool.attach(self._context)

    def close(self) -> None:
        """Give its memory back."""
        for batch in (self._prompts, self._next):
            llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(self._context)

    def keep(self, tokens: list[int]) -> None:
        """Forget all streams but these first tokens, which every stream has after this."""
        if tokens and tokens == self._kept_tokens:
            for stream in range(self._num_streams):
                llama_cpp.llama_memory_seq_rm(self._memory, stream, len(tokens), -1)
            return
        llama_cpp.llama_memory_clear(self._memory, 0)
        self._kept_tokens = tokens
        if tokens:
            self.decode(self.prompt_batch([tokens]))
        for stream in range(1, self._num_streams if tokens else 1):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, stream, -1, -1)

    def prompt_batch(self, prompts: list[list[int]], first: int = 0, *, every: bool = False) -> Any:
        """Return a batch of prompts that begin at position `first`.

        It asks for the logits of the last row of each, or of every row.
        """
        length = len(prompts[0])
        positions = first + np.tile(np.arange(length), len(prompts))
        streams = np.repeat(np.arange(len(prompts)), length)
        is_wanted = np.ones_like(positions) if every else positions == first + length - 1
        batch = _filled(self._prompts, streams, positions, is_wanted)
        _view(batch.token, batch.n_tokens)[:] = np.concatenate(prompts)
        return batch

    def next_batch(self, tokens: NDArray[np.int64], position: int) -> Any:
        """Return a batch of one token for each stream."""
        _view(self._next.token, len(tokens))[:] = tokens
        _view(self._next.pos, len(tokens))[:] = position
        return self._next

    def decode(self, batch: Any) -> NDArray[np.int64]:
        """Compute a batch and return the likeliest token of each stream."""
        num_rows = int(np.count_nonzero(_view(batch.logits, batch.n_tokens)))
        likeliest: NDArray[np.int64] = self.logits(batch, num_rows).argmax(axis=1)
        return likeliest

    def logits(self, batch: Any, num_rows: int) -> NDArray[np.float32]:
        """Compute a batch and return a view of the logits that it asked for."""
        code = llama_cpp.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        logits = llama_cpp.llama_get_logits(self._context)
        return _view(logits, num_rows * self._vocab_size).reshape(num_rows, self._vocab_size)


class ThreadPool:
    """Threads that live on between batches, with default settings, as llama.cpp's own tools do.

    llama-cpp-python does not wrap these functions; without them each batch starts its threads anew.
    """

    def __init__(self, num_threads: int) -> None:
        """Start the threads."""
        base, cpu, llama = map(library, ("libggml-base", "libggml-cpu", "libllama"))
        base.ggml_threadpool_params_default.restype = _ThreadPoolParams
        cpu.ggml_threadpool_new.argtypes = [ctypes.POINTER(_ThreadPoolParams)]
        cpu.ggml_threadpool_new.restype = ctypes.c_void_p
        params = base.ggml_threadpool_params_default(ctypes.c_int(num_threads))
        assert params.n_threads == num_threads, "another layout of ggml_threadpool_params"
        self._pool = cpu.ggml_threadpool_new(ctypes.byref(params))
        self._attach = llama.llama_attach_threadpool
        self._attach.argtypes = [ctypes.c_void_p] * 3

    def attach(self, context: Any) -> None:
        """Let a context use it for prompts and for single tokens."""
        self._attach(context, self._pool, self._pool)


class _ThreadPoolParams(ctypes.Structure):
    """`ggml_threadpool_params` of ggml.h."""

    _fields_ = (
        ("cpumask", ctypes.c_bool * 512),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


def _filled(
    batch: Any, streams: NDArray[Any], positions: NDArray[Any], is_wanted: NDArray[Any]
) -> Any:
    """Write all but the tokens into a batch."""
    count = batch.n_tokens = len(streams)
    _view(batch.pos, count)[:] = positions
    _view(batch.n_seq_id, count)[:] = 1
    _view(batch.logits, count)[:] = is_wanted
    for i, stream in enumerate(streams):
        batch.seq_id[i][0] = int(stream)
    return batch


def _view(pointer: Any, count: int) -> NDArray[Any]:
    """Return `count` values behind a C pointer as an array."""
    kind = pointer._type_
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    return np.frombuffer((kind * count).from_address(address or 0), dtype=np.dtype(kind))


if __name__ == "__main__":
    main()
