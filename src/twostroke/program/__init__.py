"""The Program: operations, batch shapes, cost and fusions."""

from twostroke.program.batch import BatchShape
from twostroke.program.ops import (
    Add,
    Attention,
    Embed,
    GatedActivation,
    Linear,
    Logits,
    Op,
    RMSNorm,
    Rope,
)
from twostroke.program.program import CacheLayer, Program

__all__ = [
    "Add",
    "Attention",
    "BatchShape",
    "CacheLayer",
    "Embed",
    "GatedActivation",
    "Linear",
    "Logits",
    "Op",
    "Program",
    "RMSNorm",
    "Rope",
]
