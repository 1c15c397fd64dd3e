"""gpt-oss models with experts in MXFP4, as OpenAI published them (`quant_method` mxfp4).

A stack of experts' matrices has `NAME_blocks` uint8 (experts, outputs, inputs / 32, 16), with two
E2M1 codes in a byte, the first in the low bits. It has `NAME_scales` uint8 (experts, outputs,
inputs / 32): one E8M0 code for 32 inputs. Source: the Microscaling formats specification of the
OCP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec.structs import replace

from twostroke.core.errors import ModelFormatError
from twostroke.core.frozen import Frozen
from twostroke.model.quant import QuantTensor, grouped

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.weights.tensors import StoredArray, WeightFiles

_BLOCKS: Final = "_blocks"
_SCALES: Final = "_scales"
_GROUP: Final = 32  # inputs that share a scale
_FORMAT: Final = grouped(4, _GROUP, "e8m0", table="e2m1")
_MAX_NAME_CHARS: Final = 80


class Mxfp4Layout(Frozen):
    """How gpt-oss models store their experts: a tensor of codes and one of scales for each stack.

    It is no `QuantLayout`, because it has stacks in place of modules.
    """

    def assemble(self, file: str, files: WeightFiles) -> WeightFiles:
        """Replace the codes and scales of each stack by one tensor.

        Raises:
            ModelFormatError: there is no such stack, or its tensors contradict each other.
        """
        stacks = [name for name in files.arrays if name.endswith(_BLOCKS)]
        if not stacks:
            raise ModelFormatError(
                f"{file!r} has no quantized weights, which its quantization_config asks for."
            )
        tensors = dict(files.tensors)
        used: set[str] = set()
        for blocks in stacks:
            name = blocks.removesuffix(_BLOCKS)
            scales = name + _SCALES
            if scales not in files.arrays:
                raise ModelFormatError(
                    f"{file!r} lacks tensor {scales[:_MAX_NAME_CHARS]!r}, the scales of "
                    f"{blocks[:_MAX_NAME_CHARS]!r}."
                )
            tensors[name] = _stack(file, blocks, files.arrays[blocks], files.arrays[scales])
            used |= {blocks, scales}
        unsupported = {name: kind for name, kind in files.unsupported.items() if name not in used}
        return replace(files, tensors=tensors, unsupported=unsupported, arrays={})


def mxfp4_layout(config: Fields) -> Mxfp4Layout:
    """Return the layout of a gpt-oss model; it does not depend on the settings in `config`."""
    del config
    return Mxfp4Layout()


def _stack(file: str, name: str, blocks: StoredArray, scales: StoredArray) -> QuantTensor:
    """Join a stack's codes and scales to a tensor (experts, outputs, inputs) of our MXFP4 format.

    In this format the scale of each group precedes the group's codes.
    """
    shape = blocks.values.shape
    if (
        len(shape) != 4
        or shape[3] != _GROUP // 2
        or scales.values.shape != shape[:3]
        or {blocks.dtype, scales.dtype} - {"U8", "F8_E8M0"}
    ):
        raise ModelFormatError(
            f"{file!r} contradicts itself: tensor {name[:_MAX_NAME_CHARS]!r} has the shape "
            f"{[*shape]} and scales of {[*scales.values.shape]}, not (experts, outputs, groups, "
            f"{_GROUP // 2}) bytes and a scale of a byte for each group."
        )
    groups = np.concatenate([scales.values[..., None], blocks.values], axis=3)
    data = groups.reshape(shape[0] * shape[1], -1)
    return QuantTensor(_FORMAT, (shape[0], shape[1], shape[2] * _GROUP), data)
