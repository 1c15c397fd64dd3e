"""Model families: each turns a `ModelSpec` into a `Program`; similar families share a file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from twostroke.model.families.blocks import decoder
from twostroke.model.families.deepseek import DEEPSEEK2
from twostroke.model.families.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from twostroke.model.families.exaone4 import EXAONE4
from twostroke.model.families.family import Family
from twostroke.model.families.gemma import GEMMA2, GEMMA3
from twostroke.model.families.gemma4 import GEMMA4
from twostroke.model.families.glm import GLM4_MOE
from twostroke.model.families.gpt_oss import GPT_OSS
from twostroke.model.families.granite import GRANITE
from twostroke.model.families.granite_hybrid import GRANITE_HYBRID
from twostroke.model.families.hunyuan import HY_V3
from twostroke.model.families.kimi_linear import KIMI_LINEAR
from twostroke.model.families.lfm2 import LFM2, LFM2_MOE
from twostroke.model.families.llama import LLAMA, PHI3, SEED_OSS
from twostroke.model.families.llama4 import LLAMA4
from twostroke.model.families.mellum import MELLUM
from twostroke.model.families.minimax import MINIMAX_M2
from twostroke.model.families.ministral import MISTRAL3
from twostroke.model.families.muse import MUSE_GLIMMER
from twostroke.model.families.nemotron_h import NEMOTRON_H, NEMOTRON_H_MOE
from twostroke.model.families.olmo2 import OLMO2
from twostroke.model.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from twostroke.model.families.qwen35 import QWEN3_NEXT, QWEN35, QWEN35_MOE
from twostroke.model.families.smollm3 import SMOLLM3
from twostroke.model.families.spec import ExpertSpec, ModelSpec, RopeSpec, WindowSpec

if TYPE_CHECKING:
    from twostroke.model.program import Program

# By GGUF's `general.architecture`.
ARCHITECTURES: dict[str, Family] = {
    "llama": LLAMA,
    "deepseek2": DEEPSEEK2,
    "ernie4_5": ERNIE4_5,
    "ernie4_5-moe": ERNIE4_5_MOE,
    "exaone4": EXAONE4,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
    "glm4moe": GLM4_MOE,
    "gpt-oss": GPT_OSS,
    "granite": GRANITE,
    "granitehybrid": GRANITE_HYBRID,
    "hy_v3": HY_V3,
    "kimi-linear": KIMI_LINEAR,
    "lfm2": LFM2,
    "lfm2moe": LFM2_MOE,
    "llama4": LLAMA4,
    "mellum": MELLUM,
    "minimax-m2": MINIMAX_M2,
    "mistral3": MISTRAL3,
    "muse-glimmer": MUSE_GLIMMER,
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H_MOE,
    "olmo2": OLMO2,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3moe": QWEN3_MOE,
    "qwen3next": QWEN3_NEXT,
    "qwen35": QWEN35,
    "qwen35moe": QWEN35_MOE,
    "seed_oss": SEED_OSS,
    "smollm3": SMOLLM3,
}

# GGUF's name for each `model_type` of config.json.
MODEL_TYPES: dict[str, str] = {
    model_type: name for name, family in ARCHITECTURES.items() for model_type in family.model_types
}


def build_program(spec: ModelSpec) -> Program:
    """Build the Program of a model; its architecture must be one of `ARCHITECTURES`."""
    family = ARCHITECTURES[spec.architecture]
    scale = math.sqrt(spec.hidden_size) if family.scales_embedding else spec.embedding_scale
    return decoder(spec, family.layer, embedding_scale=scale)


__all__ = [
    "ARCHITECTURES",
    "MODEL_TYPES",
    "ExpertSpec",
    "Family",
    "ModelSpec",
    "RopeSpec",
    "WindowSpec",
    "build_program",
]
