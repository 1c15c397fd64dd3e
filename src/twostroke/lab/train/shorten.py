"""A model without some of its layers, those without which it changes least."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace
from torch.nn import functional

from twostroke.backends.torch import TorchModel
from twostroke.backends.torch.operations import TorchStepState, apply
from twostroke.backends.torch.pages import WholeSequences
from twostroke.model.families import build_program
from twostroke.model.program.ops import Embed, Scale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from twostroke.model.families import ModelSpec
    from twostroke.model.program import Op
    from twostroke.model.quant import QuantTensor

_ROUNDS = 4  # in which layers are left out, some at a time
_REPORT_EVERY = 10


def shortened(spec: ModelSpec, kept: Sequence[int]) -> ModelSpec:
    """Return the facts of a model that has these layers alone."""
    window = spec.window
    if window is not None:
        window = replace(window, slides=tuple(window.slides[layer] for layer in kept))
    return replace(spec, num_layers=len(kept), window=window)


def kept_names(names: Sequence[str], kept: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield each weight of the shorter model with its name in the whole one."""
    for name in names:
        layer, dot, rest = name.removeprefix("blk.").partition(".")
        is_layer = name.startswith("blk.")
        yield name, f"blk.{kept[int(layer)]}{dot}{rest}" if is_layer else name


def choose_layers(
    spec: ModelSpec,
    tensors: Mapping[str, QuantTensor],
    sequences: Sequence[Sequence[int]],
    count: int,
    report: Callable[[str], None],
) -> list[int]:
    """Return the `count` layers to keep.

    In each of some rounds every layer is left out on its own, and those are dropped without which
    the distributions for `sequences` change least (KL divergence). Later layers make up for some
    of what earlier ones did, hence the rounds.
    """
    whole = TorchModel(build_program(spec), tensors)
    kept = list(range(spec.num_layers))
    with torch.no_grad():
        right = _ShortenedModel(whole, spec, sequences, kept).log_probabilities()
        for left in range(_ROUNDS, 0, -1):
            num_dropped = -(-(len(kept) - count) // left)
            if not num_dropped:
                continue
            before = _ShortenedModel(whole, spec, sequences, kept).states()
            losses = {}
            for at, layer in enumerate(kept):
                if at % _REPORT_EVERY == 0:
                    report(f"layers: left out {at} of {len(kept)}, each on its own")
                rest = [other for other in kept if other != layer]
                found = _ShortenedModel(whole, spec, sequences, rest).log_probabilities(
                    at, before[at]
                )
                loss = functional.kl_div(found, right, reduction="batchmean", log_target=True)
                losses[layer] = float(loss)
            dropped = sorted(losses, key=losses.__getitem__)[:num_dropped]
            kept = [layer for layer in kept if layer not in dropped]
            names = ", ".join(map(str, sorted(dropped)))
            report(f"layers: {len(kept)} of {spec.num_layers} remain, without {names}")
    return kept


class _ShortenedModel:
    """A model that has some layers of a whole one, at work on sequences."""

    def __init__(
        self,
        whole: TorchModel,
        spec: ModelSpec,
        sequences: Sequence[Sequence[int]],
        kept: Sequence[int],
    ) -> None:
        self._program = build_program(shortened(spec, kept))
        names = kept_names(list(self._program.weight_shapes), kept)
        weights = {own: whole.weights[name] for own, name in names}
        tokens = torch.tensor([token for one in sequences for token in one])
        places = torch.cat([torch.arange(len(one)) for one in sequences])
        keeper = WholeSequences([len(one) for one in sequences], self._program.ops)
        self._state = TorchStepState(tokens, places, torch.arange(len(tokens)), weights, keeper)

    def states(self) -> list[Tensor]:
        """Return the hidden states before each layer."""
        values = self._run(self._program.ops, {})
        return [values[name] for name in self._borders[:-1]]

    def log_probabilities(self, at: int = 0, states: Tensor | None = None) -> Tensor:
        """Return those of each row's next token; given the `states` before layer `at`, from there.

        What stands before that layer is not computed again.
        """
        ops, values = self._program.ops, {}
        if states is not None:
            border = self._borders[at]
            begin = next(i for i, op in enumerate(ops) if op.output == border) + 1
            ops, values = ops[begin:], {border: states}
        return self._run(ops, values)[ops[-1].output].log_softmax(1)

    @property
    def _borders(self) -> list[str]:
        """Names of the states before the first layer, and after each."""
        ops, embeds = self._program.ops, (Embed, Scale)
        first = next(i for i, op in enumerate(ops) if not isinstance(op, embeds))
        return [ops[first - 1].output, *self._program.layer_outputs]

    def _run(self, ops: Sequence[Op], values: dict[str, Tensor]) -> dict[str, Tensor]:
        for op in ops:
            values[op.output] = apply(op, values, self._state)
        return values
