"""Operations that the gpu backend lacks are refused by their names."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from support.programs import PROGRAMS
from twostroke.core.errors import BackendError
from twostroke.model.program.ops import Attention

pytest.importorskip("triton", reason="no Triton here")


def test_sinks_biases_of_experts_and_the_clamped_activation_are_refused() -> None:
    from twostroke.backends.gpu.lower import lower

    def refusal(kind: str) -> str:
        program = PROGRAMS[kind]
        if kind != "sinks":
            ops = [
                replace(op, sinks=None) if isinstance(op, Attention) else op for op in program.ops
            ]
            program = replace(program, ops=tuple(ops))
        with pytest.raises(BackendError) as caught:
            lower(program)
        return str(caught.value)

    assert "the gpu backend does not compute attention sinks yet; `--back" in refusal("sinks")
    assert "does not add biases of experts yet" in refusal("experts with biases")


def test_chunks_and_scaled_inputs_of_experts_are_refused() -> None:
    from twostroke.backends.gpu.lower import lower

    program = PROGRAMS["chunks and experts"]
    with pytest.raises(BackendError, match="does not compute chunked attention yet"):
        lower(program)
    ops = [replace(op, is_chunked=False) if isinstance(op, Attention) else op for op in program.ops]
    with pytest.raises(BackendError, match="does not scale the inputs of experts yet"):
        lower(replace(program, ops=tuple(ops)))
