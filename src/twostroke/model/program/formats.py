"""The formats in which keys and values can be stored, by the names that users give them.

The reference and torch backends store f32; users cannot choose it.
"""

from __future__ import annotations

from typing import Final

from twostroke.model.program import FLOAT16, CacheFormat

FORMATS: Final = {
    "f32": CacheFormat(4),
    "f16": FLOAT16,
    "bf16": CacheFormat(2),
    "int8": CacheFormat(1, head_bytes=2),  # a float16 scale
    "int16": CacheFormat(2, head_bytes=2),  # a bfloat16 scale; for the cpu backend
    "fp8": CacheFormat(1, head_bytes=2),  # E4M3, with such a scale; for the gpu backend
}
DEFAULT_FORMAT: Final = "f16"
