"""GPTQ models, as AutoGPTQ and GPTQModel write them, and AutoRound's models with this layout.

A module has `qweight` int32 (words of inputs, outputs) with the codes of 32 / bits inputs in a
word, `qzeros` int32 (groups, words of outputs), `scales` (groups, outputs) and `g_idx` int32
(inputs): the group of each input. A value is `scale * (code - zero)`. The first version of the
layout stores each zero point minus one; `gptq_v2` stores it unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.model.weights.published.awq import AwqLayout, awq_layout
from twostroke.model.weights.published.groups import CodedMatrix
from twostroke.model.weights.published.module import num_words, unpack_words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from numpy.typing import NDArray

    from twostroke.model.families.fields import Fields
    from twostroke.model.quant import Bytes
    from twostroke.model.weights.published.module import Module

PARTS = ("qweight", "qzeros", "scales", "g_idx")

_BITS = range(2, 9)
_WORD_OF_ONES = {
    2: 0x5555_5555,
    4: 0x1111_1111,
    8: 0x0101_0101,
}  # a one in each code
# The GPTQ version of each of AutoRound's layouts; None means the layout of AWQ.
_PACKING_VERSIONS = {
    "auto": 1,
    "auto_round:gptq": 1,
    "auto_round:auto_gptq": 1,
    "auto_round": 2,
    "auto_round:gptqmodel": 2,
    "auto_round:awq": None,
    "auto_round:auto_awq": None,
}


class GptqLayout(Frozen):
    """How GPTQ models store a quantized matrix, with the sizes that config.json names.

    `bits` and `group_sizes` have all values that a module may have: first the model's default, then
    the values of single modules. The shapes of a module's tensors show which values it has.
    """

    bits: tuple[int, ...]
    group_sizes: tuple[int, ...]
    version: int

    parts = PARTS

    def read(self, module: Module) -> CodedMatrix:
        """Return the codes, scales and zero points of a GPTQ module.

        Raises ModelFormatError if the module's tensors contradict each other.
        """
        words = module.array("qweight", ("I32",))
        shape = module.shape("scales")
        if len(shape) != 2:
            raise module.fault("scales", f"has the shape {[*shape]}, not 2 dimensions")
        num_groups, outputs = shape
        bits = self._bits(module, words.shape[0], outputs)
        inputs = words.shape[0] * 32 // bits
        if words.shape[1] != outputs:
            raise module.wrong_shape("qweight", (words.shape[0], outputs))
        packed = module.array("qzeros", ("I32",))
        if packed.shape != (num_groups, num_words(outputs, bits)):
            raise module.wrong_shape("qzeros", (num_groups, num_words(outputs, bits)))
        return CodedMatrix(
            codes=unpack_words(words.T, bits, inputs),
            bits=bits,
            scales=module.scales("scales", (num_groups, outputs)).transposed(),
            zeros=self._zeros(packed, bits, outputs).T,
            group_of=self._group_of(module, inputs, num_groups),
        )

    def _bits(self, module: Module, num_rows: int, outputs: int) -> int:
        """Return the first configured number of bits that fits a module's tensors."""
        packed = module.array("qzeros", ("I32",))
        inputs = module.array("g_idx", ("I32",), 1).size if module.has("g_idx") else None
        for bits in self.bits:
            fits = num_rows * 32 % bits == 0 and inputs in {None, num_rows * 32 // bits}
            if fits and packed.shape[1] == num_words(outputs, bits):
                return bits
        bits_text = " or ".join(map(str, self.bits))
        raise module.fault(
            "qweight", f"has not the shape of the {bits_text} bits in its quantization_config"
        )

    def _zeros(self, packed: NDArray[Any], bits: int, outputs: int) -> Bytes:
        if self.version == 2:
            return unpack_words(packed, bits, outputs)
        if bits in _WORD_OF_ONES:
            # Writers subtract one from each code of a word at once, with borrows between codes.
            raised = packed.view(np.uint32) + np.uint32(_WORD_OF_ONES[bits])
            return unpack_words(raised.view(np.int32), bits, outputs)
        return unpack_words(packed, bits, outputs) + np.uint8(1) & np.uint8((1 << bits) - 1)

    def _group_of(self, module: Module, inputs: int, num_groups: int) -> NDArray[Any]:
        sizes = [size for size in self.group_sizes if -(-inputs // size) == num_groups]
        if not sizes:
            expected_groups = -(-inputs // self.group_sizes[0])
            raise module.wrong_shape("scales", (expected_groups, module.shape("scales")[1]))
        if not module.has("g_idx"):
            return np.arange(inputs) // sizes[0]
        groups = module.array("g_idx", ("I32",), 1)
        if not 0 <= groups.min() <= groups.max() < num_groups:
            raise module.fault("g_idx", f"names a group that is not one of 0 to {num_groups - 1}")
        return groups


def gptq_layout(config: Fields) -> GptqLayout:
    """Read the GPTQ settings of a config.json; raise ModelFormatError for unsupported values."""
    version = config.text("checkpoint_format", default="gptq")
    if version not in {"gptq", "gptq_v2"}:
        config.refuse("checkpoint_format", "which is not supported; supported: gptq, gptq_v2")
    return _layout(config, 2 if version == "gptq_v2" else 1, "dynamic")


def auto_round_layout(config: Fields) -> GptqLayout | AwqLayout:
    """Read the AutoRound settings of a config.json.

    AutoRound writes folders in the layout of GPTQ or AWQ.
    """
    key = "packing_format"
    packing = config.text(key, default="auto")
    if packing not in _PACKING_VERSIONS:
        config.refuse(key, f"which is not supported; supported: {', '.join(_PACKING_VERSIONS)}")
    version = _PACKING_VERSIONS[packing]
    return _layout(config, version, "extra_config") if version else awq_layout(config)


def _layout(config: Fields, version: int, key: str) -> GptqLayout:
    sizes = [*_sizes(config, key)]
    bits = tuple(dict.fromkeys(bits for bits, _ in sizes))
    return GptqLayout(bits, tuple(dict.fromkeys(size for _, size in sizes)), version)


def _sizes(config: Fields, key: str) -> Iterator[tuple[int, int]]:
    """Yield pairs of (bits, group size): the model's default, then the pairs of single modules."""
    bits, size = _bits(config, None), _group_size(config, None)
    yield bits, size
    overrides = config.part(key)
    for name in [] if overrides is None else overrides.values:
        part = overrides and overrides.part(name)
        if part is not None:
            module_bits = _bits(part, bits)
            if module_bits <= 8:  # modules with 16 bits are not quantized
                yield module_bits, _group_size(part, size)


def _bits(config: Fields, default: int | None) -> int:
    bits = config.integer("bits", 16, default=default) if default else config.integer("bits", 16)
    if bits not in {*_BITS, 16}:
        config.refuse("bits", "which is not supported; supported: 2 to 8")
    return bits


def _group_size(config: Fields, default: int | None) -> int:
    """Return the number of inputs in a quantization group.

    For -1 in the file (all inputs are one group), it is larger than the inputs of any matrix.
    """
    size = config.integer("group_size", 1 << 20, low=-1, default=default or 128)
    return size if size > 0 else 1 << 20
