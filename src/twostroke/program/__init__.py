"""The Program: operations, batch shapes, cost and fusions."""

from twostroke.program.batch import BatchShape
from twostroke.program.groups import CacheGroup
from twostroke.program.ops import (
    Activation,
    Add,
    Attention,
    Embed,
    Expert,
    GatedActivation,
    Given,
    Linear,
    Logits,
    MixtureOfExperts,
    Op,
    RMSNorm,
    Rope,
    Scale,
)
from twostroke.program.program import FLOAT16, CacheFormat, CacheLayer, Program

__all__ = [
    "FLOAT16",
    "Activation",
    "Add",
    "Attention",
    "BatchShape",
    "CacheFormat",
    "CacheGroup",
    "CacheLayer",
    "Embed",
    "Expert",
    "GatedActivation",
    "Given",
    "Linear",
    "Logits",
    "MixtureOfExperts",
    "Op",
    "Program",
    "RMSNorm",
    "Rope",
    "Scale",
]
