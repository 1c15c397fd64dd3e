"""Examples of every operation, for tests that hold for all operations."""

from __future__ import annotations

from typing import get_args

from twostroke.model.program import Activation
from twostroke.model.program.ops import (
    Add,
    Attention,
    Embed,
    Expert,
    ExpertTerms,
    ExternalInput,
    GatedActivation,
    GatedDeltaRule,
    GateRows,
    HeadLinear,
    Join,
    LatentAttention,
    Linear,
    LocalOp,
    Logits,
    Mamba2,
    MixtureOfExperts,
    QueryRope,
    RMSNorm,
    Rope,
    Route,
    Scale,
    SharedKvAttention,
    ShortConvolution,
    SumTerms,
    TakeColumns,
)

NUM_IDS = 12
EXPERTS = tuple(Expert(f"gate{i}", f"up{i}", f"down{i}") for i in range(6))
BIASED = tuple(
    Expert(f"gate{i}", f"up{i}", f"down{i}", f"gate_b{i}", f"up_b{i}", f"down_b{i}")
    for i in range(6)
)
OPS: tuple[LocalOp, ...] = (
    Embed("out", "table", NUM_IDS, 24),
    ExternalInput("out", 24),
    RMSNorm("out", "x", "w", 24, 1e-5, offset=0.5),
    RMSNorm("out", "x", "w", 32, 1e-5, num_groups=4),
    RMSNorm("out", "x", None, 32, 1e-5, num_groups=4),
    RMSNorm("out", "x", "w", 48, 1e-5, num_groups=3, is_wide=True),
    Linear("out", "x", "w", 24, 40),
    Linear("out", "x", "w", 24, 40, "b"),
    Rope("out", "x", 4, 16, (1.0, 0.1, 0.01), interleaved=False),
    Rope("out", "x", 4, 16, (1.0, 0.1), interleaved=True),
    QueryRope("out", "x", 4, 16, (1.0, 0.1, 0.01), False, 1.0, 0.5, 1 << 14),
    QueryRope("out", "x", 4, 16, (0.0,) * 8, True, 1.0, 0.5, 7, 1),
    Attention("out", "q", "k", "v", 0, 8, 4, 16, 0.3, window=4, soft_cap=5.0),
    Attention("out", "q", "k", "v", 0, 4, 4, 16, 0.3),
    SharedKvAttention("out", "q", "", "", 0, 8, 4, 16, 0.3, window=4),
    Attention("out", "q", "k", "v", 0, 8, 4, 16, 0.3, window=4, sinks="s"),
    Attention("out", "q", "k", "v", 0, 8, 4, 16, 0.3, window=5, is_chunked=True),
    LatentAttention("out", "q", "k", "k", 0, 6, 1, 32, 0.3, rotated=16, key=16, value=32),
    HeadLinear("out", "x", ("w0", "w1", "w2", "w3"), 16, 48, 32, first=16),
    Join("out", "a", "b", 3, 16, 32, 48, first=32),
    GatedActivation("out", "gate", "up", 24, Activation.GELU_TANH),
    GatedActivation("out", "gate", "up", 24, Activation.SWIGLU_OAI),
    GatedActivation("out", "gate", "up", 24, Activation.IDENTITY),
    GatedActivation("out", "gate", "up", 24, Activation.RELU),
    MixtureOfExperts("out", "x", "scores", EXPERTS, 16, 24, 2, normalize=True),
    MixtureOfExperts("out", "x", "scores", BIASED, 16, 24, 2, True, Activation.SWIGLU_OAI),
    ExpertTerms("out", "x", "scores", EXPERTS, 0, 6, 16, 24, 2),
    ExpertTerms("out", "x", "scores", BIASED, 0, 6, 16, 24, 2, Activation.SWIGLU_OAI),
    ExpertTerms("out", "x", "scores", EXPERTS, 0, 6, 16, 24, 2, scales_inputs=True),
    SumTerms("out", "x", "scores", 16, 2, normalize=False),
    SumTerms("out", "x", "scores", 16, 2, normalize=False, scales_inputs=True),
    MixtureOfExperts("out", "x", "scores", EXPERTS, 16, 24, 2, normalize=False, are_shares=True),
    MixtureOfExperts("out", "x", "scores", EXPERTS, 16, 24, 2, normalize=False, scales_inputs=True),
    Route("out", "x", 12, 3, normalize=False, scale=1.5, num_groups=3, num_used_groups=2),
    Route("out", "x", 12, 3, True, 1.5, "b", True, 4, 2, 2),
    Scale("out", "x", 24, 0.7),
    Scale("out", "x", 24, weight="w"),
    Add("out", "a", "b", 24),
    Logits("out", "x", "w", 24, NUM_IDS, soft_cap=3.0),
    TakeColumns("out", "x", 16, 3),
    GateRows("out", "x", "gate", 24),
    ShortConvolution("out", "x", "w", 24, 4, 0),
    ShortConvolution("out", "x", "w", 24, 3, 0, "b", Activation.SILU),
    GatedDeltaRule("out", "x", "a", "b", "rate", "bias", 2, 6, 8, 4, 0),
    GatedDeltaRule("out", "x", "a", "b", "rate", "bias", 2, 6, 8, 4, 0, is_tiled=True),
    GatedDeltaRule("out", "x", "a", "b", "rate", "bias", 4, 4, 20, 12, 0, gates_channels=True),
    Mamba2("out", "x", "step", "rate", "bias", "skip", 6, 2, 8, 4, 0),
    Mamba2("out", "x", "step", "rate", "bias", "skip", 4, 1, 16, 20, 0, 0.5, 1.0),
)
assert {type(op) for op in OPS} == set(get_args(LocalOp)), "an operation has no example"


def input_width(op: LocalOp, name: str) -> int:  # noqa: PLR0911 - a case for each operation
    """Return the width of one of an operation's inputs."""
    if isinstance(op, Attention) and name != op.q:
        return op.num_kv_heads * op.head_dim
    if isinstance(op, MixtureOfExperts | ExpertTerms | SumTerms) and name == op.scores:
        return len(EXPERTS)
    if isinstance(op, ExpertTerms):
        return op.hidden
    if isinstance(op, SumTerms):
        return op.num_used * op.width
    if isinstance(op, GateRows):
        return op.width if name == op.x else 1
    if isinstance(op, GatedDeltaRule):
        width = op.decay_width if name == op.decay else 1
        return op.in_width if name == op.x else op.num_value_heads * width
    if isinstance(op, Mamba2):
        return op.in_width if name == op.x else op.num_heads
    if isinstance(op, TakeColumns):
        return op.first + op.width
    if isinstance(op, HeadLinear):
        return op.num_heads * op.x_head
    if isinstance(op, Join):
        return op.num_heads * (op.a_head if name == op.a else op.b_width)
    return op.in_width if isinstance(op, Linear | Logits) else op.width
