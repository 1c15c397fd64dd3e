"""The norm behind the last layer, for rows that have no logits and whose states are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.errors import BackendError
from twostroke.program import RMSNorm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from twostroke.program import Program
    from twostroke.quant import QuantTensor


class LastNorm:
    """Makes of a Program's last hidden states what its logits are computed from.

    A kernel that computes logits does this itself, of its rows alone. A row's result does not
    depend on how many there are.
    """

    def __init__(self, program: Program, tensors: Mapping[str, QuantTensor]) -> None:
        """Take the norm's weight out of `tensors`.

        Raises:
            BackendError: there is no such norm before the logits.
        """
        norms = [op for op in program.ops if op.output == program.last_states]
        if not norms or not isinstance(norms[0], RMSNorm) or norms[0].num_groups != 1:
            raise BackendError(f"{program.name}: its logits are not computed behind a norm of rows")
        self._op = norms[0]
        self._weight = tensors[self._op.weight].dequantize() + np.float64(self._op.offset)

    @property
    def hidden(self) -> str:
        """The value that it reads."""
        return self._op.x

    def __call__(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return normed rows (rows, width)."""
        wide = rows.astype(np.float64)
        with np.errstate(all="ignore"):  # what is not finite is told by who reads it
            mean_square = np.mean(wide * wide, axis=1, keepdims=True)
            normed = wide / np.sqrt(mean_square + self._op.epsilon) * self._weight
            return np.asarray(normed, np.float32)
