"""Intermediate values of a model can be returned, and this changes no result."""

from __future__ import annotations

import numpy as np
import pytest

from support.cpu import LEVELS, cpu_backend, tiny_model
from twostroke.backends.reference import ReferenceBackend

TOKENS = np.random.default_rng(0).integers(0, 250, 600).tolist()


@pytest.fixture(scope="module")
def model():
    return tiny_model(fmt="F32", embedding_fmt="Q8_0", context_length=640)


@pytest.mark.parametrize("level", LEVELS)
def test_every_traced_value_agrees_with_the_reference(level, model):
    program, _ = model
    names = list(program.value_widths)
    expected = ReferenceBackend(*model, 1, 16).trace(TOKENS, names)
    with cpu_backend(model, level, 4) as backend:
        actual = backend.trace(TOKENS, names)
    assert list(actual) == names
    for name in names:
        assert actual[name].shape == (len(TOKENS), program.value_widths[name])
        difference = np.abs(actual[name] - expected[name]).max()
        assert difference < 0.02 * np.abs(expected[name]).max(), name


@pytest.mark.parametrize("generated", [False, True])
def test_tapping_the_layers_does_not_change_the_logits(model, generated):
    with cpu_backend(model, "portable", 4) as backend:
        values = backend.trace(TOKENS, ["x1", "x2", "h0", "logits"], generated=generated)
        assert np.array_equal(values["logits"], backend.score(TOKENS, generated=generated))
        alone = backend.trace(TOKENS[:70], ["x2"], generated=generated)
        assert np.array_equal(alone["x2"], values["x2"][:70])
