"""What `--to` names: the format of each matrix, as programs that read GGUF files expect it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.compress.grids import GRIDS
from twostroke.core.errors import TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.program import ops
from twostroke.quant import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from twostroke.program import Program
    from twostroke.quant import QuantTensor


class Mix(Frozen):
    """Formats by kind of matrix; `file_type` is the mix's number in GGUF files.

    Matrices of a kind in `finer` have its format in layers that `is_finer(layer, num_layers)`
    chooses, all other matrices of layers have `layers`, embeddings and logits `tables`.
    """

    file_type: int
    layers: str
    tables: str = "Q8_0"
    finer: Mapping[str, str] = {}
    is_finer: Callable[[int, int], bool] = lambda layer, count: False  # noqa: ARG005


def _first_eighth(layer: int, count: int) -> bool:
    return layer < count // 8


def _ends_and_each_third(layer: int, count: int) -> bool:
    """The first and the last eighth of the layers, and each third one between them."""
    eighth = count // 8
    return layer < eighth or layer >= 7 * count // 8 or (layer - eighth) % 3 == 2


def _medium(file_type: int, layers: str) -> Mix:
    finer = {"attn_v": "Q6_K", "ffn_down": "Q6_K"}
    return Mix(file_type, layers, "Q6_K", finer, _ends_and_each_third)


# File types: `llama_ftype` in llama.cpp's include/llama.h. Which layers are finer in the mixes of
# K formats, and FALLBACKS, follow its src/llama-quant.cpp (both as of 2025-11).
MIXES = {
    "f32": Mix(0, "F32", "F32"),
    "f16": Mix(1, "F16", "F16"),
    "bf16": Mix(32, "BF16", "BF16"),
    "q4_0": Mix(2, "Q4_0"),
    "q4_1": Mix(3, "Q4_1"),
    "q5_0": Mix(8, "Q5_0"),
    "q5_1": Mix(9, "Q5_1"),
    "q8_0": Mix(7, "Q8_0"),
    "iq4_nl": Mix(25, "IQ4_NL"),
    "iq4_xs": Mix(30, "IQ4_XS", "Q6_K"),
    "q4_k_s": Mix(14, "Q4_K", "Q6_K", {"attn_v": "Q5_K", "ffn_down": "Q5_K"}, _first_eighth),
    "q4_k_m": _medium(15, "Q4_K"),
    "q5_k_s": Mix(16, "Q5_K", "Q6_K"),
    "q5_k_m": _medium(17, "Q5_K"),
    "q6_k": Mix(18, "Q6_K", "Q6_K"),
}

# What takes the place of a format whose super-blocks do not fill a row.
FALLBACKS = {"Q3_K": "IQ4_NL", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def formats_of(program: Program, tensors: Mapping[str, QuantTensor], mix: Mix) -> dict[str, str]:
    """Return the format of each matrix; TwostrokeError if rows do not fill whole blocks."""
    num_layers = 1 + max((layer_of(key) for key in tensors if key.startswith("blk.")), default=0)
    formats: dict[str, str] = {}
    for op in program.ops:
        is_table = isinstance(op, ops.Embed | ops.Logits)
        for weight in op.weights:
            if len(weight.shape) != 2:
                continue
            name, width = mix.tables if is_table else mix.layers, weight.shape[-1]
            kind = weight.name.split(".")[-2]
            if kind in mix.finer and mix.is_finer(layer_of(weight.name), num_layers):
                name = mix.finer[kind]
            formats[weight.name] = fitting(name, width)
            if width % FORMATS[formats[weight.name]].block_size:
                raise TwostrokeError(
                    f"{weight.name} has rows of {width} values, not a multiple of "
                    f"{formats[weight.name]}'s {FORMATS[formats[weight.name]].block_size}."
                )
    return formats


def fitting(name: str, width: int) -> str:
    """Return a format, or what takes its place where rows of `width` do not fill its blocks."""
    return FALLBACKS.get(name, name) if width % FORMATS[name].block_size else name


def layer_of(key: str) -> int:
    """Return the number of the layer that a matrix belongs to."""
    return int(key.split(".")[1])


def is_rounded(key: str, name: str) -> bool:
    """Whether a matrix is rounded for its inputs: those of layers, in a format of GRIDS."""
    return key.startswith("blk.") and name in GRIDS


def file_type_of(tensors: Iterable[QuantTensor]) -> int:
    """Return the number of the mix that is named after the format of most values."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[tensor.format.name] = counts.get(tensor.format.name, 0) + tensor.num_values
    most = max(counts, key=counts.__getitem__)
    return next((mix.file_type for mix in MIXES.values() if mix.layers == most), 0)
