"""Variants of a model with cheaper attention, as if the model had been trained so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.message_text import counted_noun
from twostroke.model.program.ops import Attention, Linear

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from twostroke.lab.planner.models import PlannedModel
    from twostroke.model.program import Op

_QUERIES_PER_KEY: Final = 8  # as in Llama 3 70B
_WINDOWS: Final = (4096, 1024)  # tokens, as in Mistral 7B and Gemma 3


def variants(model: PlannedModel, num_tokens: int) -> Iterator[tuple[str, PlannedModel]]:
    """Yield variants of a model with cheaper attention, each after the name of its change.

    A plan shows them as what-ifs. The variants are grouped queries and a sliding window. Only
    variants that make requests of `num_tokens` cheaper are included.
    """
    attention = [op for op in model.program.ops if isinstance(op, Attention)]
    sizes = [(op.num_heads, 2 * op.group_size) for op in attention]
    linear_outputs = {op.output for op in model.program.ops if isinstance(op, Linear)}
    if not all(op.v in linear_outputs for op in attention):  # normed, latent, or shared values
        sizes = []
    is_groupable = all(
        heads % _QUERIES_PER_KEY == 0 and doubled <= _QUERIES_PER_KEY for heads, doubled in sizes
    )
    if is_groupable and sizes:
        yield f"{_QUERIES_PER_KEY} queries for each key", _with_grouped_queries(model)
    window = next((size for size in _WINDOWS if size < num_tokens), None)
    if window is not None and any(window < (op.window or num_tokens) for op in attention):
        yield f"a window of {counted_noun(window, 'token', form=',')}", _with_window(model, window)


def _with_grouped_queries(model: PlannedModel) -> PlannedModel:
    """Return the model with fewer KV heads, and narrower matrices for keys and values."""
    ops, sizes = list(model.program.ops), dict(model.weight_bytes)
    index_by_output = {op.output: index for index, op in enumerate(ops)}
    for index, op in enumerate(ops):
        if not isinstance(op, Attention):
            continue
        num_kv_heads = op.num_heads // _QUERIES_PER_KEY
        ops[index] = replace(op, num_kv_heads=num_kv_heads)
        for output in (op.v, f"{op.v.removesuffix('.v')}.k"):
            if isinstance(product := ops[index_by_output[output]], Linear):
                ops[index_by_output[output]] = replace(product, width=num_kv_heads * op.head_dim)
                for weight in product.weights:
                    sizes[weight.name] = sizes[weight.name] * num_kv_heads // op.num_kv_heads
    return _changed(model, ops, sizes)


def _with_window(model: PlannedModel, window: int) -> PlannedModel:
    """Return the model with attention windows of at most this size."""
    ops = [
        replace(op, window=min(window, op.window or window)) if isinstance(op, Attention) else op
        for op in model.program.ops
    ]
    return _changed(model, ops, model.weight_bytes)


def _changed(model: PlannedModel, ops: list[Op], sizes: Mapping[str, int]) -> PlannedModel:
    program = replace(model.program, ops=tuple(ops))
    origin = model.origin or model
    return replace(model, program=program, weight_bytes=sizes, origin=origin)
