"""`EngineRecipe`: everything that is known about an engine before it reads the model's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from twostroke.backends.create import (
    auto_kv_format,
    cost_model,
    create_backend,
    memory_free,
    weight_bytes,
    working_bytes,
)
from twostroke.backends.division import mesh_for
from twostroke.backends.kv_size import size_kv_cache
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import scarcest_memory
from twostroke.model.families import build_program
from twostroke.model.loader import build_tokenizer, load
from twostroke.model.program.kv_layout import DEFAULT_FORMAT
from twostroke.model.program.mesh import ONE_RANK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.backends.interface import Backend
    from twostroke.backends.kv_size import CacheSize
    from twostroke.core.control_groups import MemoryLimit
    from twostroke.core.options import ComputeOptions, EngineOptions
    from twostroke.model.program import Program
    from twostroke.model.program.cost import CostModel
    from twostroke.model.program.mesh import Mesh
    from twostroke.model.tokenizer import Tokenizer
    from twostroke.model.weights import LoadedModel


class EngineRecipe(Frozen):
    """A model's mapped files, its Program, and the options with which an engine runs it.

    In-process engines, engine processes, models on demand, ranks, draft models and the tools of
    `lab` derive sizes, costs and backends from a recipe. No weights are read for it.

    Attributes:
        model: the name or path of the model, as `model.loader.load` takes it.
        options: all options of the engine.
        loaded: the model's files, mapped into memory.
        program: the model's Program.
        mesh: how ranks divide the model.
    """

    model: str
    options: EngineOptions
    loaded: LoadedModel
    program: Program
    mesh: Mesh = ONE_RANK

    @classmethod
    def of(cls, model: str, options: EngineOptions) -> Self:
        """Map the files of `model`, which must be on this machine, and build its Program.

        Raises:
            ModelNotFoundError: the model is not on this machine, or the name is not known.
            ModelFormatError: the model cannot be read, or it cannot run here.
            UsageError: the model cannot be divided over the requested number of ranks.
        """
        loaded = load(model)
        program = build_program(loaded.spec)
        return cls(model, options, loaded, program, mesh_for(options, program))

    def with_options(self, options: EngineOptions) -> Self:
        """Return this recipe with other options, which may also change the division over ranks.

        Raises:
            UsageError: the model cannot be divided over the requested number of ranks.
        """
        return replace(self, options=options, mesh=mesh_for(options, self.program))

    def with_compute(self, compute: ComputeOptions) -> Self:
        """Return this recipe with other compute options."""
        return self.with_options(replace(self.options, compute=compute))

    def without_tokenizer(self) -> Self:
        """Return the recipe without the tokenizer's tables, whose memory can then be freed."""
        return replace(self, loaded=self.loaded.without_tokenizer())

    @property
    def max_rows(self) -> int:
        """The largest number of rows of a step."""
        return self.options.batch.token_budget

    @property
    def weight_bytes(self) -> int:
        """The estimated bytes of memory that the weights take in the format of the backend."""
        return weight_bytes(self.loaded, self.options.compute)

    @property
    def gpu_working_bytes(self) -> int:
        """Bytes of GPU memory that steps need besides weights and KV pages; 0 on other backends."""
        compute = self.options.compute
        if compute.backend != "gpu":
            return 0
        return working_bytes(compute, self.program, self.loaded.tensors, max_rows=self.max_rows)

    def free_bytes(self, max_rows: int | None = None) -> int:
        """Return the bytes that are free for weights and KV pages, on the GPU or in RAM.

        `max_rows`: the largest number of rows of a step, if not the options' token budget.
        """
        return memory_free(
            self.options.compute, self.program, self.loaded.tensors, max_rows or self.max_rows
        )

    def size_kv_cache(
        self, available_bytes: int | None = None, *, max_rows: int | None = None
    ) -> CacheSize:
        """Return the KV cache size for an engine in one process.

        The reference backend's ranks are one process, too.

        Args:
            available_bytes: memory for weights and KV pages; None for all that is free now.
            max_rows: the largest number of rows of a step, if not the options' token budget.

        Raises:
            UsageError, MemoryLimitError: as the function `size_kv_cache`.
        """
        measures_memory = available_bytes is None and self.options.compute.backend != "gpu"
        return self.size_part_of_kv_cache(
            self.weight_bytes,
            self.free_bytes(max_rows) if available_bytes is None else available_bytes,
            max_rows=max_rows,
            group_limit=scarcest_memory() if measures_memory else None,
        )

    def size_part_of_kv_cache(
        self,
        num_weight_bytes: int,
        available_bytes: int,
        *,
        parts: Sequence[Program] = (),
        max_rows: int | None = None,
        group_limit: MemoryLimit | None = None,
    ) -> CacheSize:
        """Return the KV cache size for the ranks of one machine, by the function `size_kv_cache`.

        Args:
            num_weight_bytes: bytes that the weights of these ranks take.
            available_bytes: the machine's free memory before weights and KV pages are allocated.
            parts: the Programs of these ranks; without them, one process runs the whole Program.
            max_rows: the largest number of rows of a step, if not the options' token budget.
            group_limit: the control group that limits `available_bytes`, for error messages.
        """
        options = self.options
        return size_kv_cache(
            self.program,
            options.cache,
            max_rows or self.max_rows,
            num_weight_bytes,
            available_bytes,
            max_running=options.batch.effective_max_running,
            auto_format=auto_kv_format(options.compute),
            parts=parts,
            mesh=self.mesh,
            group_limit=group_limit,
        )

    def build_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, with the chat template that the options name, if any.

        Raises:
            ModelFormatError: the tokenizer cannot be read, or has more tokens than the model.
            UsageError: there is no chat template of that name.
        """
        return build_tokenizer(self.loaded, self.options.chat_template)

    def cost_model(self, kv_format: str = DEFAULT_FORMAT) -> CostModel:
        """Return the model's cost model: bytes and FLOPs of its operations on the backend."""
        backend = self.options.compute.backend
        return cost_model(self.program, self.loaded.tensors, kv_format, backend)

    def create_backend(
        self,
        size: CacheSize,
        *,
        progress: Callable[[int, int], None] | None = None,
        share_threads_with: Backend | None = None,
        tapped_value: str | None = None,
        embeds: bool = False,
    ) -> Backend:
        """Create the backend in this process, and load the model's weights into it.

        The arguments are documented at the function `create_backend`.
        """
        return create_backend(
            self.loaded.tensors,
            self.program,
            self.options.compute,
            size,
            release=self.loaded.release,
            progress=progress,
            share_threads_with=share_threads_with,
            tapped_value=tapped_value,
            embeds=embeds,
            mesh=self.mesh,
            packed_source=self.loaded.file_stamp,
            max_rows=self.max_rows,
        )
