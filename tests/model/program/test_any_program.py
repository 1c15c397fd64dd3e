"""Ranks can also divide Programs of no model family: random operations on random values."""

from __future__ import annotations

import random

import numpy as np

from support.programs import random_tensors
from twostroke.backends.reference import ReferenceBackend
from twostroke.model.program import Op, Program
from twostroke.model.program.mesh import Mesh
from twostroke.model.program.ops import (
    Add,
    Attention,
    Embed,
    GatedActivation,
    Linear,
    Logits,
    RMSNorm,
    Rope,
    Scale,
)

NUM_IDS, DIM = 100, 16
KINDS = ("linear", "linear", "norm", "head norm", "rope", "add", "gated", "scale", "attention")


def random_program(chance: random.Random) -> Program:
    """Return a Program of up to thirty random operations; layers end with attention."""
    ops: list[Op] = [Embed("x", "table", NUM_IDS, 64)]
    widths, layers = {"x": 64}, []
    for number in range(chance.randint(8, 30)):
        output, x = f"v{number}", chance.choice(list(widths)[-6:])
        width = widths[x]
        same = chance.choice([name for name, other in widths.items() if other == width])
        op: Op
        match chance.choice(KINDS):
            case "linear":
                wide = chance.choice((32, 64, 64, 96, 128))
                bias = chance.choice((None, None, f"{output}.bias"))
                op = Linear(output, x, f"{output}.weight", width, wide, bias)
            case "norm":
                op = RMSNorm(output, x, f"{output}.norm", width, 1e-5)
            case "head norm":
                op = RMSNorm(output, x, f"{output}.norm", width, 1e-5, width // DIM)
            case "rope":
                op = Rope(output, x, width // DIM, DIM, (1.0, 0.1), interleaved=False)
            case "add":
                op = Add(output, x, same, width)
            case "gated":
                op = GatedActivation(output, x, same, width)
            case "scale":
                op = Scale(output, x, width, 0.7)
            case _:
                k = chance.choice([name for name, other in widths.items() if width % other == 0])
                v = chance.choice([name for name, other in widths.items() if other == widths[k]])
                heads = width // DIM, widths[k] // DIM
                op = Attention(output, x, k, v, len(layers), *heads, DIM, 0.3)
                layers.append(output)
        ops.append(op)
        widths[output] = op.width
    last = list(widths)[-1]
    ops.append(Logits("logits", last, "head", widths[last], NUM_IDS))
    return Program("any", tuple(ops), NUM_IDS, 256, tuple(layers))


def test_every_value_is_that_of_one_rank() -> None:
    for seed in range(25):
        rng = random.Random(seed)
        program = random_program(rng)
        shares = [tuple(rng.choices((1, 1, 2, 3), k=rng.randint(1, 4))) for _ in range(2)]
        stages = shares[1][: max(1, len(program.layer_outputs))]
        mesh = Mesh(stages, rng.randint(1, 2), shares[0])
        tensors = random_tensors(program)
        tokens = [rng.randrange(NUM_IDS) for _ in range(13)]
        names = list(program.value_widths) if seed % 2 else ["logits"]
        expected = ReferenceBackend(program, tensors, 1, 16).trace(tokens, names)
        ranks = ReferenceBackend(program, tensors, 1, 16, mesh=mesh).trace(tokens, names)
        for name, value in expected.items():
            where, largest = f"{name} of program {seed}, {mesh}", np.abs(value).max()
            np.testing.assert_allclose(ranks[name], value, 1e-3, 1e-3 * largest, err_msg=where)
