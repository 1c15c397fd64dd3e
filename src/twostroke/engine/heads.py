"""Heads in an engine: small layers that guess from the target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from twostroke.cache import FORMATS as CACHE_FORMATS
from twostroke.core.errors import MemoryLimitError, UsageError
from twostroke.core.machine import memory_available
from twostroke.engine.parts import FLOAT32_BACKENDS, auto_kv_format, guessing, make_backend
from twostroke.engine.sizing import CacheSize
from twostroke.models.heads import EAGLE, NUMBERS, TABLE, build_heads, last_hidden
from twostroke.program.cost import CostModel
from twostroke.quant import FORMATS, QuantTensor
from twostroke.spec import EagleHeads, HeadAccuracy, MedusaHeads, StepTime
from twostroke.weights import load_heads, numbers_table, target_identity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.backends import Backend
    from twostroke.core.config import EngineOptions
    from twostroke.core.hardware import Hardware
    from twostroke.weights import LoadedHeads, LoadedModel

_SPARE_TOKENS = 128  # of a request, for waiting states and guesses, besides its window
_PACKED = FORMATS["Q8_0"]


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads that fit their target; their files are mapped and their weights not read yet.

    `table` is the target's embedding, which an EAGLE head reads.
    """

    loaded: LoadedHeads
    table: QuantTensor

    @classmethod
    def of(cls, folder: str, method: str, target: LoadedModel) -> Self:
        """Open the heads in `folder`; `method` is the one that was asked for, or "auto".

        Raises:
            UsageError: they are of another kind, or another model's.
            ModelNotFoundError, ModelFormatError: there are none, or they are damaged.
        """
        loaded = load_heads(Path(folder))
        facts = loaded.facts
        kind, shape = facts.spec.kind, facts.spec.layer
        if method not in {"auto", kind}:
            raise UsageError(
                f"{folder} holds {kind} heads: use --speculate {kind}, or auto, not {method}."
            )
        sizes = target.spec.vocab_size, target.spec.hidden_size
        fits = (shape.vocab_size, shape.hidden_size) == sizes
        if not fits or facts.target_id != target_identity(target.tensors):
            raise UsageError(
                f"{folder} holds heads of {facts.target}, which cannot guess for "
                f"{target.name}: train its own with `twostroke train-heads {target.name}`."
            )
        return cls(loaded, target.tensors[TABLE])

    def build(
        self, options: EngineOptions, max_running: int, backend: Backend, hardware: Hardware | None
    ) -> EagleHeads | MedusaHeads:
        """Read the weights; heads compute on the threads of `backend`, which outlives them.

        Raises:
            MemoryLimitError: their pages do not fit beside the target's.
        """
        facts = self.loaded.facts
        program = build_heads(facts.spec)
        compute = guessing(options.compute)
        tensors = self._tensors(packed=compute.backend not in FLOAT32_BACKENDS)
        page_size = backend.facts.page_size
        kv_format = auto_kv_format(compute)
        window = facts.spec.layer.window
        num_tokens = _SPARE_TOKENS + (0 if window is None else window.size)
        num_places = -(-num_tokens // page_size) + 1
        num_pages = num_places * max_running if facts.spec.kind == EAGLE else 1
        cache_bytes = num_pages * program.page_bytes(page_size, CACHE_FORMATS[kv_format])
        free_bytes = memory_available() - backend.facts.cache_bytes
        if cache_bytes > free_bytes:
            raise MemoryLimitError(
                f"{self.loaded.path} need {cache_bytes / 1e6:,.0f} MB for keys and values of "
                f"{max_running} requests, and {free_bytes / 1e6:,.0f} MB of memory are free: "
                "lower --max-running, or train heads with a smaller --window."
            )
        length = facts.spec.layer.context_length
        size = CacheSize(length, num_pages, page_size, cache_bytes, kv_format)
        runner = make_backend(
            tensors,
            program,
            compute,
            size,
            lambda _: None,
            None,
            share_threads_with=backend,
            tapped_value=last_hidden(program),
        )
        stored = {name: tensors[name].num_bytes for name in program.weight_shapes}
        cost = CostModel(program, stored).per_step()
        step_time = StepTime(cost, hardware, runner.facts.rows_together)
        accuracy = HeadAccuracy(facts.accepted, facts.right_if_sure)
        if facts.spec.kind != EAGLE:
            return MedusaHeads(runner, step_time, accuracy, facts.token_ids)
        return EagleHeads(
            runner,
            step_time,
            accuracy,
            facts.token_ids,
            context_length=length,
            max_running=max_running,
        )

    def _tensors(self, *, packed: bool) -> Mapping[str, QuantTensor]:
        """Return all weights; with `packed`, matrices in blocks of 8 bits."""
        tensors = {TABLE: self.table, NUMBERS: numbers_table(self.loaded.facts.spec.depth)}
        for name, tensor in self.loaded.tensors.items():
            fits = len(tensor.shape) == 2 and tensor.shape[1] % _PACKED.block_size == 0
            if packed and fits:
                tensors[name] = QuantTensor.from_floats(tensor.dequantize(), _PACKED)
            else:
                tensors[name] = tensor
        return tensors
