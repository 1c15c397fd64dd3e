"""Steps take external input rows and return hidden states, equally on all backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from support.cpu import LEVELS
from support.native import load_level
from support.tiny import write_tiny_gguf
from twostroke.backends.cpu import CpuBackend
from twostroke.backends.reference import ReferenceBackend
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import Slice, StepPlan
from twostroke.model.families import build_program
from twostroke.model.families.heads import (
    KINDS,
    NUMBERS,
    TABLE,
    build_heads,
    heads_for,
    last_hidden,
)
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_path, numbers_table

if TYPE_CHECKING:
    from twostroke.model.weights import LoadedModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_path(write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


def cpu(level: str, *args: Any, **named: Any) -> CpuBackend:
    library = load_level(level)
    if level == "amx" and library.ts_linear_request_tiles() == 0:
        pytest.skip("the operating system refuses tiles")
    return CpuBackend(*args, 2, level=level, **named)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_heads_compute_what_the_reference_does(model: LoadedModel, level: str, kind: str) -> None:
    depth = 4
    spec = heads_for(model.spec, kind, num_tokens=64, depth=depth, ffn_size=96, window=24)
    program = build_heads(spec)
    rng = np.random.default_rng(2)
    tensors = {
        name: QuantTensor.from_floats(
            (rng.standard_normal(shape) / 8).astype(np.float32), FORMATS["F32"]
        )
        for name, shape in program.weight_shapes.items()
    } | {TABLE: model.tensors[TABLE], NUMBERS: numbers_table(depth)}
    tapped_value = last_hidden(program)
    right = ReferenceBackend(program, tensors, 8, 16, tapped_value=tapped_value)
    tested = cpu(level, program, tensors, 8, 16, tapped_value=tapped_value)
    params = SamplingParams(temperature=0, logprobs=0)
    for start, count in ((0, 5), (5, 1), (6, 3), (9, 30), (39, 1)):
        pieces = []
        for number in range(2):
            tokens = [int(t) for t in rng.integers(0, depth if kind == "medusa" else 200, 40)]
            pages = [[4 * number + index for index in range(3)]]
            request = Request(str(number), tokens[: start + count], 0, params, 0, pages=pages)
            pieces.append(Slice(request, start, count, samples=True))
        rows = rng.standard_normal((2 * count, model.spec.hidden_size)).astype(np.float32)
        plan = StepPlan(tuple(pieces), external=rows)
        expected, result = right.run(plan), tested.run(plan)
        assert expected.hidden is not None
        assert result.hidden is not None
        assert result.hidden.shape == (2, model.spec.hidden_size)
        np.testing.assert_allclose(result.hidden, expected.hidden, atol=0.02, rtol=0.02)
    tested.close()


@pytest.mark.parametrize("level", LEVELS)
def test_tapped_values_of_drawn_rows_are_in_the_plans_order(model: LoadedModel, level: str) -> None:
    program = build_program(model.spec)
    backend = cpu(level, program, model.tensors, 8, 16, tapped_value=last_hidden(program))
    plain = cpu(level, program, model.tensors, 8, 16)
    params = SamplingParams(temperature=0)
    tokens = list(range(20, 32))
    prompt = Request("prompt", tokens, 12, params, 0, pages=[[0]])
    output = Request("output", tokens, 4, params, 0, pages=[[1]])
    silent = Request("silent", tokens, 12, params, 0, pages=[[2]])
    parts = (
        Slice(prompt, 0, 12, samples=True),
        Slice(silent, 0, 5, samples=False),
        Slice(output, 0, 12, samples=True, drafts=(50, 51)),
    )
    result = backend.run(StepPlan(parts))
    hidden = result.hidden
    assert hidden is not None
    assert hidden.shape == (4, model.spec.hidden_size)
    name = last_hidden(program)
    first = backend.trace(tokens, [name])[name][-1]
    np.testing.assert_allclose(hidden[0], first, atol=2e-2, rtol=2e-2)
    followed = backend.trace([*tokens, 50, 51], [name], generated=True)[name][-3:]
    np.testing.assert_allclose(hidden[1:], followed, atol=2e-2, rtol=2e-2)
    # To show them changes nothing: each step draws what it draws without.
    without = plain.run(StepPlan(tuple(replace(part) for part in parts)))
    assert without.hidden is None
    assert without.tokens == result.tokens
    np.testing.assert_array_equal(backend.score(tokens), plain.score(tokens))
    backend.close()
    plain.close()
