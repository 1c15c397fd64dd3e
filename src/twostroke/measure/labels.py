"""What a person calls the fused operations of a Program, and which layer each belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from twostroke.program import (
    Add,
    Attention,
    Embed,
    GatedActivation,
    Given,
    Linear,
    Logits,
    MixtureOfExperts,
    RMSNorm,
    Rope,
    Scale,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke.program import Op, Program


@dataclass(frozen=True, slots=True)
class Label:
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
        is_outside = layer == len(program.layer_outputs) or isinstance(parts[0], Embed)
        yield Label(_name(parts), None if is_outside else layer)


_WORDS: Final = {
    Given: "given",
    Embed: "embed",
    RMSNorm: "norm",
    Rope: "rope",
    MixtureOfExperts: "experts",
    Scale: "scale",
    Add: "add",
    Logits: "logits",
}


def _name(parts: Sequence[Op]) -> str:
    """Return the parts' words; products of one input are one word, what follows is said once."""
    matrices = [op.weight for op in parts if isinstance(op, Linear)]
    words = [_joined(matrices) if isinstance(op, Linear) else _word(op) for op in parts]
    first = words.index(_joined(matrices)) if matrices else len(words)
    return " ".join([*words[:first], *dict.fromkeys(words[first:])])


def _word(op: Op) -> str:
    match op:
        case Attention(window=window):
            return "attention" if window is None else f"attention({window})"
        case GatedActivation(activation=activation):
            return activation.value
        case _:
            return _WORDS[type(op)]


def _joined(matrices: Sequence[str]) -> str:
    """Return the matrices' last names, what they begin with said once: attn_q,k,v."""
    names = [name.removesuffix(".weight").rpartition(".")[2] for name in matrices]
    shared = f"{names[0].partition('_')[0]}_"
    return ",".join([names[0], *(name.removeprefix(shared) for name in names[1:])])
