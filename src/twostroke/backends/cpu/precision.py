"""The precision of a record's activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.backends.cpu.records import OpKind, Precision
from twostroke.core.options import ACTIVATION_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.activation_bits import Bits
    from twostroke.model.program import Op

_BEFORE_ROUTERS: Final = {
    OpKind.LINEAR,
    OpKind.HEAD_PRODUCTS,
    OpKind.GATED,
    OpKind.ATTENTION,
    OpKind.PIECES,
}
_MOST_BITS: Final = max(ACTIVATION_BITS)
_PRECISIONS: Final = dict(
    zip(ACTIVATION_BITS, (Precision.PLAIN, Precision.MIXED, Precision.COARSE), strict=True)
)


def precision_of(kind: OpKind, run: Sequence[Op], bits: Bits, *, has_routers: bool) -> Precision:
    """Return how precise the inputs of a record that computes `run` are.

    With routers, the smallest difference can change the choice of experts. The products of a
    record share prepared inputs, so the one that needs most bits decides; a choice gives products
    of the same value the same number, so that ranks, which compute other parts of a record, agree.
    """
    if has_routers and kind in _BEFORE_ROUTERS:
        return Precision.PRECISE
    if isinstance(bits, int):
        return _PRECISIONS[bits]
    matrices = [weight.name for op in run for weight in op.weights if len(weight.shape) == 2]
    return _PRECISIONS[max((bits.get(name, _MOST_BITS) for name in matrices), default=_MOST_BITS)]
