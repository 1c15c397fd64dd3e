"""A model that can say the first of its tokens only: for guesses, which need not be any word.

Source: FR-Spec (arXiv:2502.14856), which takes a corpus's most frequent tokens. The first ids of a
vocabulary made by merging pairs are about those: the pair that was found most often was merged
first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from twostroke.program import Logits
from twostroke.quant import QuantTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.program import Program

_TABLE: Final = "narrow_output.weight"


def narrow(
    program: Program, tensors: Mapping[str, QuantTensor], num_tokens: int
) -> tuple[Program, dict[str, QuantTensor]]:
    """Return a Program with logits for the first `num_tokens` tokens, and its weights.

    They are the ones given, but for the table of logits, of which the first rows are left.
    """
    logits = program.ops[-1]
    assert isinstance(logits, Logits), "a Program ends with its logits"
    chosen = {name: tensors[name] for name in program.weight_shapes}
    if num_tokens >= logits.width:
        return program, chosen
    table = chosen[logits.weight]
    chosen[_TABLE] = QuantTensor(
        table.format, (num_tokens, logits.in_width), table.data[:num_tokens]
    )
    ops = (*program.ops[:-1], replace(logits, weight=_TABLE, width=num_tokens))
    narrowed = replace(program, ops=ops)
    return narrowed, {name: chosen[name] for name in narrowed.weight_shapes}
