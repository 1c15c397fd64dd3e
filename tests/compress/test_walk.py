"""The walk through a model: memory for one layer at a time, and for no weights that were used."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import numpy as np

from support.tiny import tiny_of, write_tiny_gguf
from twostroke.compress.walk import Stream, round_products
from twostroke.engine.loading import load
from twostroke.models import build_program
from twostroke.program import ops
from twostroke.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from twostroke.compress.round import Moments
    from twostroke.quant import Floats

PIECES = [[5, 9, 3, 7] * 60, [8, 2, 6] * 30]


def test_keys_and_values_of_earlier_layers_take_no_memory(tmp_path: Path) -> None:
    peaks = []
    for num_layers in (2, 12):
        path = write_tiny_gguf(
            tmp_path / f"{num_layers}.gguf", tiny_of("llama", num_layers=num_layers)
        )
        loaded = load(str(path))
        program = build_program(loaded.spec)
        tracemalloc.start()
        stream = Stream(program, PIECES)
        for op in program.ops:
            weights = {w.name: loaded.tensors[w.name].dequantize() for w in op.weights}
            stream.run(op, weights)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]


def test_weights_are_released_once_they_were_used(tmp_path: Path) -> None:
    loaded = load(str(write_tiny_gguf(tmp_path / "tiny.gguf")))
    program, released = build_program(loaded.spec), list[QuantTensor]()

    def release(tensors: Iterable[QuantTensor]) -> None:
        released.extend(tensors)

    def rounded(_: str, weight: Floats, moments: Moments) -> QuantTensor:
        del moments
        return QuantTensor.from_floats(weight, FORMATS["F16"])

    names = [op.weight for op in program.ops if isinstance(op, ops.Linear)]
    found = dict(round_products(program, loaded.tensors, names, PIECES, rounded, release))
    assert list(found) == names
    used = {id(loaded.tensors[w.name]) for op in program.ops[:-1] for w in op.weights}
    assert {id(tensor) for tensor in released} == used
    assert all(np.isfinite(tensor.dequantize()).all() for tensor in found.values())
