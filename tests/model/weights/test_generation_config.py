"""Sampling parameters that a model's publisher recommends, and what overrides them."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import asdict

from support.gguf_writer import Typed
from support.tiny import write_tiny_folder, write_tiny_gguf
from twostroke.core.errors import UsageError
from twostroke.core.options import EngineOptions, GenerationOptions
from twostroke.core.sampling import (
    LOCAL_DEFAULTS,
    MODEL_DEFAULT_FIELDS,
    OPENAI_DEFAULTS,
    SamplingParams,
)
from twostroke.model.weights import load_path


def set_values(params: SamplingParams) -> dict[str, float]:
    """Return the values of the parameters that have defaults, without unset ones."""
    values = asdict(params)
    return {name: values[name] for name in MODEL_DEFAULT_FIELDS if values[name] is not None}


QWEN = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
FOLDERS = [
    ({}, {}),
    ({"do_sample": True, **QWEN, "max_new_tokens": 2048}, QWEN),
    ({"do_sample": False, "temperature": None}, {}),
    (
        {"temperature": 1, "top_k": 64.0, "min_p": 0.1},
        {"temperature": 1, "top_k": 64, "min_p": 0.1},
    ),
    ({"temperature": 0.0, "top_k": -1}, {"temperature": 0.0, "top_k": 0}),
    ({"temperature": "high", "top_p": 7, "top_k": 2.5, "min_p": 0.1}, {"min_p": 0.1}),
    ({"temperature": -1, "repetition_penalty": [1.1], "top_p": True}, {}),
]


@pytest.mark.parametrize(("config", "values"), FOLDERS)
def test_a_folder_says_its_sampling_in_generation_config(config, values, tmp_path):
    folder = write_tiny_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **config}))
    assert set_values(load_path(folder).sampling) == values


def test_a_gguf_file_says_its_sampling_in_its_keys(tmp_path):
    metadata = {
        "general.sampling.temp": Typed(6, 0.6),
        "general.sampling.top_k": Typed(5, 20),
        "general.sampling.top_p": Typed(6, 0.95),
        "general.sampling.min_p": Typed(6, 0.0),
        "general.sampling.penalty_repeat": Typed(6, 1.05),
    }
    path = write_tiny_gguf(tmp_path / "tiny.gguf", None, metadata)
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}
    assert set_values(load_path(path).sampling) == {**expected, "repetition_penalty": 1.05}


def test_a_wrong_value_is_left_out_with_a_warning(tmp_path, caplog):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", None, {"general.sampling.top_p": "much"})
    assert set_values(load_path(path).sampling) == {}
    assert "general.sampling.top_p" in caplog.text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {**set_values(LOCAL_DEFAULTS), "temperature": 0.3, "top_k": 7}),
        ({"generation_config": "none"}, set_values(LOCAL_DEFAULTS)),
        ({"generation_config": "openai"}, set_values(OPENAI_DEFAULTS)),
        (
            {"override_generation_config": {"top_k": 9}},
            {**set_values(LOCAL_DEFAULTS), "temperature": 0.3, "top_k": 9},
        ),
        (
            {"generation_config": "openai", "override_generation_config": {"temperature": 0}},
            {**set_values(OPENAI_DEFAULTS), "temperature": 0},
        ),
    ],
)
def test_a_request_gets_what_it_leaves_out(options, expected):
    published = SamplingParams(temperature=0.3, top_k=7)
    defaults = GenerationOptions(**options).defaults(published)
    assert set_values(defaults.fill(SamplingParams())) == expected
    params = SamplingParams(temperature=2, top_p=0.5)
    assert set_values(defaults.fill(params)) == {**expected, "temperature": 2, "top_p": 0.5}


def test_a_protocol_s_own_defaults_come_after_the_model_s():
    published = SamplingParams(temperature=0.3)
    protocol_defaults = SamplingParams(temperature=0.9, top_p=0.9)
    filled = GenerationOptions().defaults(published).fill(SamplingParams(), protocol_defaults)
    assert set_values(filled) == {**set_values(LOCAL_DEFAULTS), "temperature": 0.3, "top_p": 0.9}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"generation_config": "opennai"}, "Did you mean 'openai'"),
        ({"override_generation_config": {"temprature": 1}}, "Did you mean 'temperature'"),
        ({"override_generation_config": {"top_p": 2}}, "top_p must be"),
        ({"override_generation_config": {"top_k": "{x!r}"}}, "top_k must be an integer"),
        ({"override_generation_config": [1]}, "must be an object"),
    ],
)
def test_a_wrong_option_is_refused(options, reason):
    with pytest.raises(UsageError, match=reason.replace("(", r"\(")):
        EngineOptions(generation=GenerationOptions(**options))
