"""A model that can say its first tokens only."""

from __future__ import annotations

import numpy as np
import pytest

from support.programs import PROGRAMS, VOCAB_SIZE, random_tensors
from twostroke.backends.reference import ReferenceBackend
from twostroke.models import narrow

TOKENS = [3, 200, 17, 249, 8, 8, 100]


@pytest.mark.parametrize("name", ["biases", "head norms"])  # a tied table, and one of its own
def test_logits_are_the_first_ones(name: str) -> None:
    program = PROGRAMS[name]
    tensors = random_tensors(program)
    whole = ReferenceBackend(program, tensors, num_pages=1, page_size=16).score(TOKENS)
    narrowed, left = narrow(program, tensors, 40)
    found = ReferenceBackend(narrowed, left, num_pages=1, page_size=16).score(TOKENS)
    assert found.shape == (len(TOKENS), 40)
    np.testing.assert_allclose(found, whole[:, :40], atol=1e-5)
    assert left.keys() == narrowed.weight_shapes.keys()


def test_a_model_with_no_more_tokens_stays_as_it_is() -> None:
    program = PROGRAMS["biases"]
    tensors = random_tensors(program)
    narrowed, left = narrow(program, tensors, VOCAB_SIZE)
    assert narrowed is program
    assert left == tensors
