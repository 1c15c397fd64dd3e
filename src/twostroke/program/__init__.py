"""The Program: operations, batch shapes, and cost."""

from twostroke.program.batch import BatchShape
from twostroke.program.ops import Activation, Op
from twostroke.program.pages import FLOAT16, CacheFormat, CacheGroup, CacheLayer
from twostroke.program.program import Program

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
