"""The norm after the last layer, for rows whose states are wanted without logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.errors import BackendError
from twostroke.program import ops

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from twostroke.program import Program
    from twostroke.quant import QuantTensor


class LastNorm:
    """Norms a Program's last hidden states, as its logits do.

    The kernel for logits norms its own rows only. A row's result does not depend on the number of
    rows.
    """

    def __init__(self, program: Program, tensors: Mapping[str, QuantTensor]) -> None:
        """Take the norm's weight out of `tensors`.

        Raises:
            BackendError: the logits are not computed from a norm.
        """
        norms = [op for op in program.ops if op.output == program.last_states]
        if not norms or not isinstance(norms[0], ops.RMSNorm) or norms[0].num_groups != 1:
            raise BackendError(f"{program.name}: its logits are not computed from a norm of rows.")
        self._op = norms[0]
        self._weight = tensors[self._op.weight].dequantize() + np.float64(self._op.offset)

    @property
    def hidden(self) -> str:
        """The value that it reads."""
        return self._op.x

    def __call__(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return normed rows (rows, width)."""
        wide = rows.astype(np.float64)
        with np.errstate(all="ignore"):  # readers check for numbers that are not finite
            mean_square = np.mean(wide * wide, axis=1, keepdims=True)
            normed = wide / np.sqrt(mean_square + self._op.epsilon) * self._weight
            return np.asarray(normed, np.float32)
