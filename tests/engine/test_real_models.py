"""Real models fill gaps, embed texts, and answer after a budget of reasoning."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from support import family_templates
from twostroke import LLM, EngineOptions, SamplingParams
from twostroke.core.options import CacheOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OPTIONS = EngineOptions(cache=CacheOptions(context_length=512))


@pytest.mark.models
def test_a_code_model_fills_a_gap_and_stops_at_the_suffix(
    real_model: Callable[[str], Path],
) -> None:
    params = SamplingParams(temperature=0, max_tokens=48)
    with LLM(real_model("qwen2.5-coder-1.5b"), OPTIONS) as llm:
        before = "function average(numbers) {\n  let sum = 0;\n"
        result = llm.generate(before, params, suffix="\n  return sum / numbers.length;\n}\n")[0][0]
    assert "sum += numbers[i];" in result.text
    assert "return" not in result.text
    assert result.finish_reason.value == "stop"


@pytest.mark.model
def test_sentences_of_similar_meaning_have_similar_vectors(smollm2_path: Path) -> None:
    pairs = [
        ("How do I sort a list in Python?", "Ways to order the elements of a Python list"),
        ("The doctor prescribed antibiotics.", "A physician gave me medicine against it."),
        ("It will rain tomorrow in the north.", "Showers are expected in the north next day."),
    ]
    with LLM(smollm2_path, OPTIONS) as llm:
        vectors = np.array(
            [embedding.vector for embedding in llm.embed([t for pair in pairs for t in pair])]
        )
    similarities = vectors @ vectors.T - 2 * np.eye(len(vectors))
    assert similarities.argmax(axis=1).tolist() == [1, 0, 3, 2, 5, 4]


@pytest.mark.model
def test_an_answer_follows_the_budget_of_reasoning(smollm2_path: Path) -> None:
    """SmolLM2 with a template that opens its reasoning."""
    options = replace(OPTIONS, chat_template=family_templates.ALWAYS_THINKS)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=64)
    with LLM(smollm2_path, options) as llm:
        encode = llm.engine.card.tokenizer.encode_exact
        [free] = llm.chat(messages, params)
        [limited] = llm.chat(messages, replace(params, reasoning_budget=6))
        closing = tuple(encode("\n</think>\n\n"))
    assert limited.token_ids[:6] == free.token_ids[:6]
    assert limited.token_ids[6 : 6 + len(closing)] == closing
    assert limited.text.strip()
    assert len(encode(limited.reasoning)) <= 6
