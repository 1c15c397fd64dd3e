"""Number formats: layout, exact dequantization, quantization, and their names in GGUF files."""

from __future__ import annotations

from twostroke.quant.bf16 import BF16
from twostroke.quant.f16 import F16
from twostroke.quant.f32 import F32
from twostroke.quant.format import Bytes, Floats, Format
from twostroke.quant.q4_0 import Q4_0
from twostroke.quant.q4_1 import Q4_1
from twostroke.quant.q8_0 import Q8_0
from twostroke.quant.tensor import QuantTensor

__all__ = [
    "FORMATS",
    "FORMATS_BY_GGUF_ID",
    "UNSUPPORTED_GGUF_TYPES",
    "Bytes",
    "Floats",
    "Format",
    "QuantTensor",
]

FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (F32, F16, BF16, Q4_0, Q4_1, Q8_0)}

FORMATS_BY_GGUF_ID: dict[int, Format] = {fmt.gguf_id: fmt for fmt in FORMATS.values()}

# Types that a GGUF file may hold and that cannot be read here: their names make a better error.
UNSUPPORTED_GGUF_TYPES: dict[int, str] = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
