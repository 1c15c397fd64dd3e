"""AWQ models, as AutoAWQ writes them in its version `gemm`.

A module has `qweight` int32 (inputs, outputs / 8), `qzeros` int32 (groups, outputs / 8) and
`scales` (groups, outputs). A word holds the codes of 8 outputs, four bits each; from the lowest
bits on, they are outputs 0, 2, 4, 6, 1, 3, 5, 7. A value is `scale * (code - zero)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.model.weights.published.groups import CodedMatrix
from twostroke.model.weights.published.module import unpack_words

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from twostroke.model.families.fields import Fields
    from twostroke.model.quant import Bytes
    from twostroke.model.weights.published.module import Module

# The position in a word of each of its 8 outputs.
_POSITION_OF_OUTPUT = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])


class AwqLayout(Frozen):
    """How AWQ folders store a quantized matrix; `group_size` inputs share a scale."""

    group_size: int

    parts = ("qweight", "qzeros", "scales")

    def read(self, module: Module) -> CodedMatrix:
        """Return the codes, scales and zero points of an AWQ module.

        Raises ModelFormatError if the module's tensors contradict each other.
        """
        words = module.array("qweight", ("I32",))
        inputs, outputs = words.shape[0], words.shape[1] * 8
        num_groups = -(-inputs // self.group_size)
        packed = module.array("qzeros", ("I32",))
        if packed.shape != (num_groups, words.shape[1]):
            raise module.wrong_shape("qzeros", (num_groups, words.shape[1]))
        return CodedMatrix(
            codes=_unpack(words).T,
            bits=4,
            scales=module.scales("scales", (num_groups, outputs)).transposed(),
            zeros=_unpack(packed).T,
            group_of=np.arange(inputs) // self.group_size,
        )


def awq_layout(config: Fields) -> AwqLayout:
    """Read the AWQ settings of a config.json; raise ModelFormatError for unsupported values."""
    version = config.text("version", default="gemm")
    if version.lower() != "gemm":
        config.refuse("version", "which is not supported; supported: gemm")
    for key, supported_value in (("bits", 4), ("zero_point", True)):
        config.expect(key, supported_value)
    size = config.integer("group_size", 1 << 20, low=-1, default=128)
    return AwqLayout(size if size > 0 else 1 << 20)


def _unpack(words: NDArray[Any]) -> Bytes:
    codes = unpack_words(words, 4, words.shape[1] * 8)
    return codes.reshape(len(words), -1, 8)[:, :, _POSITION_OF_OUTPUT].reshape(len(words), -1)
