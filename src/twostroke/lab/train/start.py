"""Initial weights of heads, chosen so that untrained heads already propose likely tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from twostroke.model.families.heads import EAGLE, NUMBERS, TABLE
from twostroke.model.weights.heads import numbers_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from twostroke.lab.train.lesson import Target
    from twostroke.lab.train.record import RecordedAnswer
    from twostroke.model.families.heads import HeadsSpec
    from twostroke.model.program import Program
    from twostroke.model.quant import QuantTensor

_RIDGE_PENALTY = 50.0
_INITIAL_SCALE = 0.1  # of the outputs of attention and feed-forward


def first_weights(
    spec: HeadsSpec,
    program: Program,
    target: Target,
    tensors: Mapping[str, QuantTensor],
    answers: Sequence[RecordedAnswer],
    seed: int,
) -> dict[str, Tensor]:
    """Return the weights of untrained draft heads that already propose likely tokens.

    Weights that will be trained require gradients. The output matrix is the target's. The two
    projections of an EAGLE head are fitted by least squares to predict the next state. Its layer is
    a scaled-down copy of the target's last layer, if shapes are equal. Medusa blocks begin with
    small outputs.
    """
    generator = torch.Generator().manual_seed(seed)
    last = f"blk.{target.spec.num_layers - 1}."
    weights: dict[str, Tensor] = {}
    for name, shape in program.weight_shapes.items():
        copied = tensors.get(last + name.removeprefix("blk.0."))
        if name == TABLE:
            weights[name] = target.table
            continue
        if name == NUMBERS:
            weights[name] = torch.from_numpy(numbers_table(spec.depth).dequantize())
            continue
        if len(shape) == 1:
            value = target.norm.clone() if name == "output_norm.weight" else torch.ones(shape)
        elif name == "output.weight":
            value = target.head.clone()
        elif spec.kind == EAGLE and copied is not None and copied.shape == shape:
            value = torch.from_numpy(copied.dequantize())
        else:
            value = torch.randn(shape, generator=generator) / (2 * math.sqrt(shape[1]))
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            value *= _INITIAL_SCALE
        weights[name] = value
    if spec.kind == EAGLE:
        weights["fc_given.weight"], weights["fc_embd.weight"] = _fit(target, answers)
    for name, weight in weights.items():
        weight.requires_grad_(name not in (TABLE, NUMBERS))
    return weights


def _fit(target: Target, answers: Sequence[RecordedAnswer]) -> tuple[Tensor, Tensor]:
    """Return two matrices, (width, width), that predict the next hidden state.

    One multiplies the current state, the other the embedding of the next token. They are fitted by
    ridge regression on normalized rows of recorded answers.

    The first matrix is for the state, the second for the embedding.
    """
    width = target.table.shape[1]
    products = torch.eye(2 * width) * _RIDGE_PENALTY
    targets = torch.zeros(2 * width, width)
    for answer in answers:
        states = _normed(torch.from_numpy(answer.hidden).float(), target)
        tokens = torch.from_numpy(answer.tokens).long()[1:-1]
        inputs = torch.cat([states[:-1], _normed(target.table[tokens], target)], dim=1)
        products += inputs.T @ inputs
        targets += inputs.T @ states[1:]
    fitted = torch.linalg.solve(products, targets)
    return fitted[:width].T.contiguous(), fitted[width:].T.contiguous()


def _normed(x: Tensor, target: Target) -> Tensor:
    return functional.rms_norm(x, (x.shape[1],), None, target.spec.norm_epsilon)
