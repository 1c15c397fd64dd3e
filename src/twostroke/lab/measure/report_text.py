"""Text of reports: numbers with their leading digits, and names of a Program's fused operations."""

from __future__ import annotations

from math import floor, log10
from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke.model.program import Op, Program


def format_number(value: float) -> str:
    """Return a number as text with at least three significant digits, such as 0.0123."""
    if not value:
        return "0"
    return f"{value:,.{max(1, 2 - floor(log10(abs(value))))}f}"


def format_ms(seconds: float) -> str:
    """Return a time as text in milliseconds, without the unit."""
    return format_number(seconds * 1e3)


class OperationLabel(Frozen):
    """The name and the layer of a fused operation, such as "norm attn_q,k,v rope" and 0.

    `layer` counts from 0. It is None for operations outside layers, and for sums over all layers.
    """

    name: str
    layer: int | None = None

    def __str__(self) -> str:
        """Return the operation's name, with the layer in brackets if there is one."""
        return self.name if self.layer is None else f"{self.name} [{self.layer}]"


def operation_labels(
    program: Program, fused_ops: Sequence[tuple[Op, ...]]
) -> Iterator[OperationLabel]:
    """Yield a label for each fused operation of a Program, in order."""
    layer_by_output: dict[str, int] = {}
    layer = 0
    for op in program.ops:
        layer_by_output[op.output] = layer
        layer += op.output in program.layer_outputs
    for ops in fused_ops:
        layer = layer_by_output[ops[0].output]
        is_outside = layer == len(program.layer_outputs) or not ops[0].inputs
        yield OperationLabel(_joined_name(ops), None if is_outside else layer)


def _joined_name(ops: Sequence[Op]) -> str:
    """Return one name for fused operations, such as "attn_q,k,v" for attn_q, attn_k and attn_v.

    Names of matrices with the same prefix (`attn`) are grouped.
    """
    matrix_indices = [
        index for index, op in enumerate(ops) if any(weight.is_divided for weight in op.weights)
    ]
    first_matrix = matrix_indices[0] if matrix_indices else len(ops)
    suffixes_by_prefix: dict[str, list[str]] = {}
    for op in ops[first_matrix:]:
        prefix, _, suffix = op.label.partition("_")
        suffixes = suffixes_by_prefix.setdefault(prefix, [])
        if suffix not in suffixes:
            suffixes.append(suffix)
    joined = [
        f"{prefix}_{','.join(suffixes)}".rstrip("_")
        for prefix, suffixes in suffixes_by_prefix.items()
    ]
    return " ".join([*(op.label for op in ops[:first_matrix]), *joined])
