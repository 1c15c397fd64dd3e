"""The mixes of number formats that `quantize --to` names, as other programs expect them in GGUF."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.errors import TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.lab.compress.grids import GRIDS
from twostroke.model.program import ops
from twostroke.model.quant import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from twostroke.model.program import Program
    from twostroke.model.quant import QuantTensor


class FormatMix(Frozen):
    """The number formats of a GGUF file's matrices under a name such as Q4_K_M.

    Attributes:
        file_type: number of the mix in GGUF files.
        layers: format of the layers' matrices.
        tables: format of embeddings and logits.
        finer: formats with more bits for some kinds of matrices, used only in the layers for which
            `is_finer(layer, num_layers)` is true.
        is_finer: chooses these layers.
    """

    file_type: int
    layers: str
    tables: str = "Q8_0"
    finer: Mapping[str, str] = {}
    is_finer: Callable[[int, int], bool] = lambda layer, count: False  # noqa: ARG005


def _first_eighth(layer: int, count: int) -> bool:
    return layer < count // 8


def _ends_and_each_third(layer: int, count: int) -> bool:
    """Whether a layer is one of the layers with more bits, in a mix such as Q4_K_M.

    These are the first and last eighth of the layers, and every third layer between.
    """
    eighth = count // 8
    return layer < eighth or layer >= 7 * count // 8 or (layer - eighth) % 3 == 2


def _medium(file_type: int, layers: str) -> FormatMix:
    finer = {"attn_v": "Q6_K", "ffn_down": "Q6_K"}
    return FormatMix(file_type, layers, "Q6_K", finer, _ends_and_each_third)


# File types: `llama_ftype` in llama.cpp's include/llama.h. Which layers are finer in the mixes of
# K formats, and FALLBACKS, follow its src/llama-quant.cpp (both as of 2025-11).
MIXES = {
    "f32": FormatMix(0, "F32", "F32"),
    "f16": FormatMix(1, "F16", "F16"),
    "bf16": FormatMix(32, "BF16", "BF16"),
    "q4_0": FormatMix(2, "Q4_0"),
    "q4_1": FormatMix(3, "Q4_1"),
    "q5_0": FormatMix(8, "Q5_0"),
    "q5_1": FormatMix(9, "Q5_1"),
    "q8_0": FormatMix(7, "Q8_0"),
    "iq4_nl": FormatMix(25, "IQ4_NL"),
    "iq4_xs": FormatMix(30, "IQ4_XS", "Q6_K"),
    "q4_k_s": FormatMix(14, "Q4_K", "Q6_K", {"attn_v": "Q5_K", "ffn_down": "Q5_K"}, _first_eighth),
    "q4_k_m": _medium(15, "Q4_K"),
    "q5_k_s": FormatMix(16, "Q5_K", "Q6_K"),
    "q5_k_m": _medium(17, "Q5_K"),
    "q6_k": FormatMix(18, "Q6_K", "Q6_K"),
}

FLOATS = frozenset({"F32", "F16", "BF16"})

# Replaces a format whose super-blocks do not fill a row.
FALLBACKS = {"Q3_K": "IQ4_NL", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def formats_of(
    program: Program, tensors: Mapping[str, QuantTensor], mix: FormatMix
) -> dict[str, str]:
    """Return the number format of each matrix of a model under a mix such as Q4_K_M.

    A matrix whose rows do not fill whole blocks of the format gets a float format.
    """
    num_layers = 1 + max((layer_index(key) for key in tensors if key.startswith("blk.")), default=0)
    formats: dict[str, str] = {}
    for op in program.ops:
        is_table = isinstance(op, ops.Embed | ops.Logits)
        for weight in op.weights:
            if len(weight.shape) != 2:
                continue
            name, width = mix.tables if is_table else mix.layers, weight.shape[-1]
            kind = weight.name.split(".")[-2]
            if kind in mix.finer and mix.is_finer(layer_index(weight.name), num_layers):
                name = mix.finer[kind]
            name = format_for_width(name, width)
            if width % FORMATS[name].block_size:
                name = float_format(tensors[weight.name])
            formats[weight.name] = name
    return formats


def float_format(tensor: QuantTensor) -> str:
    """Return the float format for a matrix that is not rounded.

    It has 16 bits, or 32 if values overflow.
    """
    if tensor.format.name in {"F16", "BF16"}:
        return tensor.format.name
    return "F16" if np.abs(tensor.dequantize()).max() <= np.finfo(np.float16).max else "F32"


def float_matrix_widths(
    formats: Mapping[str, str], tensors: Mapping[str, QuantTensor], mix: FormatMix
) -> dict[str, int]:
    """Return the row widths, by name, of matrices that stay in floats under a mix.

    A matrix stays in floats if its rows do not fill whole blocks. If the mix keeps floats on
    purpose, the result is empty.
    """
    if mix.layers in FLOATS:
        return {}
    return {key: tensors[key].shape[-1] for key, name in formats.items() if name in FLOATS}


def report_float_matrices(
    widths: Mapping[str, int], num_matrices: int, name: str, notice: Callable[[str], None]
) -> None:
    """Tell the user which matrices keep 16 or more bits because blocks do not fill their rows.

    `widths` has the row widths of these matrices, of `num_matrices` in all.

    Raises:
        TwostrokeError: no matrix can be rounded.
    """
    if not widths:
        return
    example, width = next(iter(widths.items()))
    others = f" and {len(widths) - 1} more" if len(widths) > 1 else ""
    verb = "have" if others else "has"
    facts = (
        f"{example}{others} {verb} rows that fill no blocks of {name}, such as "
        f"{counted_noun(width, 'value')}"
    )
    if len(widths) == num_matrices:
        raise TwostrokeError(f"{facts}: no matrix could get smaller.")
    notice(f"{facts}: kept in floats of 16 bits.")


def format_for_width(name: str, width: int) -> str:
    """Return a format, or its replacement if its blocks do not fill rows of `width` values."""
    return FALLBACKS.get(name, name) if width % FORMATS[name].block_size else name


def layer_index(key: str) -> int:
    """Return the number of the layer to which a matrix belongs, by the matrix's name."""
    return int(key.split(".")[1])


def is_rounded(key: str, name: str) -> bool:
    """Whether `quantize` rounds a matrix with calibration.

    The matrix must belong to a layer, and its format `name` must be one of GRIDS.
    """
    return key.startswith("blk.") and name in GRIDS


def file_type_of(tensors: Iterable[QuantTensor]) -> int:
    """Return the GGUF file type of a file with mixed formats, by its most common format.

    The most common format is the format with the most values.
    """
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[tensor.format.name] = counts.get(tensor.format.name, 0) + tensor.num_values
    most_common = max(counts, key=counts.__getitem__)
    return next((mix.file_type for mix in MIXES.values() if mix.layers == most_common), 0)
