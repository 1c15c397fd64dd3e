"""A model as it would be if it had been trained with other attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.model.program.ops import Attention, Linear

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from twostroke.lab.planner.models import PlannedModel
    from twostroke.model.program import Op

_QUERIES: Final = 8  # for each key and value, as in Llama 3 70B
_WINDOWS: Final = (4096, 1024)  # tokens, as in Mistral 7B and Gemma 3


def variants(model: PlannedModel, num_tokens: int) -> Iterator[tuple[str, PlannedModel]]:
    """Yield the model with grouped queries and with a window, each with what is changed.

    Only what would make requests of `num_tokens` cheaper.
    """
    attention = [op for op in model.program.ops if isinstance(op, Attention)]
    sizes = [(op.num_heads, 2 * op.group_size) for op in attention]
    made = {op.output for op in model.program.ops if isinstance(op, Linear)}
    if not all(op.v in made for op in attention):  # normed, latent, or another layer's
        sizes = []
    if all(heads % _QUERIES == 0 and twice <= _QUERIES for heads, twice in sizes) and sizes:
        yield f"{_QUERIES} queries for each key", _grouped(model)
    window = next((size for size in _WINDOWS if size < num_tokens), None)
    if window is not None and any(window < (op.window or num_tokens) for op in attention):
        yield f"a window of {window:,} tokens", _windowed(model, window)


def _grouped(model: PlannedModel) -> PlannedModel:
    """Return the model with fewer heads of keys and values, and narrower matrices for them."""
    ops, sizes = list(model.program.ops), dict(model.weight_bytes)
    places = {op.output: place for place, op in enumerate(ops)}
    for place, op in enumerate(ops):
        if not isinstance(op, Attention):
            continue
        count = op.num_heads // _QUERIES
        ops[place] = replace(op, num_kv_heads=count)
        for output in (op.v, f"{op.v.removesuffix('.v')}.k"):
            if isinstance(product := ops[places[output]], Linear):
                ops[places[output]] = replace(product, width=count * op.head_dim)
                for weight in product.weights:
                    sizes[weight.name] = sizes[weight.name] * count // op.num_kv_heads
    return _changed(model, ops, sizes)


def _windowed(model: PlannedModel, window: int) -> PlannedModel:
    """Return the model with windows of at most this size."""
    ops = [
        replace(op, window=min(window, op.window or window)) if isinstance(op, Attention) else op
        for op in model.program.ops
    ]
    return _changed(model, ops, model.weight_bytes)


def _changed(model: PlannedModel, ops: list[Op], sizes: Mapping[str, int]) -> PlannedModel:
    program = replace(model.program, ops=tuple(ops))
    origin = model.origin or model
    return replace(model, program=program, weight_bytes=sizes, origin=origin)
