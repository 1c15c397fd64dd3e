"""Shortens a model: removes the layers whose removal changes its output least."""

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

_NUM_ROUNDS = 4  # layers are removed over several rounds
_REPORT_INTERVAL = 10


def shortened(spec: ModelSpec, layers: Sequence[int]) -> ModelSpec:
    """Return the specification of a model with only these layers of a full model."""
    window = spec.window
    if window is not None:
        window = replace(window, slides=tuple(window.slides[layer] for layer in layers))
    rotates = spec.rotates and tuple(spec.rotates[layer] for layer in layers)
    return replace(spec, num_layers=len(layers), window=window, rotates=rotates)


def names_in_full_model(names: Sequence[str], layers: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield the name of each weight of a shortened model, with its name in the full model."""
    for name in names:
        layer, dot, rest = name.removeprefix("blk.").partition(".")
        is_layer = name.startswith("blk.")
        yield name, f"blk.{layers[int(layer)]}{dot}{rest}" if is_layer else name


def choose_layers(
    spec: ModelSpec,
    tensors: Mapping[str, QuantTensor],
    sequences: Sequence[Sequence[int]],
    count: int,
    report: Callable[[str], None],
) -> list[int]:
    """Return the indices of the `count` layers to keep in a shortened model, ascending.

    In each round, the model is run without each single layer. The layers whose absence changes the
    distributions for `sequences` least (KL divergence) are removed. Several rounds are needed,
    because the importance of a layer depends on the other layers.
    """
    full_model = TorchModel(build_program(spec), tensors)
    remaining = list(range(spec.num_layers))
    with torch.no_grad():
        expected = _ShortenedModel(full_model, spec, sequences, remaining).log_probabilities()
        for rounds_left in range(_NUM_ROUNDS, 0, -1):
            num_dropped = -(-(len(remaining) - count) // rounds_left)
            if not num_dropped:
                continue
            before = _ShortenedModel(full_model, spec, sequences, remaining).states()
            losses = {}
            for index, layer in enumerate(remaining):
                if index % _REPORT_INTERVAL == 0:
                    report(f"layers: left out {index} of {len(remaining)}, each on its own")
                others = [other for other in remaining if other != layer]
                shortened_model = _ShortenedModel(full_model, spec, sequences, others)
                log_probabilities = shortened_model.log_probabilities(index, before[index])
                loss = functional.kl_div(
                    log_probabilities, expected, reduction="batchmean", log_target=True
                )
                losses[layer] = float(loss)
            dropped = sorted(losses, key=losses.__getitem__)[:num_dropped]
            remaining = [layer for layer in remaining if layer not in dropped]
            names = ", ".join(map(str, sorted(dropped)))
            report(f"layers: {len(remaining)} of {spec.num_layers} remain, without {names}")
    return remaining


class _ShortenedModel:
    """A model with some layers left out, whose output on token sequences is compared."""

    def __init__(
        self,
        full_model: TorchModel,
        spec: ModelSpec,
        sequences: Sequence[Sequence[int]],
        layers: Sequence[int],
    ) -> None:
        self._program = build_program(shortened(spec, layers))
        names = names_in_full_model(list(self._program.weight_shapes), layers)
        weights = {name: full_model.weights[full_name] for name, full_name in names}
        tokens = torch.tensor([token for sequence in sequences for token in sequence])
        positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
        keeper = WholeSequences([len(sequence) for sequence in sequences], self._program.ops)
        self._state = TorchStepState(tokens, positions, torch.arange(len(tokens)), weights, keeper)

    def states(self) -> list[Tensor]:
        """Return the shortened model's hidden states before each layer."""
        values = self._run(self._program.ops, {})
        return [values[name] for name in self._layer_inputs[:-1]]

    def log_probabilities(self, at: int = 0, states: Tensor | None = None) -> Tensor:
        """Return the log-probabilities of the next token: (rows, vocabulary).

        With the `states` before layer `at`, only layer `at` and later layers are computed.
        """
        ops, values = self._program.ops, {}
        if states is not None:
            first_input = self._layer_inputs[at]
            begin = next(i for i, op in enumerate(ops) if op.output == first_input) + 1
            ops, values = ops[begin:], {first_input: states}
        return self._run(ops, values)[ops[-1].output].log_softmax(1)

    @property
    def _layer_inputs(self) -> list[str]:
        """The names of the states before each layer, and after the last layer, in the Program."""
        ops, embeds = self._program.ops, (Embed, Scale)
        first = next(i for i, op in enumerate(ops) if not isinstance(op, embeds))
        return [ops[first - 1].output, *self._program.layer_outputs]

    def _run(self, ops: Sequence[Op], values: dict[str, Tensor]) -> dict[str, Tensor]:
        for op in ops:
            values[op.output] = apply(op, values, self._state)
        return values
