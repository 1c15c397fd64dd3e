"""The Program: operations, batch shapes, and cost."""

from twostroke.program.batch import BatchShape
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
from twostroke.program.pages import FLOAT16, CacheFormat, CacheGroup, CacheLayer
from twostroke.program.program import Program

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
