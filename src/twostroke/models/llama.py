"""The Llama family: pre-norm decoder, grouped queries, rotary positions, gated feed-forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.models.blocks import decoder, pre_norm_layer
from twostroke.models.family import Family

if TYPE_CHECKING:
    from twostroke.models.spec import ModelSpec
    from twostroke.program import Program


def program(spec: ModelSpec) -> Program:
    """Build the Program of a Llama model (arXiv:2302.13971, 2307.09288)."""
    return decoder(spec, pre_norm_layer)


LLAMA = Family(program=program, model_types=("llama",), interleaves=True)
