"""Number formats of weights: layouts, dequantization, quantization, and names in files."""

from __future__ import annotations

from twostroke.model.quant.floats import BF16, F16, F32
from twostroke.model.quant.format import Bytes, Floats, Format
from twostroke.model.quant.fp4 import MXFP4, NVFP4
from twostroke.model.quant.fp8 import e4m3, e4m3_tensor
from twostroke.model.quant.grouped import KERNEL_FORMATS, assemble, grouped
from twostroke.model.quant.iq_quants import (
    CODEBOOKS,
    IQ1_M,
    IQ1_S,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    IQ4_XS,
)
from twostroke.model.quant.k_quants import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, TQ1_0, TQ2_0
from twostroke.model.quant.legacy_quants import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from twostroke.model.quant.tensor import QuantTensor

__all__ = [
    "FORMATS",
    "FORMATS_BY_GGUF_ID",
    "FORMATS_BY_KERNEL_ID",
    "UNSUPPORTED_GGUF_TYPES",
    "Bytes",
    "Floats",
    "Format",
    "QuantTensor",
    "assemble",
    "e4m3",
    "e4m3_tensor",
    "grouped",
]

_FLOATS = (F32, F16, BF16)
_BLOCKS = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, NVFP4)
_SUPER_BLOCKS = (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, TQ1_0, TQ2_0)
_CODEBOOKS = (IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S)

FORMATS: dict[str, Format] = {
    fmt.name: fmt for fmt in (*_FLOATS, *_BLOCKS, *_SUPER_BLOCKS, *_CODEBOOKS)
}

FORMATS_BY_GGUF_ID: dict[int, Format] = {
    fmt.gguf_id: fmt for fmt in FORMATS.values() if fmt.gguf_id is not None
}

# Formats that kernels pack without conversion.
FORMATS_BY_KERNEL_ID: dict[int, Format] = {
    fmt.kernel_id: fmt
    for fmt in (*FORMATS.values(), *KERNEL_FORMATS, *(book.format for book in CODEBOOKS))
    if fmt.to_kernel is None
}

# Other types of GGUF files, with their names for errors.
UNSUPPORTED_GGUF_TYPES: dict[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    41: "Q1_0",
}
