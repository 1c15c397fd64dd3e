"""Recurrent layers on the torch backend: close to the reference, the same on any schedule."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.programs import MIXERS, VOCAB_SIZE, hybrid_program, random_tensors
from support.row_by_row import RowByRow
from support.schedules import Setting, fresh, random_requests, run_schedule
from twostroke.backends.reference import ReferenceBackend
from twostroke.backends.spans import RowSpan
from twostroke.core.request import NO_STATE
from twostroke.engine.scheduler import Continuous
from twostroke.model.program import Activation, Program
from twostroke.model.program.ops import ExternalInput, GatedDeltaRule, ShortConvolution

torch = pytest.importorskip("torch", reason="no PyTorch here")
torch.set_num_threads(1)

from twostroke.backends.torch import TorchBackend  # noqa: E402 - needs PyTorch
from twostroke.backends.torch.recurrent import (  # noqa: E402
    RecurrentStep,
    TorchStateSlots,
    gated_delta_rule,
    short_convolution,
)

if TYPE_CHECKING:
    from twostroke.model.program import Op

NUM_PAGES, NUM_STATES, CONTEXT = 300, 80, 500
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tiled": {"is_tiled": True},
    "odd": {"num_value_heads": 2, "key_dim": 10, "value_dim": 23, "kernel": 1},
    "convolution": {"mixer": "convolution", "has_bias": True},
    "mamba": {"mixer": "mamba"},
    "odd mamba": {"mixer": "mamba", "num_groups": 3, "state_size": 10, "head_dim": 23}
    | {"min_step": 0.3, "max_step": 0.9},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_values_are_those_of_the_reference(shape: str) -> None:
    program = hybrid_program(**SHAPES[shape])
    tensors = random_tensors(program)
    names = [op.output for op in program.ops]
    tokens = np.random.default_rng(5).integers(0, VOCAB_SIZE, 150).tolist()
    expected = ReferenceBackend(program, tensors, 50, 16).trace(tokens, names)
    actual = TorchBackend(program, tensors, 50, 16).trace(tokens, names)
    for name in names:
        np.testing.assert_allclose(actual[name], expected[name], 1e-2, 1e-3, err_msg=name)


@pytest.mark.parametrize(
    ("attends", "mixer"),
    [((False, False), "delta"), *(((False, False, True, False), mixer) for mixer in MIXERS)],
)
def test_tokens_are_those_of_the_reference_on_any_schedule(
    attends: tuple[bool, ...], mixer: str
) -> None:
    program = hybrid_program(attends, mixer)
    tensors = random_tensors(program)
    chance = random.Random(7)
    requests = random_requests(chance, 8, VOCAB_SIZE, longest=50, most_output=20)
    settings = [Setting.chosen_by(chance, 5, 10) for _ in range(2)]
    settings.append(Setting(5, 64, 32, prefix_cache=True, policy=Continuous()))
    reference = RowByRow(program, tensors, NUM_PAGES, 16, num_states=NUM_STATES)
    expected, _ = run_schedule(
        reference, settings[0].alone(NUM_PAGES), [fresh(request) for request in requests], CONTEXT
    )
    backend = TorchBackend(program, tensors, NUM_PAGES, 16, num_states=NUM_STATES)
    assert backend.facts.num_states == NUM_STATES
    num_preemptions = 0
    for setting in settings:
        copies = [fresh(request) for request in chance.sample(requests, len(requests))]
        answers, count = run_schedule(backend, setting, copies, CONTEXT)
        tokens = {name: answer[0] for name, answer in answers.items()}
        assert tokens == {name: answer[0] for name, answer in expected.items()}, setting
        num_preemptions += count
    assert num_preemptions > 0


class Layer:
    """A recurrent operation whose requests are computed in steps of chosen row counts."""

    def __init__(self, op: Op, width: int) -> None:
        program = Program("one", (*(ExternalInput(name, 1) for name in op.inputs), op), 10, 64)
        self.op, self.width = op, width
        self.slots = TorchStateSlots(program, 20, torch.device("cpu"))
        rng = np.random.default_rng(3)
        self.weights = {
            weight.name: torch.from_numpy(-np.abs(rng.standard_normal(weight.shape, np.float32)))
            for weight in op.weights
        }

    def step(self, spans: list[RowSpan], x: torch.Tensor) -> torch.Tensor:
        recurrent = RecurrentStep(self.slots, spans)
        if isinstance(self.op, ShortConvolution):
            return short_convolution(self.op, x, self.weights, recurrent)
        assert isinstance(self.op, GatedDeltaRule)
        heads = self.op.num_value_heads
        values = x, x[:, :heads].contiguous(), x[:, heads : 2 * heads].contiguous()
        return gated_delta_rule(self.op, values, self.weights, recurrent)


def span(first: int, count: int, read: int, write: int) -> RowSpan:
    """Return a row span without pages."""
    pages = np.zeros((0, 0), np.int64)
    return RowSpan(slice(first, first + count), 0, pages, read_state=read, write_states=(write,))


@pytest.mark.parametrize(
    ("op", "width"),
    [
        (ShortConvolution("out", "x", "w", 40, 4, 0, "b", Activation.SILU), 40),
        (GatedDeltaRule("out", "x", "a", "b", "rate", "bias", 2, 6, 16, 24, 0), 208),
    ],
    ids=["convolution", "delta rule"],
)
def test_rows_do_not_depend_on_the_cut_or_on_other_requests(op: Op, width: int) -> None:
    rng = np.random.default_rng(1)
    rows = [torch.from_numpy(rng.standard_normal((n, width), np.float32)) for n in (70, 9, 33)]
    expected, states = [], []
    for number, x in enumerate(rows):
        layer = Layer(op, width)
        expected.append(layer.step([span(0, len(x), NO_STATE, number)], x))
        states.append(layer.slots.memory[0][number])
    layer, done, slots = Layer(op, width), [0, 0, 0], [NO_STATE] * 3
    results: list[list[torch.Tensor]] = [[], [], []]
    free = list(range(20))
    while done != [len(x) for x in rows]:
        spans, parts, numbers, first = [], [], [], 0
        for number in rng.permutation(3).tolist():
            count = min(int(rng.integers(0, 20)), len(rows[number]) - done[number])
            if not count:
                continue
            write = free.pop()
            spans.append(span(first, count, slots[number], write))
            parts.append(rows[number][done[number] : done[number] + count])
            if slots[number] != NO_STATE:
                free.insert(0, slots[number])
            slots[number] = write
            done[number] += count
            first += count
            numbers.append(number)
        if not spans:
            continue
        output = layer.step(spans, torch.cat(parts))
        for number, part in zip(numbers, spans, strict=True):
            results[number].append(output[part.rows])
    for number in range(3):
        assert torch.equal(torch.cat(results[number]), expected[number])
        assert torch.equal(layer.slots.memory[0][slots[number]], states[number])
