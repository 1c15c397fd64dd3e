"""The ways in which the comparisons of this folder divide a model, and the models they take."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

from support.tiny import tiny_of, write_tiny_gguf
from support.tiny_families import FAMILIES, families_on
from twostroke.core.distributed_options import ParallelOptions
from twostroke.core.options import (
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    SpeculationOptions,
)
from twostroke.model.program.kv_layout import KV_SPLIT_TOKENS
from twostroke.model.program.mesh import mesh_of
from twostroke.model.program.shard import shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from twostroke.model.program import Program
    from twostroke.model.program.cost import CostModel

PAGE_SIZE = 16
_NUM_STATES = 60  # of models with recurrent layers: a quarter are slots, and the rest more pages
_by_heads = partial(ParallelOptions, kv_shares="heads")
_by_places = partial(ParallelOptions, kv_shares="places")
MESHES: Mapping[str, ParallelOptions] = {
    "one": ParallelOptions(),
    **{f"tensor-{n}": _by_heads(tensor=n) for n in (2, 3, 4)},
    "shares-3,1": _by_heads(tensor=2, shares=(3, 1)),
    "attention-apart": _by_heads(tensor=2, shares=(0, 1), attention_shares=(1, 0)),
    **{f"pipeline-{n}": _by_heads(pipeline=n) for n in (2, 3)},
    **{f"expert-{n}": _by_heads(expert=n) for n in (2, 4)},
    **{f"context-{n}": _by_heads(context=n) for n in (2, 3)},
    "tensor-2-pipeline-2": _by_heads(tensor=2, pipeline=2),
    "tensor-2-context-2": _by_heads(tensor=2, context=2),
    "context-2-pipeline-2": _by_heads(context=2, pipeline=2),
    **{f"places-{n}": _by_places(tensor=n) for n in (2, 3)},
    **{f"places-context-{n}": _by_places(context=n) for n in (2, 3)},
    "places-pipeline-2": _by_places(tensor=2, pipeline=2),
    "places-tensor-2-context-2": _by_places(tensor=2, context=2),
}
TINY = "tiny"  # stands for a random model of each family
_TINY_FORMATS = ("Q4_0", "F32", "Q8_0", "BF16")


def models(names: list[str], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each model's name and where it is; tiny ones are written into `folder`."""
    for name in names:
        if name != TINY and not name.startswith("tiny-"):
            yield name, name
            continue
        for family, fmt in zip(families_on("cpu"), cycle(_TINY_FORMATS)):
            if name in {TINY, f"tiny-{family}"}:
                layers = max(4, FAMILIES[family].sizes.get("num_layers", 0))
                tiny = tiny_of(family, fmt=fmt, num_layers=layers, context_length=1024)
                path = write_tiny_gguf(folder / f"{family}.gguf", tiny)
                yield f"tiny-{family} ({fmt})", str(path)


def suits(mesh: ParallelOptions, program: Program) -> bool:
    """Whether a mesh says something about a model: experts are divided only if there are any."""
    return mesh.expert == 1 or any(op.weights and hasattr(op, "experts") for op in program.ops)


def page_size(mesh: ParallelOptions) -> int:
    """Return the tokens in a page."""
    by_places = mesh.kv_shares == "places"
    return KV_SPLIT_TOKENS * mesh.num_ranks // mesh.pipeline if by_places else PAGE_SIZE


def cache_bytes(mesh: ParallelOptions, cost: CostModel, num_pages: int) -> int:
    """Return the bytes of pages on all ranks together, and of slots for recurrent states.

    The engine gives slots a quarter of these bytes, which may be few requests' slots.
    """
    parts = shard(cost.program, mesh_of(mesh, cost.program))
    page_bytes = sum(part.program.page_bytes(page_size(mesh), cost.cache) for part in parts)
    slot_bytes = sum(part.program.state_bytes for part in parts)
    return num_pages * page_bytes + _NUM_STATES * slot_bytes


def plain(context: int, kv_format: str) -> EngineOptions:
    """Return the options of one process with room for all, without speculation and reuse."""
    cache = CacheOptions(
        context_length=context, page_size=PAGE_SIZE, prefix_cache=False, kv_format=kv_format
    )
    return EngineOptions(ComputeOptions(), cache, speculation=SpeculationOptions("off"))


def crowded(mesh: ParallelOptions, context: int, kv_format: str, **sizes: Any) -> EngineOptions:
    """Return the options of a mesh in which much happens.

    `sizes` are `memory_bytes`, `token_budget` and `drafts`: little memory preempts requests, a
    small budget cuts prompts into chunks, and drafts are always proposed.
    """
    own_size = None if mesh.kv_shares == "places" else PAGE_SIZE
    cache = CacheOptions(sizes["memory_bytes"], context, page_size=own_size, kv_format=kv_format)
    return EngineOptions(
        ComputeOptions(),
        cache,
        BatchOptions(token_budget=sizes["token_budget"]),
        SpeculationOptions("ngram", count=sizes["drafts"]),
        mesh,
    )
