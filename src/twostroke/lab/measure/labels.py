"""Readable names of the fused operations of a Program, and their layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke.model.program import Op, Program


class Label(Frozen):
    """A fused operation's name, such as "norm attn_q,k,v rope", and its layer, from 0.

    `layer` is None outside layers, and where all layers are meant.
    """

    name: str
    layer: int | None = None

    def __str__(self) -> str:
        """Return both."""
        return self.name if self.layer is None else f"{self.name} [{self.layer}]"


def labels(program: Program, fused: Sequence[tuple[Op, ...]]) -> Iterator[Label]:
    """Yield a label for each of the Program's `fused` operations, in their order."""
    layer_of: dict[str, int] = {}
    layer = 0
    for op in program.ops:
        layer_of[op.output] = layer
        layer += op.output in program.layer_outputs
    for parts in fused:
        layer = layer_of[parts[0].output]
        is_outside = layer == len(program.layer_outputs) or not parts[0].inputs
        yield Label(_name(parts), None if is_outside else layer)


def _name(parts: Sequence[Op]) -> str:
    """Join the parts' labels; from the first matrix on, each once, and alike ones together."""
    matrices = [place for place, op in enumerate(parts) if any(w.is_divided for w in op.weights)]
    first = matrices[0] if matrices else len(parts)
    words: dict[str, list[str]] = {}  # by their common stem: attn_q,k,v
    for op in parts[first:]:
        stem, _, end = op.label.partition("_")
        ends = words.setdefault(stem, [])
        if end not in ends:
            ends.append(end)
    joined = [f"{stem}_{','.join(ends)}".rstrip("_") for stem, ends in words.items()]
    return " ".join([*(op.label for op in parts[:first]), *joined])
