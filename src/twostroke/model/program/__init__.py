"""The Program: a model's operations, the shapes of batches, and the layout of keys and values."""

from twostroke.model.program.batch import BatchShape
from twostroke.model.program.kv_layout import FLOAT16, CacheFormat, CacheGroup, CacheLayer
from twostroke.model.program.ops import Activation, Op
from twostroke.model.program.program import Program

__all__ = [
    "FLOAT16",
    "Activation",
    "BatchShape",
    "CacheFormat",
    "CacheGroup",
    "CacheLayer",
    "Op",
    "Program",
]
