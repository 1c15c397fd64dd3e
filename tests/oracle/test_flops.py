"""The operations that the cost model counts, beside PyTorch's own counter on the torch reader.

PyTorch counts matrix products alone, and those of attention for all pairs of positions, seen or
not. The models are wide enough for everything else to be less than a hundredth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from support.tiny import tiny_of, write_tiny_gguf
from support.tiny_families import FAMILIES, families_on
from twostroke.backends.torch import TorchModel
from twostroke.model.families import build_program
from twostroke.model.program import ops
from twostroke.model.program.batch import BatchShape
from twostroke.model.program.cost import CostModel
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.model.program import Op

SIZES = {"hidden_size": 512, "ffn_size": 1024, "num_heads": 8, "num_kv_heads": 4}
NUM_TOKENS = 40  # more than the windows of those that have one
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm}


@pytest.mark.parametrize("family", families_on("torch"))
def test_pytorch_counts_the_same_operations(family: str, tmp_path: Path) -> None:
    variant = FAMILIES[family]
    is_said = variant.wide is not None or (variant.num_experts and family != "mixtral")
    sizes = {"ffn_size": 128} if is_said else {}  # as its metadata say
    if variant.wide is not None:
        sizes["hidden_size"] = 4 * SIZES["hidden_size"]  # beside norms of heads
    if variant.channels is not None:
        sizes["num_heads"] = variant.channels.num_heads
        sizes["hidden_size"] = 2 * SIZES["hidden_size"]  # beside decays of channels
    tiny = tiny_of(family, **{**SIZES, **sizes})
    loaded = load_path(write_tiny_gguf(tmp_path / "wide.gguf", tiny))
    program = build_program(loaded.spec)
    model = TorchModel(program, loaded.tensors)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:  # others are not counted
        model.values(torch.arange(NUM_TOKENS))
    counts = counter.get_flop_counts()["Global"]
    products = sum(counts.get(op, 0) for op in PRODUCTS)
    attention = sum(counts.values()) - products
    batch = BatchShape((0,), (NUM_TOKENS,), NUM_TOKENS)  # every row gets logits
    cost = CostModel(program, dict.fromkeys(program.weight_shapes, 0))

    def counted_flops(operation: Op) -> int:
        if isinstance(
            operation, ops.LatentAttention
        ):  # as it is computed, which may not be cheapest
            return 4 * operation.num_heads * operation.head_dim * batch.num_attended()
        return cost.operation(operation, batch).flops

    heads = sum(
        counted_flops(operation)
        for operation in program.ops
        if isinstance(operation, ops.HeadLinear)
    )
    rules = [operation for operation in program.ops if isinstance(operation, ops.GatedDeltaRule)]
    heads += sum(
        4 * operation.num_state_values * NUM_TOKENS for operation in rules
    )  # two products of a row
    products, attention = products + heads, attention - heads  # all are products of batches

    ours = {True: 0, False: 0}
    seen = pairs = 0
    for operation in program.ops:
        is_attention = isinstance(operation, ops.Attention)
        ours[is_attention] += counted_flops(operation)
        if isinstance(operation, ops.Attention):
            seen += operation.width * batch.num_attended(operation.window)
            pairs += operation.width * NUM_TOKENS**2
    assert attention > 0
    assert ours[False] == pytest.approx(products, rel=0.01)
    assert ours[True] == pytest.approx(attention * seen / pairs, rel=0.01)
